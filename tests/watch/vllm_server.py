"""A stand-in for vLLM's server: OpenAI's completions as a stream, and /metrics in vLLM's names. Answers word by word.

Run as a program it prints its address. It shares no code with ours, so that whoever talks to it talks to a stranger.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = 'engine="0",model_name="other"'
LOCK = threading.Lock()
COUNTS = {"generation_tokens": 0, "prompt_tokens": 0, "requests": 0, "running": 0}
TTFT: list[float] = []
BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
PACE = 0.004  # s a token


def metrics() -> str:
    with LOCK:
        lines = [
            f"vllm:generation_tokens_total{{{LABELS}}} {COUNTS['generation_tokens']}.0",
            f"vllm:prompt_tokens_total{{{LABELS}}} {COUNTS['prompt_tokens']}.0",
            f"vllm:num_requests_running{{{LABELS}}} {COUNTS['running']}.0",
            f"vllm:num_requests_waiting{{{LABELS}}} 0.0",
            f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.25",
            f'vllm:request_success_total{{{LABELS},finished_reason="length"}} {COUNTS["requests"]}.0',
            f'vllm:request_success_total{{{LABELS},finished_reason="stop"}} 0.0',
        ]
        for bound in BOUNDS:
            count = sum(each <= bound for each in TTFT)
            lines.append(f'vllm:time_to_first_token_seconds_bucket{{{LABELS},le="{bound}"}} {count}.0')
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{{LABELS},le="+Inf"}} {len(TTFT)}.0')
    return "\n".join(["# HELP vllm:generation_tokens_total Tokens.", *lines, ""])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        answers = {
            "/metrics": ("text/plain", metrics()),
            "/v1/models": ("application/json", json.dumps({"object": "list", "data": [{"id": "other"}]})),
            "/version": ("application/json", json.dumps({"version": "0.0-fake"})),
        }
        kind, text = answers.get(self.path, ("text/plain", "nothing here"))
        self._send(200 if self.path in answers else 404, kind, text.encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        begun = time.monotonic()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "speculation" in body or "return_token_origins" in body:
            return self._send(400, "application/json", b'{"error": {"message": "unknown field"}}')
        count = body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with LOCK:
            COUNTS["running"] += 1
        for i in range(count):
            time.sleep(PACE)
            if not i:
                with LOCK:
                    TTFT.append(time.monotonic() - begun)
            last = "length" if i == count - 1 else None
            key = {"delta": {"content": " word"}} if "messages" in body else {"text": " word"}
            self._event({"choices": [{"index": 0, **key, "finish_reason": last}]})
            with LOCK:
                COUNTS["generation_tokens"] += 1
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        with LOCK:
            COUNTS["running"] -= 1
            COUNTS["requests"] += 1
            COUNTS["prompt_tokens"] += 5
        self.close_connection = True
        return None

    def _event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
