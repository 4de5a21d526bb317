"""Other policy settings for an engine that is loaded."""

from __future__ import annotations

import pytest

from verifypd.config import EngineConfig
from verifypd.engine.retune import tuned
from verifypd.errors import ConfigError


def test_what_the_device_decided_stays_where_nothing_is_given() -> None:
    loaded = EngineConfig().on("cuda")
    assert tuned(loaded, {"slo_ttft": 0.0, "slo_gap": 0.0}) == loaded
    assert tuned(loaded, {"slo_ttft": 70.0}).slo_ttft == 70.0


@pytest.mark.parametrize("changes", [{"model": "other"}, {"max_draft": 60}, {"slo_tpot": 0.0}])
def test_what_must_be_loaded_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        tuned(EngineConfig(max_draft=4).on("cpu"), changes)
