"""Files people deploy with: the dashboard asks for metrics that exist, unit and image start what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.server.serving import ROOT, Server
from verifypd.cli import build_parser
from verifypd.server.bridge import Bridge
from verifypd.server.metrics import EngineFigures

pytestmark = pytest.mark.xdist_group("server")

DEPLOY = ROOT / "deploy"


def test_the_dashboard_is_whole_and_asks_for_what_there_is(server: Server) -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "model"}
    server.complete([5, 6, 7], max_tokens=8)
    server.post("/v1/completions", {"prompt": [5], "deadline_ms": 1e-6})
    known = {name.partition("{")[0] for name in server.idle()}
    gpu = ("gpu_utilization", "sm_activity", "sm_occupancy", "dram_bandwidth")
    figures = EngineFigures(Bridge(0, None, 0), "tiny")
    known |= {family.name for family in figures._gpu(dict.fromkeys(gpu, 0.5))}
    for panel in panels:
        for target in panel.get("targets", ()):
            for name in re.findall(r"(?:vllm|verifypd):\w+", target["expr"]):
                assert name in known, f"{panel['title']} asks for {name}"


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
