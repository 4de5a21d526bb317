"""Our server and vLLM's on one GPU, over HTTP, by one command: starts them, waits until they stream, drives them.

    python benchmarks/serve_beside_vllm.py --peer DIR --arms ours:head vllm:eagle --out out --json results/mixed.json \\
        -- --source mixed --rate 8,16,20 --duration 20 --seeds 3
    python benchmarks/serve_beside_vllm.py --peer DIR --arms ours:plain vllm:plain --out out -- --concurrency 1,8,32
    python benchmarks/serve_beside_vllm.py --tiny --arms ours:plain ours:head --out out -- --quick   # tests this script

Arms are ours:plain (no draft), ours:head, ours:eagle3, ours:tiny1b, ours:auto (a head), vllm:plain, vllm:eagle and
vllm:tiny1b. Settings may follow: `ours:head:controller=fixed,max_draft=4` (any of the engine's), `vllm:eagle:k=2` (any
argument of vLLM's engine). --peer is a folder whose `site/` holds vLLM and what it imports; without it vLLM is imported
from this environment. What follows `--` is for `verifypd bench serve`, which has the last vLLM arm as its reference.
A second `--` begins other traffic for the same servers: reports are then in OUT/1, OUT/2 and so on, and small ones in
JSON's name with -1, -2 and so on.
Weights are random, in the shape of --model, with a tokenizer of numbered words, so that both servers turn tokens into
text; reports say so, and the chance at which drafts are accepted. Servers start one after the other, since ours times
its passes then. vLLM captures the graphs it captures by default. Logs are in OUT/logs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import command_line

from verifypd.bench.arms import OFFLINE, Arm, Setup, ours_settings, parse, peer_model, vllm_settings
from verifypd.bench.provenance import relative
from verifypd.config import parse_bytes
from verifypd.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
NAME = "target"  # that both serve
MAX_LEN, TINY_LEN = 4608, 500  # tokens
START = 400.0  # s a server may take to stream its first answer
STOP = 20.0  # s it may take to end


class Server:
    """One arm as a process of its own, in a session of its own."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: Path, port: int, out: Path
    ) -> None:
        self.name, self.command, self.port, self.log, self.out = name, command, port, log, out
        with log.open("wb") as lines:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def about(self) -> str:
        """How it was started, as `verifypd bench serve --about` takes it, without folders of this machine."""
        parts = shlex.join(relative(part) for part in ["python", *self.command[1:]])
        for folder in (self.out.resolve(), Path.cwd()):
            parts = parts.replace(f"{folder}{os.sep}", "")
        return f"{self.name}={parts}"

    def wait(self) -> None:
        """Until it streams an answer of several events."""
        until = time.monotonic() + START
        body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 24, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60.0) as answer:
                    events = sum(b'"text"' in line for line in answer)
                break
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{self.name} does not answer ({error}); see {self.log}") from None
                time.sleep(1.0)
        if events < 3:
            raise SystemExit(f"{self.name} sends its answers whole, not token by token; see {self.log}")

    def stop(self) -> None:
        """It and all its processes."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(STOP)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line has them."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def server(arm: Arm, setup: Setup, name: str, args: argparse.Namespace) -> Server:
    """Start an arm's server."""
    folder, log = args.out / "models" / arm.file_name, args.out / "logs" / f"{arm.file_name}.log"
    for path in (folder, log.parent):
        path.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    shared = {"served_model_name": NAME, "host": "127.0.0.1", "port": port}
    if arm.engine == "ours":
        settings = ours_settings(arm, setup, folder) | shared
        settings |= {
            "model": peer_model(setup.model, folder / "model", setup.tiny),
            "draft": settings["draft"] or "none",
        }
        return Server(
            name, [sys.executable, "-m", "verifypd", "serve", *flags(settings)], ours_path(args), log, port, args.out
        )
    settings = vllm_settings(arm, setup, folder) | {"disable_uvicorn_access_log": True}
    caches = {name: str(folder / name) for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    path = {"PYTHONPATH": str(args.peer / "site")} if args.peer else {}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags(settings | shared)]
    return Server(name, command, OFFLINE | caches | path, log, port, args.out)


def note(arms: Sequence[Arm], setup: Setup) -> str:
    """What a reader must know of these servers."""
    settings = {"ours": "synthetic_acceptance", "vllm": "alpha"}
    alphas = {float(arm.settings.get(settings[arm.engine], setup.alpha)) for arm in arms if arm.draft is not None}
    shape = "tiny models" if setup.tiny else setup.model
    chance = ", ".join(f"{alpha:g}" for alpha in sorted(alphas))
    return f"random weights ({shape})" + (f", drafts accepted by chance (α = {chance})" if alphas else "")


def ours_path(args: argparse.Namespace) -> dict[str, str]:
    """Where our processes find this tree and, behind it, what it imports."""
    paths = [str(ROOT), *([str(args.peer / "site")] if args.peer else []), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--arms", nargs="+", required=True, metavar="ENGINE:NAME[:SETTING=VALUE,…]")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of report, models and logs")
    parser.add_argument("--model", default="llama-2-7b", help="a built-in shape")
    parser.add_argument("--alpha", type=float, default=0.8, help="chance that a draft token is accepted")
    parser.add_argument("--batch", type=int, default=128, help="requests in a pass")
    parser.add_argument("--kv-memory", default="24GB", help="of each server (default: 24GB)")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="holds site/, vLLM and what it imports")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: tests this script, means nothing")
    given = sys.argv[1:] if given is None else given
    parts = [list(part) for dashes, part in itertools.groupby(given, "--".__eq__) if not dashes]
    args = parser.parse_args(parts[0] if parts else [])
    args.traffic = parts[1:] or [[]]
    try:
        args.arms = [parse(text, "eagle") for text in args.arms]
        args.kv_bytes = parse_bytes("32MB" if args.tiny else args.kv_memory, "kv_memory")
    except ConfigError as error:
        parser.error(str(error))
    if args.peer is not None and not (args.peer / "site").is_dir():
        parser.error(f"--peer {args.peer}: there is no folder site/ in it")
    return args


def main(given: list[str] | None = None) -> int:
    """Start, wait, drive, stop."""
    args = arguments(given)
    setup = Setup(args.model, args.alpha, args.batch, TINY_LEN if args.tiny else MAX_LEN, args.kv_bytes, args.tiny)
    engines = [arm.engine for arm in args.arms]
    names = [arm.engine if engines.count(arm.engine) == 1 else arm.file_name for arm in args.arms]
    reference = next((n for n, engine in reversed([*zip(names, engines, strict=True)]) if engine == "vllm"), names[0])
    shared = ["serve", "--served-model", NAME, "--vocab", str(setup.vocab), "--reference", reference]
    shared += ["--note", note(args.arms, setup)]
    runs = [
        (own, args.out / str(turn) if len(args.traffic) > 1 else args.out, f"-{turn}" if len(args.traffic) > 1 else "")
        for turn, own in enumerate(args.traffic, 1)
    ]

    def bench(urls: Sequence[str], *more: str) -> int:
        command = [sys.executable, "-m", "verifypd", "bench", *more, *urls]
        return subprocess.run(command, env=os.environ | ours_path(args)).returncode

    planned = [f"{name}=http://127.0.0.1" for name in names]
    for traffic, folder, _ in runs:  # what cannot be is said now
        if status := bench(planned, *shared, "--out", str(folder), *traffic, "--plan"):
            return status
    servers: list[Server] = []
    try:
        for arm, name in zip(args.arms, names, strict=True):
            print(f"starting {arm.name}", flush=True)
            servers.append(server(arm, setup, name, args))
            servers[-1].wait()
        urls = [f"{each.name}={each.url}" for each in servers]
        abouts = [f"--about={each.about}" for each in servers]
        for traffic, folder, suffix in runs:
            status = bench(urls, *shared, *abouts, "--out", str(folder), *traffic)
            if args.json is not None and status == 0:
                small = args.json.with_stem(args.json.stem + suffix)
                status = bench([str(folder)], "report", "--small", str(small), "--reference", reference, "--no-png")
            if status:
                return status
        return 0
    finally:
        for each in servers:
            each.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: servers in sessions of their own end too
    sys.exit(main())
