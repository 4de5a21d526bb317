"""`verifypd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Callable, Container
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from verifypd.cli.flags import Command, Parser, add_engine_flags, add_flag, engine_settings
from verifypd.cli.terminal import emit
from verifypd.config import EngineConfig, flag
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.server.config import ServerConfig

SERVER = "server_"  # prefix of the server's settings in the namespace
REPEATED = ("api_key", "cors_origin")


def register(command: Command) -> None:
    """Add the command."""
    parser = command("serve", "start an OpenAI-compatible HTTP server", run, "%(prog)s [OPTION …]")
    add_server_flags(parser)
    add_engine_flags(parser)


def add_server_flags(parser: Parser, hidden: Container[str] = ()) -> None:
    """One flag for every field of ServerConfig; of those that are hidden the help says nothing."""
    from verifypd.server.config import ServerConfig

    group = parser.add_argument_group("server")
    hints = typing.get_type_hints(ServerConfig)
    for f in fields(ServerConfig):
        meta = dict(f.metadata)
        text = argparse.SUPPRESS if meta.get("hidden") or f.name in hidden else meta["help"]
        extra: dict[str, Any] = {key: meta[key] for key in ("choices", "metavar") if meta.get(key)}
        if f.name in REPEATED:
            extra["action"] = "append"
        default = None if f.name in REPEATED else f.default
        add_flag(parser, group, SERVER + f.name, hints[f.name], default, text, option=flag(f.name), **extra)


@dataclass(frozen=True)
class Settings:
    """What the command line says of a server."""

    server: ServerConfig
    engine: EngineConfig

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.server.served_model_name or self.engine.model


def settings(args: argparse.Namespace) -> Settings:
    """Read them; $VERIFYPD_API_KEY and $VERIFYPD_ADMIN_KEY count."""
    from verifypd.server.config import ServerConfig

    given = {name.removeprefix(SERVER): value for name, value in vars(args).items() if name.startswith(SERVER)}
    keys = [*given.get("api_key", ()), *filter(None, [os.environ.get("VERIFYPD_API_KEY")])]
    given |= {"api_key": tuple(keys), "cors_origin": tuple(given.get("cors_origin", ()))}
    given["admin_key"] = given.get("admin_key") or os.environ.get("VERIFYPD_ADMIN_KEY") or None
    return Settings(ServerConfig.from_kwargs(**given), EngineConfig.from_kwargs(**engine_settings(args)))


def supervise(chosen: Settings, ready: Callable[[str], None]) -> int:
    """Serve until told to stop; `ready` is told the address when requests are welcome."""
    try:
        from verifypd.server.supervisor import Supervisor, tokenizer_folder
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'verifypd[server]'") from None
    return Supervisor(chosen.engine, chosen.server, tokenizer_folder(chosen.engine), ready).run()


def run(args: argparse.Namespace) -> int:
    """`verifypd serve`."""
    chosen = settings(args)
    keyed = bool(chosen.server.api_key)
    return supervise(chosen, lambda address: emit(welcome(address, chosen.model, keyed)))


def welcome(address: str, model: str, keyed: bool) -> str:
    """What is printed when requests are welcome: the address, and a line to try."""
    key = "-H 'Authorization: Bearer KEY' " if keyed else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"Verify-PD serves {model} at {address}\n"
        f"  curl {address}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'\n"
        f"  watch it at {address}/dashboard\n"
    )
