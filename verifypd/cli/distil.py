"""`verifypd distil`: make a draft for a verifier."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from verifypd.cli.files import writable_folder
from verifypd.cli.flags import Command
from verifypd.cli.terminal import emit, say
from verifypd.distil.recipe import TINY, TINY_HELD_OUT, TINY_PROMPTS, Recipe
from verifypd.errors import ConfigError

# recipe settings that have a flag, and what it says
SETTINGS = {
    "seed": "everything follows from it",
    "self_prompts": "prompts the verifier writes itself, after its own chat template",
    "responses": "answers the draft learns from",
    "raw_share": "share of the answers that continue text without a chat template",
    "given_share": "least share of given prompts among those answered, each as often as that takes",
    "max_prompt": "tokens of a prompt at most; longer ones are left out",
    "max_new": "tokens of an answer at most",
    "generate_batch": "sequences generated side by side",
    "temperatures": "temperatures of the answers, used in turn",
    "validation": "prompts kept back from training, for the choice of the loss and the curve",
    "format": "what the head is written as: verifypd, or speculators (EAGLE-3), which other engines load",
    "layers": "layers of the head",
    "mlp_size": "width of its MLP (default: the verifier's)",
    "feature_layers": "verifier layers it reads beside the last (default: two in between)",
    "vocab": "tokens it can propose",
    "window": "tokens its attention sees",
    "start": "folder of a draft of the same shape, whose weights training begins with; its vocabulary may differ",
    "depth": "draft positions it is trained on",
    "losses": "losses tried; the one with the best acceptance goes on",
    "pilot_steps": "steps each loss is tried for",
    "steps": "steps of training",
    "batch_tokens": "tokens of text in a step",
    "learning_rate": "peak learning rate",
    "warmup": "steps over which the rate rises to it",
    "decay": "last share of the steps, over which the rate falls to a fiftieth",
}


def register(command: Command) -> None:
    """Add the command."""
    parser = command("distil", "make a draft head for a verifier, from text the verifier writes", run)
    parser.add_argument("--model", default="smollm2", help="verifier: a built-in name, a folder, a GGUF file, a hub id")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the draft goes to DIR/draft")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: the built-in set)")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="evaluation prompts (default: the built-in set)")
    parser.add_argument(
        "--tiny", action="store_true", help="a few short texts and steps, to see in seconds that everything works"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="stop after so many seconds; the same command again goes on"
    )
    parser.add_argument(
        "--fit-steps", action="store_true", help="as many steps as --time-limit leaves time for, in place of --steps"
    )
    parser.add_argument("--name", help="what the draft's files call the verifier (default: what --model says)")
    parser.add_argument("--commit", help="commit to name in distil.json, where the source has no repository around it")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what it does")
    defaults = Recipe()
    for name, text in SETTINGS.items():
        value = getattr(defaults, name)
        shown = (
            "" if value is None else f" (default: {','.join(map(str, value)) if isinstance(value, tuple) else value})"
        )
        metavar = {"start": "DIR", "format": "NAME"}.get(name, "N")
        parser.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=text + shown)


def run(args: argparse.Namespace) -> int:
    """`verifypd distil`."""
    recipe = recipe_of(args)
    from verifypd.distil import prompts
    from verifypd.distil.run import distil

    given = prompts.read_prompts(args.prompts) if args.prompts else prompts.training_prompts()
    held_out = prompts.read_prompts(args.held_out) if args.held_out else prompts.evaluation_prompts()
    if args.tiny:
        given, held_out = prompts.spread(given, TINY_PROMPTS), prompts.spread(held_out, TINY_HELD_OUT)
    writable_folder("--out", args.out)
    made = distil(
        args.model,
        args.out,
        recipe,
        prompts=given,
        held_out=held_out,
        device=args.device,
        time_limit=args.time_limit,
        fit_steps=args.fit_steps,
        name=args.name,
        commit=args.commit,
        command=shlex.join(["verifypd", *sys.argv[1:]]),
    )
    if "evaluation" not in made:
        say("not finished: run the same command again")
        return 0
    for temperature, kinds in made["evaluation"].items():
        for kind, found in kinds.items():
            alphas = " ".join(f"{alpha:.3f}" for alpha in found["alpha"])
            emit(f"T={temperature} {kind:10} α {alphas}  accepted {found['mean_accepted_length']:.2f}\n")
    say(f"{'done' if made['finished'] else 'not finished'}: {args.out / 'draft'} after {made['steps']} steps")
    return 0


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe the flags ask for."""
    base = TINY if args.tiny else Recipe()
    given: dict[str, Any] = {}
    for name in SETTINGS:
        text = getattr(args, name)
        if text is not None:
            given[name] = _parse(name, text)
    return replace(base, **given)


def _parse(name: str, text: str) -> Any:
    kind = next(str(field.type) for field in fields(Recipe) if field.name == name)
    try:
        if kind.startswith("tuple"):
            convert = float if "float" in kind else str if "str" in kind else int
            return tuple(convert(part) for part in text.split(","))
        return text if kind.startswith("str") else float(text) if kind == "float" else int(text)
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text!r} is not of the kind it needs ({kind})") from None
