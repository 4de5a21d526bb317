"""The memory budget: equal blocks for both pools, and advice when one request does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.config import parse_bytes
from verifypd.errors import ConfigError, MemoryBudgetError
from verifypd.kv.budget import plan_budget, show


def plan(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "parts": (("weights", 1000),),
        "kv_bytes": 100_000,
        "block_size": 16,
        "verifier_block_bytes": 800,
        "draft_block_bytes": 200,
        "request_tokens": 110,
        "max_model_len": 100,
        "most_tokens": 1 << 30,
    }
    return plan_budget(**{**settings, **changes})


def test_both_pools_get_the_same_number_of_blocks() -> None:
    budget = plan()
    assert budget.blocks == 100
    assert budget.kv_bytes == 100_000
    assert budget.total == 101_000
    assert budget.tokens == 99 * 16


def test_no_more_blocks_than_the_slots_can_use() -> None:
    assert plan(most_tokens=160).blocks == 11


def test_refuses_when_one_request_does_not_fit_and_the_advice_works() -> None:
    with pytest.raises(MemoryBudgetError) as error:
        plan(kv_bytes=5_000)
    message = str(error.value)
    assert "\n" not in message and "100 tokens" in message
    advised = message.split("--kv-memory ")[1].split()[0]
    assert plan(kv_bytes=parse_bytes(advised)).blocks >= 8
    with pytest.raises(MemoryBudgetError, match="or less with a smaller --max-model-len"):
        plan(kv_bytes=10)
    shorter = int(message.split("--max-model-len ")[1])
    assert plan(kv_bytes=5_000, max_model_len=shorter, request_tokens=shorter + 10).blocks == 5


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("512m", 512 << 20), ("1.5KiB", 1536), (7, 7), ("10", 10)]
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "0", "2XB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_show_rounds_up_when_used_as_a_setting() -> None:
    assert parse_bytes(show(1_000_001, up=True)) >= 1_000_001
