"""What the server tells of itself: speculation, models, tokens, state, metrics."""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.error
import urllib.request

import openai
import pytest

from tests.server.samples import IDS, PROMPT
from tests.server.serving import events
from verifypd.server.dashboard import VIEWERS

pytestmark = pytest.mark.xdist_group("server")

# -- speculation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": IDS}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})],
)
def test_speculation_is_told(server, path, prompt, stream):
    body = {**prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    _, answer, _ = server.post(path, body)
    final = events(answer)[-1] if stream else answer
    spec = final["metrics"]["speculative_decoding"]
    histogram = spec["acceptance_histogram"]
    assert spec["num_spec_tokens"] == 3 and len(histogram) == 4
    assert sum(histogram) == spec["num_spec_steps"] > 0
    assert sum(j * count for j, count in enumerate(histogram)) == spec["num_accepted_draft_tokens"] > 0
    assert spec["draft_acceptance_rate"] == pytest.approx(spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"])
    mean = 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert spec["mean_acceptance_length"] == pytest.approx(mean)


# -- other endpoints ---------------------------------------------------------------------------------------------------


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    assert server.metrics()['verifypd:http_requests_total{path="/v1/models/{id}",status="404"}'] >= 1


def test_a_slash_at_the_end_changes_nothing(server):
    """A redirect would lead to the Host that the client named."""
    for path in ("/v1/models", "/tokenizer_info"):
        assert server.get(path + "/")[1] == server.get(path)[1]
    body = {"prompt": IDS, "max_tokens": 4, "temperature": 0}
    plain, slashed = (server.post(path, body) for path in ("/v1/completions", "/v1/completions/"))
    assert plain[0] == slashed[0] == 200 and plain[1]["choices"] == slashed[1]["choices"]
    with urllib.request.urlopen(f"{server.address}/dashboard/") as page:
        assert page.url == f"{server.address}/dashboard", "its links are relative"


def test_tokens(server, offline):
    tokenizer = offline.get_tokenizer()
    _, body, _ = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT, "return_token_strs": True})
    assert body["tokens"] == tokenizer.encode(PROMPT) and body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 400 and len(body["token_strs"]) == body["count"]
    assert server.post("/detokenize", {"tokens": body["tokens"]})[1] == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/tokenize", {"messages": messages})[1]["tokens"] == offline.render(messages)
    info = server.get("/tokenizer_info")[1]
    assert info["eos_token"] == "</s>" and "messages" in info["chat_template"]


def test_state(server):
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    assert server.get("/version")[1]["version"]
    status, page, _ = server.get("/")
    assert status == 200 and {"docs", "metrics"} <= set(links := re.findall('href="([^"]+)"', page))
    assert all(server.get(f"/{link}")[0] == 200 for link in links if not link.startswith("data:"))
    assert "curl" in server.curl and str(server.port) in server.curl


PAGES = ["/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/models/no"]
PAGES += ["/v1/responses/x", "/tokenizer_info", "/docs", "/openapi.json", "/dashboard", "/dashboard/dashboard.js"]


@pytest.fixture
def connection(server):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as made:
        yield made


@pytest.mark.parametrize("path", PAGES)
def test_head_is_get_without_its_body(connection, path):
    """As load balancers ask, and aiperf of /metrics first. The next request on the connection has its own answer."""
    told = []
    for method in ("GET", "HEAD", "GET"):
        connection.request(method, path)
        answer = connection.getresponse()
        body, headers = answer.read(), dict(answer.getheaders())
        assert headers.pop("x-request-id") and headers.pop("date")
        size = int(headers.pop("content-length"))
        assert size > 10 and len(body) == (0 if method == "HEAD" else size)
        told.append((answer.status, headers))
    assert told[0] == told[1] == told[2]


def test_head_of_a_stream_ends(connection):
    for _ in range(VIEWERS + 1):
        connection.request("HEAD", "/dashboard/events")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("content-type").startswith("text/event-stream")
        assert answer.read() == b""
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'


def test_what_has_no_get_has_no_head(server):
    for method, path, allowed in (("HEAD", "/v1/completions", "POST"), ("DELETE", "/health", "GET, HEAD")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(server.address + path, method=method), timeout=10)
        with refused.value as answer:
            assert answer.code == 405 and answer.headers["allow"] == allowed


def test_metrics_count(server):
    before = server.idle()
    server.complete(IDS, max_tokens=30, temperature=0, ignore_eos=True)
    after = server.idle()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("vllm:generation_tokens_total") == 30 and grown("vllm:prompt_tokens_total") == len(IDS)
    drafts, tokens = grown("vllm:spec_decode_num_drafts_total"), grown("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < drafts <= tokens
    positions = [n for n in after if n.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(map(grown, positions)) == grown("vllm:spec_decode_num_accepted_tokens_total")
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert grown(name + "_count") == 1 and grown(name + "_sum") > 0
    assert grown("vllm:request_time_per_output_token_seconds_count") == 1
    assert grown("vllm:request_prompt_tokens_sum") == len(IDS) and grown("vllm:request_generation_tokens_sum") == 30
    assert grown("verifypd:request_queue_time_seconds_count") == 1
    gaps = grown("verifypd:inter_token_latency_seconds_count")
    assert gaps == 30 - 1 - grown("vllm:spec_decode_num_accepted_tokens_total"), "what a pass gives comes at once"
    assert grown("verifypd:inter_token_latency_seconds_sum") <= grown("vllm:e2e_request_latency_seconds_sum")
    for name in ("verifypd:inter_token_latency_seconds", "verifypd:request_queue_time_seconds"):
        assert grown(name + '_bucket{le="+Inf"}') == grown(name + "_count")
    for name in (
        'verifypd:lane_depth{lane="verify"}',
        'verifypd:lane_wait_seconds{lane="decode",quantile="0.95"}',
        'verifypd:lane_seconds_total{lane="verify"}',
        "verifypd:draft_length_count",
        "verifypd:architecture_switches_total",
        'verifypd:kv_blocks{pool="draft",state="free"}',
        'verifypd:kv_cache_bytes{dtype="float32"}',
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "verifypd:requests_within_slo_total",
        "verifypd:step_seconds_count",
        'verifypd:pauses_total{kind="captured"}',
        'verifypd:pause_seconds_total{kind="collected"}',
    ):
        assert name in after, name


def test_prefix_cache_is_told(server):
    prompt = [11 + i % 50 for i in range(64)]
    server.complete(prompt, max_tokens=1)
    assert server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
