"""`verifypd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
import typing
from dataclasses import fields
from typing import Any

from verifypd.cli.flags import Command, Parser, add_engine_flags, add_flag, engine_settings
from verifypd.cli.terminal import emit
from verifypd.config import EngineConfig, flag
from verifypd.errors import ConfigError

SERVER = "server_"  # prefix of the server's settings in the namespace
REPEATED = ("api_key", "cors_origin")


def register(command: Command) -> None:
    """Add the command."""
    parser = command("serve", "start an OpenAI-compatible HTTP server", run, "%(prog)s [OPTION …]")
    add_server_flags(parser)
    add_engine_flags(parser)


def add_server_flags(parser: Parser) -> None:
    """One flag for every field of ServerConfig."""
    from verifypd.server.config import ServerConfig

    group = parser.add_argument_group("server")
    hints = typing.get_type_hints(ServerConfig)
    for f in fields(ServerConfig):
        meta = dict(f.metadata)
        text = argparse.SUPPRESS if meta.get("hidden") else meta["help"]
        extra: dict[str, Any] = {key: meta[key] for key in ("choices", "metavar") if meta.get(key)}
        if f.name in REPEATED:
            extra["action"] = "append"
        default = None if f.name in REPEATED else f.default
        add_flag(parser, group, SERVER + f.name, hints[f.name], default, text, option=flag(f.name), **extra)


def run(args: argparse.Namespace) -> int:
    """`verifypd serve`."""
    from verifypd.server.config import ServerConfig

    given = {name.removeprefix(SERVER): value for name, value in vars(args).items() if name.startswith(SERVER)}
    keys = [*given.get("api_key", ()), *filter(None, [os.environ.get("VERIFYPD_API_KEY")])]
    given |= {"api_key": tuple(keys), "cors_origin": tuple(given.get("cors_origin", ()))}
    given["admin_key"] = given.get("admin_key") or os.environ.get("VERIFYPD_ADMIN_KEY") or None
    config = ServerConfig.from_kwargs(**given)
    engine_config = EngineConfig.from_kwargs(**engine_settings(args))
    try:
        from verifypd.server.supervisor import Supervisor, tokenizer_folder
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'verifypd[server]'") from None
    model = config.served_model_name or engine_config.model
    folder = tokenizer_folder(engine_config)
    return Supervisor(engine_config, config, folder, lambda address: emit(welcome(address, model, bool(keys)))).run()


def welcome(address: str, model: str, keyed: bool) -> str:
    """What is printed when requests are welcome: the address, and a line to try."""
    key = "-H 'Authorization: Bearer KEY' " if keyed else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"Verify-PD serves {model} at {address}\n"
        f"  curl {address}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'\n"
    )
