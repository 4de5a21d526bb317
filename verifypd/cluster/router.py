"""Ray Serve's choice of a replica for a call, by the rules of `prefixes`. Ray makes one of these in every ingress."""

from __future__ import annotations

from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from verifypd.cluster.prefixes import PrefixMap, choose


class _Router(RequestRouter):  # type: ignore[misc]
    """What all have in common."""

    def initialize_state(self, slack: int = 0) -> None:
        """Called by Ray with `request_router_kwargs`."""
        self._slack = slack
        self._prefixes: PrefixMap[ReplicaID] = PrefixMap()
        self._turns = count()

    def _loads(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Calls that each replica has, as this process knows it."""
        return {r.replica_id: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in replicas}


class LoadRouter(_Router):
    """The replica with least to do."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks to be tried in order; within one Ray takes whoever has least to do."""
        return [candidate_replicas] if candidate_replicas else []


class TurnRouter(_Router):
    """Each replica in turn."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks to be tried in order."""
        if not candidate_replicas:
            return []
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        first = next(self._turns) % len(ordered)
        return [[replica] for replica in ordered[first:] + ordered[:first]]


class PrefixRouter(_Router):
    """The replica that has most of the prompt cached, unless it has much more to do than the idlest."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks to be tried in order."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        home = self._prefixes.home(_prefix(pending_request), by_id)
        order = choose(home, self._loads(candidate_replicas), self._prefixes.held, self._slack)
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where a prompt went."""
        self._prefixes.sent(_prefix(pending_request), replica_id)


def _prefix(pending: PendingRequest | None) -> list[bytes]:
    return pending.kwargs.get("prefix", []) if pending is not None else []


ROUTERS = {"prefix": PrefixRouter, "load": LoadRouter, "round-robin": TurnRouter}
