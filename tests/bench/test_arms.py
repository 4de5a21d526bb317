"""Arms of a comparison by name, and the settings that ours and vLLM's start with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench.arms import Setup, ours_settings, parse, vllm_settings
from verifypd.errors import ConfigError


def test_arms_by_name(tmp_path: Path) -> None:
    setup = Setup("llama-2-7b", 0.8, 128, 4608, 10**10)

    def settings(text: str) -> dict[str, Any]:
        arm = parse(text)
        return (ours_settings if arm.engine == "ours" else vllm_settings)(arm, setup, tmp_path / arm.file_name)

    plain = settings("ours:plain")
    assert plain["draft"] is None and plain["arch"] == "plain" and "synthetic_acceptance" not in plain
    assert settings("ours:head")["draft"] == "eagle" and settings("ours:eagle3")["draft"] == "eagle3"
    tiny = settings("ours:tiny1b:arch=unified,controller=fixed,max_draft=8")
    assert Path(tiny["draft"]).name == "tinyllama-1.1b" and tiny["max_draft"] == 8 and tiny["arch"] == "unified"
    both = settings("ours:auto:draft=eagle,ngram,slo_tpot=10")
    assert both["draft"] == "eagle,ngram" and both["slo_tpot"] == 10
    eagle = settings("vllm:eagle")
    rates = eagle["speculative_config"]["synthetic_acceptance_rates"]
    assert rates == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    assert eagle["kv_cache_memory_bytes"] == plain["kv_memory"] and eagle["max_num_seqs"] == plain["batch_size"]
    shape = json.loads((Path(eagle["speculative_config"]["model"]) / "config.json").read_text())
    assert shape["num_hidden_layers"] == 1 and shape["hidden_size"] == 4096
    assert settings("vllm:tiny1b:k=2,max_num_batched_tokens=1024")["speculative_config"]["num_speculative_tokens"] == 2
    assert "speculative_config" not in settings("vllm:plain")
    for wrong in ("theirs:plain", "ours:nothing", "vllm:plain:quick"):
        with pytest.raises(ConfigError, match="arm"):
            parse(wrong)
    with pytest.raises(ConfigError, match="unknown setting"):
        settings("ours:plain:colour=red")
