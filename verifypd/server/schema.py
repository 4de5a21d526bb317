"""The bodies clients send, as OpenAI and vLLM name their fields, plus ours. Checks types and ranges only.

Only the first error is told, so a list is left at its first wrong element and an object with too many keys is not
looked into: a large wrong body must not keep the event loop from other clients.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from verifypd.config import ARCHITECTURES

T = TypeVar("T")
MAX_FIELDS = 256  # of one object
MAX_BIASES = 4096
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Listed = Annotated[list[T], Field(fail_fast=True)]
Unsupported = Annotated[Any, Field(description="accepted when it changes nothing; anything else is a 400")]
Parsed = Annotated[Any, Field(description="ignored: OpenAI's client adds it to an answer that goes back")]


def _few(value: Any, most: int) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"{len(value)} keys; give at most {most}")
    return value


class Body(BaseModel):
    """Any request body: a field that is not known is refused by name, unless it is null, which asks for nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: Any) -> Any:
        """Refuse more fields than any body has, before each of them is an error; drop unknown ones that are null."""
        _few(value, MAX_FIELDS)
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {name: given for name, given in value.items() if given is not None or name in cls.model_fields}


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False
    include_obfuscation: StrictBool | None = None


class JsonSchemaFormat(Body):
    """A schema the output must follow."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """OpenAI's `text`, `json_object` and `json_schema`; `regex` and `grammar` (Lark) are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    pattern: StrictStr | None = Field(None, description="for regex")
    grammar: StrictStr | None = Field(None, description="for grammar, in Lark")


class StructuredOutputs(Body):
    """vLLM's way to say the same; one of the four."""

    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: Listed[StrictStr] | None = None
    grammar: StrictStr | None = None


class GenerationBody(Body):
    """What completions and chat completions share."""

    model: StrictStr | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = 1
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[Number, Field(ge=1e-3, le=100)] | None = 1.0
    logit_bias: Annotated[
        dict[StrictStr, Annotated[Number, Field(ge=-100, le=100)]] | None,
        BeforeValidator(lambda value: _few(value, MAX_BIASES)),
    ] = None
    allowed_token_ids: Listed[TokenId] | None = None
    bad_words: Listed[StrictStr] | None = None
    min_tokens: Count | None = 0
    stop: StrictStr | Listed[StrictStr] | None = None
    stop_token_ids: Listed[TokenId] | None = None
    ignore_eos: StrictBool | None = False
    skip_special_tokens: StrictBool | None = True
    include_stop_str_in_output: StrictBool | None = False
    add_special_tokens: StrictBool | None = None
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    truncate_prompt_tokens: Positive | None = None
    return_token_ids: StrictBool | None = False
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Listed[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    # Verify-PD's own
    speculation: StrictBool | None = True
    return_token_origins: StrictBool | None = Field(
        False, description="tell of each output token who wrote it, and which drafted tokens fell there"
    )
    max_draft: Annotated[int, Field(strict=True, ge=0, le=64)] | None = None
    draft_temperature: Annotated[Number, Field(ge=0.1, le=10)] | None = None
    acceptance: Literal["rejection", "coupled"] | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = 0
    slo_ttft: Annotated[Number, Field(gt=0)] | None = Field(None, description="target for the first token, ms")
    slo_tpot: Annotated[Number, Field(gt=0)] | None = Field(None, description="target per further token, ms")
    deadline_ms: Annotated[Number, Field(gt=0, le=86_400_000)] | None = Field(
        None, description="ms, for the whole request; at most a day"
    )
    # accepted; they do not touch the answer
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    guided_decoding_backend: StrictStr | None = None
    request_id: Annotated[str, Field(strict=True, pattern=r"^[!-~]{1,128}$")] | None = Field(
        None, description="goes before the header X-Request-Id"
    )
    # accepted when neutral
    best_of: Unsupported = None
    use_beam_search: Unsupported = None
    length_penalty: Unsupported = None
    early_stopping: Unsupported = None
    spaces_between_special_tokens: Unsupported = None
    detokenize: Unsupported = None
    cache_salt: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: StrictStr | Listed[TokenId] | Listed[StrictStr] | Listed[Listed[TokenId]] = Field(examples=["Hello"])
    echo: StrictBool | None = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    suffix: Unsupported = None


class ContentPart(BaseModel):
    """A part of a message; only text is known."""

    model_config = ConfigDict(extra="allow")

    type: StrictStr
    text: StrictStr | None = None
    refusal: StrictStr | None = None


class FunctionCall(Body):
    """A call the model made."""

    name: StrictStr
    arguments: StrictStr | dict[str, Any] | None = None
    parsed_arguments: Parsed = None


class ToolCall(Body):
    """A call the model made, in an assistant message."""

    id: StrictStr | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall
    index: StrictInt | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | Listed[ContentPart] | None = None
    name: StrictStr | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    parsed: Parsed = None
    audio: Unsupported = None
    annotations: Unsupported = None
    function_call: Unsupported = None


class FunctionDefinition(Body):
    """A function the model may call."""

    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """A function by name."""

    name: StrictStr


class NamedTool(Body):
    """A tool the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool | None = True
    continue_final_message: StrictBool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    echo: StrictBool | None = False
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    reasoning_effort: Unsupported = None
    include_reasoning: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Listed[Message] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = True
    continue_final_message: StrictBool | None = False
    return_token_strs: StrictBool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[Tool] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: StrictStr | None = None
    tokens: Listed[TokenId]


def _architecture(name: str) -> str:
    if name not in ARCHITECTURES:
        raise ValueError(f"{name!r} is not known; choose from {', '.join(ARCHITECTURES)}")
    return name


class ArchitectureBody(Body):
    """`POST /v1/admin/architecture`."""

    architecture: Annotated[StrictStr, AfterValidator(_architecture)] = Field(
        json_schema_extra={"enum": list(ARCHITECTURES)}
    )


class ErrorFields(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer of status 400 and above."""

    error: ErrorFields


# Fields that are taken when they say what happens anyway: the values that do.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "cache_salt": (),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "suffix": ("",),
    "prediction": ({},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
