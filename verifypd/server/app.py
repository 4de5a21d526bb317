"""The routes. Each turns a body into a call on the bridge and a call into an answer; the rest is done elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from verifypd import __version__
from verifypd.config import EngineConfig
from verifypd.server.ask import Prepared
from verifypd.server.bridge import Bridge
from verifypd.server.calls import CallError, unavailable
from verifypd.server.chat_render import ChatRenderer
from verifypd.server.completion_render import CompletionRenderer
from verifypd.server.config import ServerConfig
from verifypd.server.dashboard import add_dashboard
from verifypd.server.gate import Gate, Keys
from verifypd.server.reader import LARGE
from verifypd.server.reference import page as reference_page
from verifypd.server.response_render import ResponsesRenderer
from verifypd.server.responses import ResponsesBody
from verifypd.server.schema import ArchitectureBody, ChatBody, CompletionBody, DetokenizeBody, ErrorBody, TokenizeBody
from verifypd.server.service import Service
from verifypd.server.works import do
from verifypd.server.works import invalid as wrong_form
from verifypd.tokenizer import Tokenizer

REASONS = {
    400: "the request is invalid; `param` names the field",
    401: "the API key is missing or wrong",
    404: "no such model or page",
    405: "the method is not for this path",
    408: "the body did not arrive in time",
    411: "the body has no length",
    413: "the body is too large",
    415: "the body is not JSON, or it is compressed",
    429: "too much is waiting; Retry-After says when to try again",
    431: "the request line and headers, or a line behind the body, are too long",
    500: "the engine failed on this request",
    501: "the body has a transfer coding besides chunked",
    503: "the engine is starting, restarting or shutting down",
}
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in REASONS.items()
}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Verify-PD</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>body{font:16px/1.5 sans-serif;max-width:42em;margin:3em auto;padding:0 1em}code{background:#8882}</style>
<h1>Verify-PD</h1><p>An OpenAI-compatible server with exact speculative decoding.</p>
<ul><li><code>POST /v1/completions</code>, <code>POST /v1/chat/completions</code>,
<code>POST /v1/responses</code></li>
<li><a href="v1/models"><code>GET /v1/models</code></a></li>
<li><code>POST /tokenize</code>, <code>POST /detokenize</code>,
<a href="tokenizer_info"><code>GET /tokenizer_info</code></a></li>
<li><a href="health"><code>/health</code></a>, <a href="ready"><code>/ready</code></a>,
<a href="metrics"><code>/metrics</code></a>, <a href="version"><code>/version</code></a></li>
<li><a href="dashboard">Dashboard</a>: what the server does, live</li>
<li><a href="docs">API documentation</a> (<a href="openapi.json">OpenAPI</a>)</li></ul>
"""


class JsonRequest(Request):
    """Reads JSON with orjson: strict UTF-8, no NaN, bounded depth."""

    async def json(self) -> Any:
        """The body."""
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """Routes that read bodies so. Large ones are left to `app.state.large`, which has the other way by path.

    A HEAD has the headers of its GET. Its body is not even begun: a stream has no end.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with our kind of request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            if request.method == "POST":
                check_form(request)
                large = request.app.state.large.get(self.path)
                if large is not None and len(await request.body()) > LARGE:
                    return await large(request)
            made = await handler(request)
            return bodiless(made) if request.method == "HEAD" else made

        return handle


def bodiless(made: Response) -> Response:
    """The head of an answer."""
    head = Response(status_code=made.status_code)
    head.raw_headers = made.raw_headers
    return head


def check_form(request: Request) -> None:
    """415 for a body that is not plain JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        raise CallError(
            415, "send the body as JSON, with Content-Type: application/json", code="unsupported_media_type"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise CallError(415, "send the body as it is, without Content-Encoding", code="unsupported_encoding")


def json(data: bytes) -> Response:
    """JSON that is written already."""
    return Response(data, media_type="application/json")


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON."""
    return Response(orjson.dumps(value), status, headers, "application/json")


def refusal(request: Request, error: CallError, headers: dict[str, str] | None = None) -> Response:
    """An error in OpenAI's shape. The gate logs its code."""
    request.scope["state"]["error"] = error
    more = dict(headers or {})
    if error.retry_after:
        more["retry-after"] = str(error.retry_after)
    return answer(error.body(), error.status, more)


def make_app(
    engine_config: EngineConfig,
    config: ServerConfig,
    bridge: Bridge,
    tokenizer: Tokenizer | None,
    start: Callable[[], None],
    stop: Callable[[], None],
) -> FastAPI:
    """The application. `start` and `stop` run in its event loop, before the first and after the last request."""
    service = Service(engine_config, config, bridge, tokenizer)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        start()
        service.sweeper.start()
        service.readers.start()
        yield
        await service.readers.close()
        stop()

    app = FastAPI(title="Verify-PD", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.large = {}
    app.state.connection_refused = lambda: service.metrics.refused.labels("too_many_connections").inc()
    add_generation(app, service)
    add_tokens(app, service)
    add_state(app, service)
    add_dashboard(app, service)
    if config.admin_key:
        add_admin(app, service)
    add_heads(app)
    add_errors(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(
        Gate,
        keys=Keys(config.api_key),
        admin=Keys([config.admin_key] if config.admin_key else []),
        max_body=config.body_bytes,
        body_timeout=config.header_timeout,
        count=lambda path, status: service.metrics.http.labels(path, str(status)).inc(),
    )
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origin), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def add_generation(app: FastAPI, service: Service) -> None:
    """Completions, chat and responses."""
    streams = {
        "description": "the answer; with `stream` a series of events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }

    @app.post("/v1/completions", responses={**ERRORS, 200: streams}, response_class=Response, tags=["OpenAI"])
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one prompt or several."""
        return await service.run(request, body, "completion", CompletionRenderer)

    @app.post("/v1/chat/completions", responses={**ERRORS, 200: streams}, response_class=Response, tags=["OpenAI"])
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await service.run(request, body, "chat", ChatRenderer)

    app.state.large["/v1/completions"] = lambda request: service.run_large(request, "completion", CompletionRenderer)
    app.state.large["/v1/chat/completions"] = lambda request: service.run_large(request, "chat", ChatRenderer)
    app.state.large["/v1/responses"] = lambda request: service.run_large(request, "responses", ResponsesRenderer)

    @app.post("/v1/responses", responses={**ERRORS, 200: streams}, response_class=Response, tags=["OpenAI"])
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation in the shape of OpenAI's Responses API. Nothing is stored."""
        return await service.run(request, body, "responses", ResponsesRenderer)

    @app.post("/v1/responses/input_tokens", responses=ERRORS, response_class=Response, tags=["OpenAI"])
    async def input_tokens(request: Request, body: ResponsesBody) -> Response:
        """How many tokens the prompt of such a call has."""
        service.check_model(body.model)
        return counted(do("responses", body, service.desk(request)))

    async def count(request: Request) -> Response:
        return counted((await service.read(request, "responses")).value)

    def counted(prepared: Prepared) -> Response:
        tokens = sum(len(ids) for ids in prepared.ask.prompts)
        return answer({"object": "response.input_tokens", "input_tokens": tokens})

    app.state.large["/v1/responses/input_tokens"] = count

    async def no_response(id: str) -> Response:
        """There is none, as responses are not stored."""
        raise CallError(
            404,
            "this server keeps no responses: what came before is sent again, as items of input",
            code="response_not_found",
            param="id",
        )

    path = "/v1/responses/{id:path}"
    app.get(path, responses=ERRORS, response_class=Response, tags=["OpenAI"])(no_response)
    app.delete(path, include_in_schema=False)(no_response)
    app.post("/v1/responses/{id}/cancel", include_in_schema=False)(no_response)

    def card() -> dict[str, Any]:
        info = service.bridge.info
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "verifypd",
            "root": service.engine_config.model,
            "parent": None,
            "max_model_len": info.get("max_model_len"),
        }

    @app.get("/v1/models", responses=ERRORS, response_class=Response, tags=["OpenAI"])
    async def models() -> Response:
        """The models served."""
        return answer({"object": "list", "data": [card()]})

    @app.get("/v1/models/{id:path}", responses=ERRORS, response_class=Response, tags=["OpenAI"])
    async def model(id: str) -> Response:
        """One of them."""
        service.check_model(id)
        return answer(card())


def add_tokens(app: FastAPI, service: Service) -> None:
    """Text to token ids and back, in vLLM's shapes."""

    def tokenizer() -> Tokenizer:
        if service.tokenizer is None:
            raise CallError(404, "this model has no tokenizer here", code="no_tokenizer")
        return service.tokenizer

    @app.post("/tokenize", responses=ERRORS, response_class=Response, tags=["tokens"])
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        """Token ids of a text or of a conversation, of any length."""
        service.check_model(body.model)
        return json(do("tokenize", body, service.desk(request)))

    @app.post("/detokenize", responses=ERRORS, response_class=Response, tags=["tokens"])
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        """Text of token ids, of no more than a prompt may have."""
        service.check_model(body.model)
        return json(do("detokenize", body, service.desk(request)))

    async def large(request: Request, work: str) -> Response:
        return json((await service.read(request, work)).value)

    app.state.large["/tokenize"] = lambda request: large(request, "tokenize")
    app.state.large["/detokenize"] = lambda request: large(request, "detokenize")

    @app.get("/tokenizer_info", responses=ERRORS, response_class=Response, tags=["tokens"])
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        template = tokenizer().chat_template
        return answer(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **template.variables,
                "chat_template": template.sources.get("default"),
                "bos_token_id": tokenizer().bos_id,
                "eos_token_ids": list(tokenizer().eos_ids),
                "vocab_size": tokenizer().vocab_size,
                "model_max_length": service.bridge.info.get("max_model_len"),
            }
        )


def add_state(app: FastAPI, service: Service) -> None:
    """Whether and how it runs."""

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @app.get("/docs", include_in_schema=False)
    async def reference() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()))

    @app.get("/health", responses=ERRORS, response_class=Response, tags=["state"])
    async def health() -> Response:
        """This process lives."""
        return answer({"status": "ok"})

    @app.get("/ready", responses=ERRORS, response_class=Response, tags=["state"])
    async def ready() -> Response:
        """Requests are welcome."""
        bridge = service.bridge
        if not bridge.ready:
            raise unavailable("draining" if bridge.draining else "the engine is not up", "not_ready")
        return answer({"status": "ready"})

    @app.get("/version", responses=ERRORS, response_class=Response, tags=["state"])
    async def version() -> Response:
        """The version that runs."""
        return answer({"version": __version__})

    text: dict[int | str, dict[str, Any]] = {
        200: {"description": "Prometheus's text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @app.get("/metrics", responses={**ERRORS, **text}, response_class=Response, tags=["state"])
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_admin(app: FastAPI, service: Service) -> None:
    """What an operator may change while it runs."""

    def state() -> Response:
        figures = service.bridge.figures
        names = ("policy", "architecture", "architecture_steps", "switches")
        return answer({name: figures.get(name) for name in names})

    @app.get("/v1/admin/architecture", responses=ERRORS, response_class=Response, tags=["admin"])
    async def architecture() -> Response:
        """The architecture that is set, the one that really plans, and how many steps each has planned."""
        return state()

    @app.post("/v1/admin/architecture", responses=ERRORS, response_class=Response, tags=["admin"])
    async def switch_architecture(body: ArchitectureBody) -> Response:
        """Run under another architecture from the next step on; requests go on, and their texts stay the same."""
        await service.bridge.switch(body.architecture)  # the engine's figures come before its answer
        return state()


def add_heads(app: FastAPI) -> None:
    """HEAD wherever there is a GET, as load balancers ask."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                responses=route.responses,
                response_class=Response,
                tags=route.tags,
                include_in_schema=route.include_in_schema,
            )


def add_errors(app: FastAPI, service: Service) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(CallError)
    async def refused(request: Request, error: CallError) -> Response:
        return refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        told = wrong_form(error.errors())
        if request.scope["path"] in GENERATION:
            service.count(told)
        return refusal(request, told)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
        path = request.scope["path"][:200]
        told = {
            404: ("not_found", f"no {path} here; GET / lists the paths"),
            405: ("method_not_allowed", f"{request.method} is not for {path}: use {headers.get('Allow')}"),
        }
        code, message = told.get(error.status_code, (None, str(error.detail)))
        made = CallError(error.status_code, message, code=code)
        return refusal(request, made, headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document without the 422 it adds: invalid bodies are 400 here."""
    if not app.openapi_schema:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = made
    return app.openapi_schema
