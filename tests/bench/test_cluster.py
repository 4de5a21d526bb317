"""A simulated cluster beside the simulator of one engine, which it has its pace from; the command and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from verifypd import cli
from verifypd.bench.cluster import Traffic, figures, learn, play
from verifypd.bench.simulated import NOISE, Simulated, device_costs
from verifypd.bench.tuned import POLICIES
from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.simulated_replica import World
from verifypd.errors import ConfigError
from verifypd.simulate.engine import Simulation
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import TrueCosts


@pytest.mark.slow
def test_replicas_are_as_fast_as_engines_simulated_step_by_step() -> None:
    """Two replicas that get requests in turn, and each engine's own simulation of the requests it got."""
    costs, batch = device_costs("h200"), 8
    one = Simulated("auto", POLICIES["auto"], lambda _: costs, "h200", 0.68, 4)
    traffic = Traffic(10.0, 20.0, seed=3)
    pace = learn(lambda: one.world(batch), costs, 0.68, traffic, 25)
    world = World(pace)
    found = figures(play(ClusterConfig(replicas=2, routing="round-robin"), world, traffic), world, traffic)
    outcomes = []
    asked = list(traffic.requests())
    for replica in (0, 1):
        own = replay([(each.at, each.prompt, each.output) for each in asked[replica::2]], 0.68, seed=replica)
        architecture, settings = one.world(batch)
        outcomes += Simulation(architecture, own, TrueCosts(costs, noise=NOISE), settings).run().outcomes
    counted = [each for each in outcomes if each.arrival >= 0.2 * traffic.seconds]
    ttft = [1e3 * ((each.first or 0.0) - each.arrival) for each in counted]
    tpot = [1e3 * each.tpot for each in counted]
    e2e = [1e3 * ((each.last or 0.0) - each.arrival) for each in counted]
    assert found["requests"] == len(counted)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        assert found[f"{name}_ms_mean"] == pytest.approx(np.mean(values), rel=0.1)
        assert found[f"{name}_ms_p95"] == pytest.approx(np.percentile(values, 95), rel=0.15)
    met = sum(each.met(500.0) for each in counted) / len(counted)
    assert found["attainment"] == pytest.approx(met, abs=0.05)


def test_traffic_is_the_same_for_every_cluster() -> None:
    traffic = Traffic(50.0, 10.0, shared=0.5, texts=5, text_tokens=200, surge=3.0)
    found = list(traffic.requests())
    assert found == list(traffic.requests())
    thirds = [sum(10 * k / 3 <= each.at < 10 * (k + 1) / 3 for each in found) for k in range(3)]
    assert thirds[1] > 2 * thirds[0] and thirds[1] > 2 * thirds[2]
    shared = [each for each in found if each.beginnings]
    assert 0.4 < len(shared) / len(found) < 0.6 and all(each.prompt > 200 for each in shared)
    with pytest.raises(ConfigError, match="share"):
        Traffic(1.0, 1.0, shared=1.5)


def test_a_cluster_is_simulated_and_says_so(tmp_path: Path) -> None:
    traffic = ["--rate", "20,40", "--duration", "6", "--fail-every", "2", "--start", "2", "--texts", "20"]
    shape = ["--replicas", "4", "--routing", "prefix,load", "--arm", "plain", "--batch-size", "8", "--quick"]
    assert cli.main(["bench", "simulate", "cluster", *shape, *traffic, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["note"].startswith("SIMULATED") and found["commit"] and found["traffic"]["texts"] == 20
    assert [(run["routing"], run["rate"]) for run in found["runs"]] == [
        ("prefix", 20), ("prefix", 40), ("load", 20), ("load", 40),
    ]  # fmt: skip
    assert all(run["figures"]["deaths"] and run["figures"]["requests"] for run in found["runs"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure>") == page.count("α = 0.68]</figcaption>") == 4, "every picture says so"
    assert "SIMULATED" in (tmp_path / "summary.md").read_text()
    again = ["--pace", str(tmp_path / "results.json"), "--fail-at", "1", "--rate-each", "5", "--replicas", "4"]
    more = [*again, "--duration", "6", "--texts", "20", "--out", str(tmp_path / "again")]
    assert cli.main(["bench", "simulate", "cluster", *more]) == 0
    second = json.loads((tmp_path / "again" / "results.json").read_text())
    assert second["pace"] == found["pace"] and second["note"] == found["note"]
    [run] = second["runs"]
    assert run["rate"] == 20 and run["figures"]["deaths"] == 1


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--routing", "nearest"], "--routing 'nearest' is not known"),
        (["--fail-every", "0"], "--fail-every must be above 0"),
        (["--arm", "plain", "--arm", "pd"], "one --arm"),
        (["--shared", "2"], "must lie in 0..1"),
    ],
)
def test_bad_settings_are_refused(
    flags: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "simulate", "cluster", "--out", str(tmp_path), *flags]) == 2
    assert error in capsys.readouterr().err
