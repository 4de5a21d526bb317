"""Files people deploy with: the dashboard asks for metrics that exist, unit and image start what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import ROOT, Server
from verifypd.cli import build_parser

pytestmark = pytest.mark.xdist_group("server")

DEPLOY = ROOT / "deploy"
SELECTOR = re.compile(r"((?:vllm|verifypd):\w+)(?:\{([^}]*)\})?")
Exposed = dict[str, list[dict[str, str]]]  # sample name -> labels of each


@pytest.fixture(scope="module")
def gpu_server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine says that it sits on a GPU; NVIDIA's library is all that is made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "server" / "fake_nvml"))
        log = tmp_path_factory.mktemp("log") / "gpu.log"
        with Server(folders[0], "ngram", log, **{"engine-factory": "tests.server.faulty:on_gpu"}) as running:
            yield running


def exposed(server: Server) -> Exposed:
    found: Exposed = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_gpu_figures_reach_metrics(gpu_server: Server) -> None:
    gpu_server.complete([5, 6, 7], max_tokens=8)
    now = gpu_server.idle()
    while "verifypd:sm_occupancy" not in now:  # the second reading has it: GPM compares two samples
        now = gpu_server.idle()
    expected = {"gpu_utilization": 0.97, "sm_activity": 0.62, "sm_occupancy": 0.31, "dram_bandwidth": 0.84}
    expected |= {"memory_used_bytes": float(3 << 30), "memory_total_bytes": float(8 << 30), "power_watts": 412.0}
    for name, value in expected.items():
        assert now[f"verifypd:{name}"] == pytest.approx(value), name


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def test_the_dashboard_is_whole(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36 and len(panels) > 10
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "model"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert cells and not cells & taken and all(x < 24 for x, _ in cells), f"{panel['title']} overlaps"
        taken |= cells
        if panel["type"] == "row":
            continue
        targets = panel["targets"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} and targets
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            expr = target["expr"]
            assert SELECTOR.search(expr) and all(expr.count(a) == expr.count(b) for a, b in ("()", "{}", "[]"))
            used = set(re.findall(r"\$\{?(\w+)", expr + target.get("legendFormat", "")))
            assert used <= variables | {"__rate_interval"}, f"{panel['title']}: {used}"


def test_the_dashboard_asks_for_what_there_is(dashboard: dict[str, Any], server: Server, gpu_server: Server) -> None:
    """Every metric, and every label it selects or sums by, is one that a running server shows."""
    server.complete([5, 6, 7], max_tokens=8)
    server.post("/v1/completions", {"prompt": [5], "deadline_ms": 1e-6})
    server.idle()
    test_gpu_figures_reach_metrics(gpu_server)
    known = exposed(gpu_server) | exposed(server)
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            names = [name for name, _ in SELECTOR.findall(target["expr"])]
            for name, selector in SELECTOR.findall(target["expr"]):
                assert name in known, f"{panel['title']} asks for {name}"
                wanted = dict(re.findall(r'(\w+)="([^"]*)"', selector))
                assert all(set(wanted) <= set(labels) for labels in known[name]), f"{panel['title']}: {wanted}"
                fixed = {label: value for label, value in wanted.items() if not value.startswith("$")}
                assert any(fixed.items() <= labels.items() for labels in known[name]), f"{panel['title']}: {fixed}"
            for label in re.findall(r"\bby \((\w+)\)", target["expr"]):
                assert any(label in labels for name in names for labels in known[name]), f"{panel['title']}: {label}"
            for label in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
                assert any(label in labels for name in names for labels in known[name]), f"{panel['title']}: {label}"


def test_unit_and_image_use_flags_that_exist() -> None:
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr, index]
    flags = set(serve._option_string_actions)
    unit, image = (DEPLOY / "verifypd.service").read_text(), (DEPLOY / "Dockerfile").read_text()
    commands = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    commands += [line for line in image.splitlines() if line.startswith(("ENTRYPOINT", "CMD"))]
    assert len(commands) == 3
    for command in commands:
        assert set(re.findall(r"--[a-z-]+", command)) <= flags
    copied = [part for line in image.splitlines() if line.startswith("COPY") for part in line.split()[1:-1]]
    assert all((ROOT / Path(part)).exists() for part in copied)
