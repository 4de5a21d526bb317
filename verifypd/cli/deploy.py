"""`verifypd deploy`: the server as a Ray Serve application, on this machine or on a cluster."""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import typing
from collections.abc import Container
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from verifypd.cli.flags import Command, Parser, add_engine_flags, add_flag
from verifypd.cli.serve import add_server_flags, welcome
from verifypd.cli.serve import settings as server_settings
from verifypd.cli.terminal import emit
from verifypd.config import flag
from verifypd.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from verifypd.cluster.config import Settings

CLUSTER = "cluster_"  # prefix of the cluster's settings in the namespace
NAME = "verifypd"  # of the application
# Of Ray's processes on one machine, unless the environment says otherwise: one event loop in each where there would be
# three, a log that is written now and then, and on a busy machine half a minute for a proxy to start, not five seconds.
QUICKER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}
STORE = 128 << 20  # bytes of Ray's object store on one machine: calls and tokens do not go through it


def register(command: Command) -> None:
    """Add the command."""
    from verifypd.cluster.config import NOT_HERE

    parser = command("deploy", "serve with several engines, as a Ray Serve application", run, "%(prog)s [OPTION …]")
    parser.add_argument("--local", action="store_true", help="start Ray on this machine, and end it with this command")
    parser.add_argument("--address", default="auto", help="of a running Ray cluster (default: this machine's)")
    parser.add_argument(
        "--print-config", action="store_true", help="print a config file for `serve deploy` and KubeRay, and do nothing"
    )
    add_cluster_flags(parser)
    add_server_flags(parser, hidden=NOT_HERE)
    add_engine_flags(parser)


def add_cluster_flags(parser: Parser, without: Container[str] = ()) -> None:
    """One flag for every field of ClusterConfig, but those that the command has no use for."""
    from verifypd.cluster.config import ClusterConfig

    group = parser.add_argument_group("cluster")
    hints = typing.get_type_hints(ClusterConfig)
    for f in fields(ClusterConfig):
        if f.name in without:
            continue
        extra: dict[str, Any] = {key: f.metadata[key] for key in ("choices",) if f.metadata.get(key)}
        text = f.metadata["help"]
        add_flag(parser, group, CLUSTER + f.name, hints[f.name], f.default, text, option=flag(f.name), **extra)


def settings(args: argparse.Namespace) -> Settings:
    """What the command line says of a cluster."""
    from verifypd.cluster.config import ClusterConfig, Settings

    given = {name.removeprefix(CLUSTER): value for name, value in vars(args).items() if name.startswith(CLUSTER)}
    rest = server_settings(args)
    return Settings(ClusterConfig(**given), rest.server, rest.engine)


def run(args: argparse.Namespace) -> int:
    """`verifypd deploy`."""
    chosen = settings(args)
    if args.print_config:
        emit(config_file(chosen))
        return 0
    for name, value in QUICKER.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"deploy needs {error.name}: pip install 'verifypd[server,ray]'") from None
    if not args.local:
        try:
            ray.init(address=args.address, logging_level="warning")
        except ConnectionError:
            raise ConfigError(
                f"no Ray cluster at --address {args.address}: start one with 'ray start --head', or give --local"
            ) from None
        emit(deploy(chosen))
        ray.shutdown()
        return 0
    from ray import serve

    from verifypd.server.supervisor import listen, tokenizer_folder

    listen(chosen.server).close()  # a port that is taken and a model that is not there are refused before Ray starts
    tokenizer_folder(chosen.engine)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cores = math.ceil(max(os.cpu_count() or 1, chosen.cluster.most * chosen.cluster.cpus_per_replica))
    own = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(address="local", logging_level="warning", **own)  # whatever Ray this machine has besides
        emit(deploy(chosen))
        place = ray.get_runtime_context().gcs_address
        emit(f"  change it with another deploy and --address {place}; SIGTERM or Ctrl-C ends it\n")
        while True:
            signal.pause()
    except KeyboardInterrupt:
        if ray.is_initialized():
            serve.shutdown()  # streams get half a minute
    finally:
        ray.shutdown()
    return 0


def deploy(chosen: Settings) -> str:
    """Have the connected Ray serve with these settings; returns what to tell the user when it does."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from verifypd.cluster.application import build

    port = chosen.server.port or free_port(chosen.server.host)
    serve.start(http_options={"host": chosen.server.host, "port": port})
    try:
        serve.run(build(chosen), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"{str(error).rstrip('.')}: Ray's log says why") from None
    options = _get_global_client().http_config
    return announced(chosen, port, options.host, options.port)


def announced(chosen: Settings, port: int, host: str, listens: int) -> str:
    """What to tell the user. A Ray Serve that runs already keeps to the address it was started with."""
    model = chosen.server.served_model_name or chosen.engine.model
    text = welcome(f"http://{host}:{listens}", model, bool(chosen.server.api_key))
    if chosen.server.port and (host, listens) != (chosen.server.host, port):
        text += f"  Ray Serve was running already: it listens there, and not at {chosen.server.host}:{port}\n"
    return text


def free_port(host: str) -> int:
    """One that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def config_file(chosen: Settings) -> str:
    """A Serve config file that deploys the same: only what differs from the defaults stands in it."""
    import yaml

    given: dict[str, Any] = {"model": chosen.engine.model}
    for part in (chosen.cluster, chosen.server, chosen.engine):
        plain = {f.name: f.default for f in fields(part)}
        hidden = {f.name for f in fields(part) if f.metadata.get("secret")} | {"host", "port"}
        changed = {name: value for name, value in asdict(part).items() if value != plain[name] and name not in hidden}
        given |= {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    application = {"name": NAME, "route_prefix": "/", "import_path": "verifypd.serve_app:app", "args": given}
    options = {"host": chosen.server.host, "port": chosen.server.port or 8000}
    text: str = yaml.safe_dump({"http_options": options, "applications": [application]}, sort_keys=False)
    return text
