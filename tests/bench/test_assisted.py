"""transformers' assisted generation as an arm: the same tokens' worth of work, times noted, and clear without it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd import cli
from verifypd.bench.assisted import Assisted, parse
from verifypd.bench.play import Limits, play
from verifypd.bench.workload import Arrival, Workload
from verifypd.errors import ConfigError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier", max_position_embeddings=512)
    return verifier, noisy_copy(verifier, base / "draft", 0.15)


@pytest.mark.slow
def test_it_runs_beside_our_engine(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arms = ["--arm", "plain", "--arm", f"transformers:draft={pair[1]}", "--arm", "transformers:draft=ngram"]
    traffic = ["--source", "fixed:12x6", "--vocab", "300", "--seeds", "1", "--num-requests", "3", "--concurrency", "2"]
    engine = ["--model", str(pair[0]), "--dtype", "float32", "--kv-memory", "32MB", "--no-control", "--no-png"]
    assert cli.main(["bench", "run", *arms, *traffic, *engine, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    [scenario] = found["scenarios"].values()
    assert len(scenario["arms"]) == 3
    for own in scenario["arms"].values():
        assert own["figures"]["output_tokens"] == 18 and own["figures"]["failed"] == own["figures"]["unfinished"] == 0
        assert own["figures"]["ttft_ms_p50"] > 0
    assisted = next(own for name, own in scenario["arms"].items() if "draft=ngram" not in name and name != "plain")
    assert assisted["figures"]["tokens_per_output"] > 1, "accepted drafts come together"


def test_who_gives_up_leaves_the_model_free(pair: tuple[Path, Path]) -> None:
    pytest.importorskip("transformers")
    arm = Assisted("transformers", {"model": str(pair[0])}, 300)
    work = Workload("two", 0.0, (Arrival(0.0, 12, 400), Arrival(0.0, 12, 3)))

    async def run() -> list[bool]:
        await arm.start()
        outcome = await play(arm, work, Limits(30.0, 0.4))
        await arm.close()
        return [record.finished for record in outcome.records]

    assert asyncio.run(run()) in ([False, True], [False, False])


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'verifypd\[bench\]'"):
        asyncio.run(parse("transformers", {"model": "x"}).start())
    with pytest.raises(ConfigError, match="none of its settings"):
        parse("transformers:colour=red", {})
