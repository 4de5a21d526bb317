"""`verifypd generate`: continue one or several prompts."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verifypd.cli import running
from verifypd.cli.flags import (
    Command,
    add_engine_flags,
    add_sampling_flags,
    engine_settings,
    parse_ids,
    sampling_params,
)
from verifypd.cli.running import Totals, print_stream, show_ids, show_text
from verifypd.cli.terminal import clean, emit, say
from verifypd.errors import RequestError

if TYPE_CHECKING:
    from verifypd.request import CompletionOutput, RequestOutput

# What the command uses where the library's own default would surprise at a terminal.
GENERATE_DEFAULTS: dict[str, Any] = {"max_tokens": 128}


def register(command: Command) -> None:
    """Add the command."""
    parser = command("generate", "continue one or several prompts", run, "%(prog)s [OPTION …] PROMPT …")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--token-ids", action="store_true", help="prompts are comma-separated token ids, and so is the output"
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary line")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does at start")
    add_engine_flags(parser)
    add_sampling_flags(parser, GENERATE_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """`verifypd generate`."""
    params = sampling_params(args, GENERATE_DEFAULTS)
    settings = engine_settings(args)
    texts = read_prompts(args.prompts)
    prompts: list[Any] = [parse_ids(text) for text in texts] if args.token_ids else list(texts)
    show = show_ids if args.token_ids else show_text
    totals = Totals()
    with running.load(settings) as llm:
        begin = time.perf_counter()
        if args.json or len(prompts) > 1 or params.n > 1:
            outputs = llm.generate(prompts, params)
            totals.seconds = time.perf_counter() - begin
            for output in outputs:
                totals.add(output)
            if args.json:
                _print_json(outputs, totals)
            else:
                _print_blocks(texts, outputs, show)
        else:
            if args.echo:
                emit(f"{texts[0]}," if args.token_ids else texts[0])
            final = print_stream(llm.stream(prompts[0], params), show)
            totals.seconds = time.perf_counter() - begin
            if final is not None:
                totals.add(final)
    if not args.quiet and not args.json:
        say(totals.line())
    return 0


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by standard input."""
    if given.count("-") > 1:
        raise RequestError("'-' reads standard input and can be given once", param="prompt")
    prompts = [sys.stdin.buffer.read().decode("utf-8", "replace") if text == "-" else clean(text) for text in given]
    return [text.removesuffix("\n") if source == "-" else text for source, text in zip(given, prompts, strict=True)]


def _print_blocks(
    prompts: Sequence[str], outputs: Sequence[RequestOutput], show: Callable[[CompletionOutput], str]
) -> None:
    """Several continuations, each under its prompt."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.outputs:
            mark = f" [{choice.index}]" if len(output.outputs) > 1 else ""
            title = textwrap.shorten(prompt, 100, placeholder=" …") or "(empty)"
            emit(f"=== {title}{mark}\n{show(choice)}\n\n")


def _print_json(outputs: Sequence[RequestOutput], totals: Totals) -> None:
    results = []
    for output in outputs:
        metrics = asdict(output.metrics)
        metrics |= {
            "acceptance_rate": output.metrics.acceptance_rate,
            "mean_accepted_length": output.metrics.mean_accepted_length,
        }
        results.append(asdict(output) | {"metrics": metrics})
    emit(json.dumps({"results": results, "summary": totals.summary()}, ensure_ascii=False) + "\n")
