"""The Ray Serve application: an ingress that speaks HTTP, and replicas of the engine. Knows Ray; decides nothing."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
import zmq
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from verifypd.cluster.bridge import ClusterBridge, Line
from verifypd.cluster.config import ClusterConfig, Settings, tokens_of
from verifypd.cluster.host import EngineHost
from verifypd.cluster.lines import connect, listen
from verifypd.cluster.prefixes import digests
from verifypd.cluster.scaling import ReplicaLoad, wanted
from verifypd.config import EngineConfig
from verifypd.metrics.pauses import freeze_heap
from verifypd.server.config import ServerConfig
from verifypd.server.logs import set_up_logs
from verifypd.server.mailbox import Mailbox
from verifypd.server.messages import Submit, ToEngine, encode
from verifypd.server.supervisor import tokenizer_folder
from verifypd.tokenizer import Tokenizer

Config = TypeVar("Config", EngineConfig, ServerConfig)
ENGINES, INGRESS = "Engine", "Ingress"
SPARE = 1.5  # calls that Ray lets a replica have, for each that its queue takes: it, not Ray, turns calls away
LINGER = 3600.0  # s that an ingress which is replaced may serve the streams it has; nobody else could
QUIET = {"enable_access_log": False}  # of Ray: the ingress logs its requests itself
# What each kind of process is told of the settings. A change of others does not replace it.
OF_INGRESS = ("model", "load_format", "hf_token", "revision")
OF_ENGINE = (
    *("max_queue", "max_streams_per_key", "step_timeout", "metrics_interval", "engine_factory", "log_format"),
    "drain_timeout",
)


class Engine:
    """A replica: one engine."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        set_up_logs(server.log_format, "engine")
        here = ray.util.get_node_ip_address()
        self.host = EngineHost(engine, server, tokenizer_folder(engine), here, on_failure=lambda: os._exit(1))
        freeze_heap()

    async def run(self, address: str, data: bytes, prefix: list[bytes]) -> None:
        """Take a call, and return when it has ended. `prefix` is for whoever chooses the replica."""
        await self.host.run(address, data)

    async def describe(self) -> dict[str, Any]:
        """What an ingress must know of the engine."""
        return self.host.info

    def check_health(self) -> None:
        """Raises when the engine does not step any more: Ray then ends this replica and starts another."""
        self.host.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `Scaling` is told."""
        return {name: float(value) for name, value in asdict(self.host.load()).items()}

    def __del__(self) -> None:
        if hasattr(self, "host"):
            self.host.close()


class Ingress:
    """HTTP, text and tokens; calls go to replicas and come back as tokens."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: EngineConfig, server: ServerConfig, engines: DeploymentHandle
    ) -> None:
        set_up_logs(server.log_format, "ingress")
        self.engine, self.server, self.engines = engine, server, engines
        folder = tokenizer_folder(engine)
        self.tokenizer = Tokenizer.from_folder(Path(folder)) if folder is not None else None
        self.context = zmq.Context()
        self.inbox, self.address = listen(self.context, ray.util.get_node_ip_address())
        name, model = secrets.randbits(48), tokens_of(engine)
        self.bridge = ClusterBridge(name, self.tokenizer, server.retries, self.run, self.line, model)
        self.mailbox = Mailbox(self.bridge)
        self.info = await engines.describe.remote()

    def __serve_build_asgi_app__(self) -> Any:
        """Asked for by Ray."""
        from verifypd.server.app import make_app

        return make_app(self.engine, self.server, self.bridge, self.tokenizer, self.start, self.stop)

    def start(self) -> None:
        """In the event loop that serves."""
        self.mailbox.open(self.inbox)
        self.bridge.begin(self.info)

    def stop(self) -> None:
        """Close the sockets."""
        self.mailbox.shut()
        self.context.destroy(linger=0)

    async def run(self, message: Submit) -> None:
        """Bring a call to a replica, and wait until it has ended there."""
        sent = msgspec.structs.replace(message, arrival=time.monotonic() - message.arrival)
        response = self.engines.run.remote(self.address, encode(sent), prefix=digests(message.prompts[0]))
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    def line(self, address: str) -> Line:
        """A way to tell a replica something."""
        socket = connect(self.context, address)

        def send(message: ToEngine) -> None:
            socket.send(encode(message), zmq.NOBLOCK)

        return send


class Scaling:
    """Ray's autoscaling policy: how many replicas there should be. Ray holds it to bounds and delays."""

    def __init__(self, goal: float) -> None:
        self.goal = goal

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """From what the replicas told; a replica that has told nothing yet does not count."""
        told = context.aggregated_metrics or {}
        names = [f.name for f in ReplicaLoad.__dataclass_fields__.values()]
        replicas = set.intersection(*(set(told.get(name, ())) for name in names))
        loads = [ReplicaLoad(**{name: told[name][replica] for name in names}) for replica in replicas]
        return (wanted(loads, self.goal) if loads else context.target_num_replicas), {}


def build(settings: Settings) -> Application:
    """The application, to be run by `serve.run` or by a config file that names it."""
    cluster, server, engine = settings.cluster, settings.server, settings.engine
    calls = math.ceil(SPARE * (server.max_queue + engine.slots))
    replicas = serve.deployment(
        Engine,
        name=ENGINES,
        ray_actor_options={"num_cpus": cluster.cpus_per_replica, "num_gpus": cluster.gpus_per_replica},
        max_ongoing_requests=calls,
        health_check_period_s=cluster.health_period,
        health_check_timeout_s=max(30.0, 2 * server.step_timeout),
        graceful_shutdown_timeout_s=server.drain_timeout,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=_router(cluster), request_router_kwargs={"slack": cluster.routing_slack}
        ),
        **_count(cluster),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=cluster.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=calls * cluster.most,
        graceful_shutdown_timeout_s=LINGER,
        logging_config=QUIET,
    )
    told = _only(server, [name for name in server.names() if name not in OF_ENGINE or name == "log_format"])
    return ingress.bind(_only(engine, OF_INGRESS), told, replicas.bind(engine, _only(server, OF_ENGINE)))


def _only(config: Config, names: Sequence[str]) -> Config:
    """These settings of a configuration; the others are as by default."""
    return type(config)(**{name: getattr(config, name) for name in names})


def _router(cluster: ClusterConfig) -> str:
    from verifypd.cluster.router import ROUTERS

    made = ROUTERS[cluster.routing]
    return f"{made.__module__}.{made.__name__}"


def _count(cluster: ClusterConfig) -> dict[str, Any]:
    """As many replicas as are asked for, or as there is to do for."""
    if cluster.most == cluster.replicas:
        return {"num_replicas": cluster.replicas}
    policy = AutoscalingPolicy(policy_function=Scaling, policy_kwargs={"goal": cluster.goodput_goal})
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.most,
            upscale_delay_s=cluster.upscale_delay,
            downscale_delay_s=cluster.downscale_delay,
            look_back_period_s=cluster.look_back,
            policy=policy,
        )
    }
