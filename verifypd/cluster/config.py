"""Settings of a cluster: frozen, checked at birth, the source of the `deploy` flags. Knows nothing of Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verifypd.config import EngineConfig, check_range, flag, setting
from verifypd.errors import ConfigError
from verifypd.hints import advice
from verifypd.server.config import ServerConfig

ROUTINGS = ("prefix", "load", "round-robin")
# Settings of one server that Ray Serve has its own way for.
NOT_HERE = {
    "admin_key": "give --arch instead: every replica runs under it",
    "tls_cert": "let what stands before the cluster speak TLS",
    "tls_key": "let what stands before the cluster speak TLS",
    "api_workers": "give --ingress-replicas instead",
}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What there is to say of replicas."""

    replicas: int = setting(1, "engines to start, and the fewest there may be")
    max_replicas: int | None = setting(None, "engines there may be when there is much to do (default: --replicas)")
    ingress_replicas: int = setting(1, "processes that speak HTTP, tokenise and detokenise")
    routing: str = setting(
        "prefix",
        "who gets a request: the replica that has most of its prompt cached unless it has more to do than others, the"
        " one with least to do, or each in turn",
        choices=ROUTINGS,
    )
    routing_slack: int = setting(
        4, "calls that the replica with the prompt may have more than the idlest, to be chosen all the same"
    )
    goodput_goal: float = setting(
        0.9, "share of requests within --slo-ttft and --slo-tpot below which there is one replica more"
    )
    upscale_delay: float = setting(30.0, "s for which more replicas must be wanted before they are started")
    downscale_delay: float = setting(600.0, "s for which fewer replicas must be wanted before one is ended")
    look_back: float = setting(30.0, "s over which load and goodput are averaged")
    health_period: float = setting(10.0, "s between two looks at whether a replica still steps")
    cpus_per_replica: float = setting(1.0, "processor cores of an engine")
    gpus_per_replica: float = setting(0.0, "GPUs of an engine; less than 1 shares one")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("replicas", 1, 10_000),
            ("max_replicas", 1, 10_000),
            ("ingress_replicas", 1, 1000),
            ("routing_slack", 0, 1 << 20),
            ("goodput_goal", 0.0, 1.0),
            ("upscale_delay", 0.0, 86400.0),
            ("downscale_delay", 0.0, 86400.0),
            ("look_back", 0.1, 3600.0),
            ("health_period", 0.1, 3600.0),
            ("cpus_per_replica", 0.0, 1024.0),
            ("gpus_per_replica", 0.0, 64.0),
        ):
            value = getattr(self, name)
            if value is None and name == "max_replicas":
                continue
            check_range(name, value, low, high)
        if self.most < self.replicas:
            raise ConfigError(f"--max-replicas {self.most} must not be less than --replicas {self.replicas}")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"--routing {self.routing!r} is not known; choose from {', '.join(ROUTINGS)}")

    @property
    def most(self) -> int:
        """Replicas there may be."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True)
class Settings:
    """Everything a cluster is made from; what crosses to its processes."""

    cluster: ClusterConfig
    server: ServerConfig
    engine: EngineConfig

    def __post_init__(self) -> None:
        for name, instead in NOT_HERE.items():
            default = next(f.default for f in fields(ServerConfig) if f.name == name)
            if getattr(self.server, name) != default:
                raise ConfigError(f"{flag(name)} is for one server, not for a cluster: {instead}")


def tokens_of(engine: EngineConfig) -> str:
    """Whose tokens an engine reads and writes. Two that say the same may go on with each other's calls."""
    return engine.model if engine.revision is None else f"{engine.model}@{engine.revision}"


def read(given: Mapping[str, Any]) -> Settings:
    """Settings from one mapping with the names of the flags, `_` for `-`: the `args` of a Serve config file.

    $VERIFYPD_API_KEY counts.
    """
    parts: tuple[type[Any], ...] = (ClusterConfig, ServerConfig, EngineConfig)
    names = [{f.name for f in fields(part)} for part in parts]
    unknown = next((name for name in given if not any(name in own for own in names)), None)
    if unknown is not None:
        raise ConfigError(f"unknown setting {unknown!r}{advice(unknown, set().union(*names))}")
    several = {f.name for part in parts for f in fields(part) if str(f.type).startswith("tuple")}
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    lists |= {
        name: (lists[name],) for name in several & lists.keys() if isinstance(lists[name], str)
    }  # not its letters
    if os.environ.get("VERIFYPD_API_KEY"):
        lists["api_key"] = (*lists.get("api_key", ()), os.environ["VERIFYPD_API_KEY"])
    cluster, server, engine = (
        part(**{name: value for name, value in lists.items() if name in own})
        for part, own in zip(parts, names, strict=True)
    )
    return Settings(cluster, server, engine)
