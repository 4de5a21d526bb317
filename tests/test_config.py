"""Settings are checked at birth."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.config import EngineConfig
from verifypd.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model": ""}, "--model is empty"),
        ({"model": 5}, "--model 5 is no name"),
        ({"draft": 5}, "--draft 5 is no name"),
        ({"batch_size": 2.5}, "--batch-size 2.5 must be a whole number"),
        ({"arch": "magic"}, "plain, baseline, pd, pdv, unified"),
        ({"controller": "x"}, "fixed"),
        ({"max_draft": -1}, "--max-draft"),
        ({"max_draft": True}, "--max-draft"),
        ({"batch_size": 0}, "--batch-size"),
        ({"queue_factor": 2.5}, "1..2"),
        ({"dtype": "int4"}, "float32"),
        ({"quantization": "int3"}, "int8"),
        ({"draft_quantization": "int4"}, "--draft-quantization 'int4' is not known; choose from auto, int8, fp8, none"),
        ({"kv_memory": "many"}, "2GB"),
        ({"placement": "prefill=process"}, "use --arch pd or pdv"),
        ({"placement": "prefill=moon"}, "fused"),
        ({"placement": "kitchen=fused"}, "lanes are"),
        ({"workers": 3}, "baseline"),
        ({"arch": "unified", "verify_batch": 3}, "pdv"),
        ({"arch": "auto", "lane_weights": "prefill=2"}, "pdv"),
        ({"arch": "pdv", "verify_batch": 33}, "1..32"),
        ({"arch": "pdv", "verify_wait_ms": -1.0}, "--verify-wait-ms"),
        ({"arch": "baseline", "workers": 0}, "--workers"),
        ({"arch": "pdv", "lane_weights": "prefill=x"}, "positive numbers"),
        ({"arch": "pdv", "lane_weights": "kitchen=1"}, "prefill=1"),
        ({"placement": "verify=cuda:1", "arch": "plain"}, "nothing is drafted"),
        ({"placement": "verify=cuda:1,decode=cpu"}, "give one of them"),
        ({"placement": "process"}, "use decode=process"),
        ({"placement": "decode=process", "arch": "plain"}, "nothing is drafted"),
        ({"placement": "decode=cpu", "draft": None}, "nothing is drafted"),
        ({"placement": "partition"}, "for one lane"),
        ({"placement": "prefill=partition:48,decode=partition:32"}, "one lane may have a partition"),
        ({"placement": "verify=partition:48"}, "use prefill=partition:48"),
        ({"placement": "prefill=partition:0"}, "fused or stream or partition"),
        ({"synthetic_acceptance": "1.5"}, "0..1"),
        ({"synthetic_acceptance": "a,b"}, "0..1"),
        ({"ngram_min": 5, "ngram_max": 3}, "--ngram-max"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"wait": "sleep"}, "block, spin"),
        ({"measure_costs": "yes"}, "--measure-costs"),
        ({"measure_costs": 1.5}, "--measure-costs"),
        ({"draft_temperature": 0.05}, "--draft-temperature 0.05 must lie in 0.1..10"),
        ({"draft_temperature": "hot"}, "--draft-temperature"),
        ({"slo_gap": -1.0}, "--slo-gap -1.0 must be 0 or more"),
        ({"max_model_len": 1 << 30}, "--max-model-len 1073741824 must lie in 2..16777216"),
        ({"draft_temperature": 1.2, "search_temperature": True}, "give one of the two"),
    ],
)
def test_refuses_in_one_line_that_says_what_to_do(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_draft'"):
        EngineConfig.from_kwargs(max_drafts=3)


def test_every_setting_explains_itself() -> None:
    for name, field in EngineConfig.__dataclass_fields__.items():
        assert field.metadata.get("help"), name


@pytest.mark.parametrize(
    ("given", "alphas"),
    [
        (None, None),
        (0.8, (0.8,)),
        ("0.8", (0.8,)),
        ("0.3,0.9", (0.3, 0.9)),
        ([0.1, 0.2], (0.1, 0.2)),
        ("drift:a.json", "a.json"),
    ],
)
def test_synthetic_acceptance_forms(given: Any, alphas: Any) -> None:
    assert EngineConfig(synthetic_acceptance=given).alphas == alphas


def test_none_means_no_drafter() -> None:
    assert EngineConfig(draft="none").draft is None


def test_slots_hold_the_batch_and_the_queue() -> None:
    assert EngineConfig(batch_size=10, queue_factor=1.25).slots == 13


def test_placements_are_given_for_all_lanes_or_by_lane() -> None:
    apart = EngineConfig(placement="decode=cuda:1,prefill=stream", graphs="start")  # the verifier is replayed
    assert (apart.draft_apart, apart.in_line, EngineConfig().draft_apart) == ("cuda:1", True, None)
    assert EngineConfig(placement="stream").placements == {"prefill": "stream", "decode": "stream", "verify": "stream"}
    by_lane = EngineConfig(placement="decode=stream, prefill=fused").placements
    assert by_lane == {"prefill": "fused", "decode": "stream", "verify": "fused"}


def test_lane_settings_have_defaults_that_follow_the_batch_size() -> None:
    assert EngineConfig(batch_size=32).verify_limits == (8, 5.0)
    assert EngineConfig(arch="pdv", batch_size=2).verify_limits == (1, 5.0)
    assert EngineConfig(arch="pdv", verify_batch=3, verify_wait_ms=0.0).verify_limits == (3, 0.0)
    assert EngineConfig(arch="baseline", batch_size=7).worker_count == 7
    weights = EngineConfig(arch="pdv", lane_weights="prefill=1, verify=2.5").weights
    assert weights == (("prefill", 1.0), ("verify", 2.5))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"arch": "unified", "controller": "fixed"}, False),
        ({"arch": "table", "controller": "threshold"}, False),
        ({"arch": "auto", "controller": "fixed"}, True),
        ({"arch": "pd", "controller": "throughput"}, True),
        ({"arch": "plain"}, False),
        ({}, True),
        ({"arch": "auto", "measure_costs": False}, False),
        ({"arch": "pd", "controller": "fixed", "measure_costs": True}, True),
    ],
)
def test_costs_are_wanted_where_a_policy_goes_by_them(settings: dict[str, Any], wanted: bool) -> None:
    assert EngineConfig(**settings).wants_costs is wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "must lie in 1..64"),
        ({"tensor_parallel_size": 2.5}, "must be a whole number"),
        ({"graphs": "start"}, "use --graphs off"),
        ({"placement": "prefill=stream", "arch": "pdv"}, "leave out --placement"),
        ({"attention": "flashinfer"}, "use --attention triton"),
        ({"batch_invariant": True, "tensor_parallel_size": 4}, "allows --tensor-parallel-size 2 at most"),
    ],
)
def test_what_a_divided_verifier_does_not_do_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**({"tensor_parallel_size": 2} | settings))


def test_the_device_decides_what_is_left_to_it() -> None:
    left, given = EngineConfig(), EngineConfig(slo_ttft=70.0, slo_gap=9.0, prefill_chunk=64)
    assert (left.on("cuda").slo_ttft, left.on("cpu").slo_ttft) == (200.0, 500.0)
    assert left.on("cuda").slo_gap < left.on("cpu").slo_gap
    assert left.on("cuda").prefill_chunk > left.on("cpu").prefill_chunk
    assert given.on("cuda") == given.on("cpu") == given
    with pytest.raises(ConfigError, match="slo-ttft"):
        EngineConfig(slo_ttft=-1.0)
