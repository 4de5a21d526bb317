"""A simulated cluster: it chooses as the cluster does, loses no token, pays prompts again, grows and shrinks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.prefixes import PrefixMap, choose, digests
from verifypd.cluster.simulated import Cluster, Result
from verifypd.cluster.simulated_replica import Asked, Beginning, Stream, World
from verifypd.cluster.simulated_routing import Loads, Names, Sender
from verifypd.simulate.pace import Pace, Step, even_pace

STEP = 0.01


def poisson(rate: float, seconds: float, make: Callable[[float, random.Random], Asked]) -> list[Asked]:
    noise, at, found = random.Random(7), 0.0, []
    while (at := at + noise.expovariate(rate)) < seconds:
        found.append(make(at, noise))
    return found


def fifty(at: float, _noise: random.Random) -> Asked:
    return Asked(at, 100, 50)


def run(requests: list[Asked], world: World, **config: Any) -> Result:
    return Cluster(ClusterConfig(**config), world).play(requests)


def test_a_sender_chooses_as_the_router_does() -> None:
    noise = random.Random(1)
    loads = Loads(6)
    sender, reference = Sender("prefix", 2, loads), PrefixMap[int]()
    for replica in range(5):
        loads.welcome(replica, True)
    for turn in range(400):
        if turn == 200:
            loads.welcome(1, False)
            loads.welcome(5, True)
        prefix = digests([noise.randrange(4) for _ in range(40)])
        calls = {replica: int(loads.calls[replica]) for replica in loads.alive}
        [best, *_] = choose(reference.home(prefix, loads.alive), calls, reference.held, 2)
        chosen = sender.choose(prefix)
        assert chosen is not None
        assert (calls[chosen], reference.held[chosen]) == (calls[best], reference.held[best])
        reference.sent(prefix, chosen)
        loads.calls[chosen] += 1
        loads.calls[noise.choice(list(loads.alive))] //= 2
    assert 1 not in loads.alive and len({*reference.held}) > 3


def test_prompts_have_as_many_names_as_their_digests() -> None:
    names, text = Names(), Beginning(b"t", 100)
    one, two = (names.of(Stream(order, Asked(0.0, 300, 1, (text,)))) for order in (1, 2))
    assert len(one) == len(two) == len(digests(list(range(300))))
    assert one[:6] == two[:6] and not {*one[6:]} & {*two[6:]}
    assert len(names.of(Stream(3, Asked(0.0, 9000, 1)))) == len(digests(list(range(9000))))


def test_a_lone_stream_takes_its_steps_and_the_way() -> None:
    world = World(even_pace(STEP, 8), ingress_seconds=0.05, line_seconds=0.002)
    [stream] = run([Asked(1.0, 100, 50)], world).streams
    assert stream.first == pytest.approx(1.0 + 0.05 + STEP + 0.002)
    assert stream.ended == pytest.approx(1.0 + 0.05 + 50 * STEP + 0.002)
    assert stream.tpot == pytest.approx(STEP)


def test_one_step_ahead_costs_the_first_token_a_step() -> None:
    late = replace(even_pace(STEP, 8), late=True, host_seconds=0.001)
    world = World(late)
    first, second = run([Asked(0.0, 100, 50), Asked(0.105, 100, 50)], world).streams
    assert first.first == pytest.approx(STEP) and first.ended == pytest.approx(50 * STEP)
    assert second.first is not None and second.first - 0.105 == pytest.approx(0.025, abs=1e-6), "the rest, one, its own"


def test_who_finds_no_slot_waits() -> None:
    first, second = run([Asked(0.0, 10, 20), Asked(0.0, 10, 20)], World(even_pace(STEP, 1))).streams
    assert first.ended == pytest.approx(20 * STEP) and second.first == pytest.approx(21 * STEP)


def test_streams_of_a_dead_replica_go_on_elsewhere_and_pay_again() -> None:
    """A prompt token costs 0.1 ms; prompt and output so far are read again, and no token is missing or twice."""
    pace = Pace(64, False, 0.0, (0.0, 1e6), ((Step(STEP, 1.0, 0.0), Step(STEP + 100.0, 1.0, 1e6)),))
    world = World(pace, notice_seconds=0.5, start_seconds=2.0, fail_every=0.7, retries=20)
    asked = poisson(8, 10, lambda at, noise: Asked(at, 500, 60))
    result = run(asked, world, replicas=4)
    moved = [each for each in result.streams if each.moves]
    assert result.deaths > 5 and len(moved) > 10 and not any(each.lost for each in result.streams)
    assert all(each.ended is not None and each.first is not None for each in result.streams)
    assert all(each.pause >= 0.5 + 500 * 1e-4 for each in moved), "noticed, and the prompt read again"
    calm = run(asked, replace(world, fail_every=1e9), replicas=4)
    assert sum(each.tpot for each in calm.streams) < sum(each.tpot for each in result.streams)
    late = [each for each in moved if each.written]
    assert late and all(each.ended > each.asked.at + 60 * STEP for each in moved if each.ended)


def test_a_stream_is_lost_only_where_replicas_die_before_it_gets_a_token() -> None:
    slow = Pace(8, False, 0.0, (0.0, 1e6), ((Step(3.0, 1.0, 0.0), Step(3.0, 1.0, 1e6)),))
    world = World(slow, notice_seconds=0.1, start_seconds=0.1, fail_every=0.5, retries=1)
    result = run([Asked(0.0, 10, 2)], world, replicas=1)
    assert result.streams[0].lost and result.streams[0].moves == 2


def test_prompts_that_begin_alike_are_found_where_they_are_sent() -> None:
    texts = [Beginning(bytes([k]), 800) for k in range(20)]

    def asked(at: float, noise: random.Random) -> Asked:
        return Asked(at, 900, 20, (noise.choice(texts),))

    requests = poisson(20, 20, asked)
    world = World(even_pace(STEP, 32), cache_tokens=6000)  # of 16,000 that all texts have
    cached = {
        routing: sum(each.cached for each in run(requests, world, replicas=4, routing=routing).streams)
        for routing in ("prefix", "load", "round-robin")
    }
    assert cached["prefix"] > 1.5 * cached["round-robin"] and cached["prefix"] > 1.5 * cached["load"]


def test_there_are_as_many_replicas_as_the_policy_wants() -> None:
    """A surge fills two replicas of eight slots; more are started, and end when it is over."""
    quiet, surge = poisson(2, 100, fifty), [replace(each, at=100 + each.at) for each in poisson(60, 100, fifty)]
    after = [replace(each, at=200 + each.at) for each in quiet]
    settings = {"replicas": 2, "max_replicas": 12, "upscale_delay": 10, "downscale_delay": 30, "look_back": 10}
    result = run([*quiet, *surge, *after], World(even_pace(STEP, 8), start_seconds=5.0), **settings)
    most = max(number for _, number in result.sizes)
    assert 4 < most <= 12 and result.sizes[-1][1] == 2
    assert next(at for at, number in result.sizes if number > 2) > 100
    assert all(each.ended is not None for each in result.streams), "who is drained finishes"
