"""A real Ray Serve cluster on this machine. One is started for all of these tests, which change it in turn."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.cluster.deployed import START, Deployed, until
from tests.server.clients import Stream
from tests.server.test_resume import Eight
from verifypd.cli.deploy import free_port
from verifypd.models.hub import resolve

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.ray,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray Serve: pip install 'verifypd[server,ray]'"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two replicas of the built-in pair, in full precision: its texts are the same whatever runs beside them."""
    resolve("smollm2")
    log = tmp_path_factory.mktemp("log") / "deploy.log"
    pair = {"model": "smollm2", "draft": "smollm2-draft", "kv-memory": "100MB"}
    with Deployed(log, free_port("127.0.0.1"), replicas=2, **pair, **{"cpus-per-replica": 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def eight(cluster: Deployed) -> Eight:
    return Eight(cluster, tokens=96, letters=100)


def test_eight_streams_outlive_a_replica(cluster: Deployed, eight: Eight) -> None:
    """SIGKILL of a replica in mid-stream: all eight end with exactly the text of an undisturbed run."""
    before = cluster.replicas()
    assert len(before) == 2
    streams = eight.start(cluster)
    assert not [place for place, stream in enumerate(streams) if stream.done], "it must die under all of them"
    os.kill(before[0], signal.SIGKILL)
    eight.check(streams)
    assert cluster.metrics()["verifypd:calls_taken_up_total"] >= 1
    until(lambda: len(set(cluster.replicas()) - {before[0]}) == 2, START, "the replica is not started again")


def hit_rate(cluster: Deployed, seed: int) -> float:
    """Share of prompt tokens found in caches. Five beginnings come three times each, with another end every time."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(5, 250) for _ in range(64)] for _ in range(5)]
    found = 0
    for _ in range(3):
        for beginning in beginnings:
            made = cluster.complete([*beginning, draw.randrange(5, 250)], max_tokens=1, temperature=0)
            found += made["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found / (3 * 5 * 65)


def test_a_rolling_update_drops_nothing_and_prompts_find_their_cache(cluster: Deployed, eight: Eight) -> None:
    """Streams run and requests come all the while replicas and ingress are replaced by others, which take each in turn.

    Before, prompts went to the replica that has them: more of them were found in its cache.
    """
    by_prefix = hit_rate(cluster, 1)
    old = set(cluster.replicas())
    failures: list[object] = []
    served = [0]
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            stream = Stream(cluster, eight.bodies[2]).start().join()
            if stream.error is not None or stream.text != eight.whole[2]["choices"][0]["text"] or not stream.done:
                failures.append((stream.status, stream.error, stream.text))
            served[0] += 1

    asking = [threading.Thread(target=ask) for _ in range(2)]
    streams = eight.start(cluster)
    update = cluster.change(
        replicas=2, routing="round-robin", **{"cpus-per-replica": 0.5, "max-queue": 99, "max-choices": 99}
    )
    for thread in asking:
        thread.start()
    update.communicate(timeout=START)
    until(lambda: not old & set(cluster.replicas()) and len(cluster.replicas()) == 2, START, "not all were replaced")
    over.set()
    for thread in asking:
        thread.join()
    assert update.returncode == 0
    eight.check(streams)
    assert failures == [] and served[0] >= 4
    in_turn = hit_rate(cluster, 2)
    assert by_prefix > 0.6 and in_turn < 0.45, (by_prefix, in_turn)


def test_there_are_as_many_replicas_as_there_is_to_do_for(cluster: Deployed, eight: Eight) -> None:
    """From one to two under load, and back to one when it is over; the streams see nothing of it.

    The deploy that makes it so names another port, and says that it is served at the old one all the same.
    """
    scaling = {"max-replicas": 2, "upscale-delay": 0, "downscale-delay": 0.5, "look-back": 1, "cpus-per-replica": 0.5}
    said = cluster.changed(replicas=1, port=cluster.port + 1, **scaling)
    assert f"at {cluster.address}\n" in said and f"not at 127.0.0.1:{cluster.port + 1}" in said
    until(lambda: len(cluster.replicas()) == 1, START, "not one replica to begin with")
    over = threading.Event()
    failures: list[object] = []

    def ask() -> None:
        while not over.is_set():
            stream = Stream(cluster, eight.bodies[0]).start().join()
            if stream.error is not None or stream.text != eight.whole[0]["choices"][0]["text"]:
                failures.append((stream.status, stream.error, stream.text))

    asking = [threading.Thread(target=ask) for _ in range(16)]  # for ten slots
    for thread in asking:
        thread.start()
    try:
        until(lambda: len(cluster.replicas()) == 2, START, "no second replica under load")
    finally:
        over.set()
    for thread in asking:
        thread.join()
    until(lambda: len(cluster.replicas()) == 1, START, "two replicas with nothing to do")
    assert failures == []
