"""EAGLE heads in the engine: whatever they draft, the text is that of plain decoding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.arms import make, prompts, texts
from tests.engine.heads import eagle3_for
from tests.models.checkpoints import VOCAB, tiny
from tests.models.test_eagle import DATA, KINDS
from verifypd import LLM, SamplingParams
from verifypd.engine.first_drafts import FirstDrafts
from verifypd.errors import ConfigError, ModelError
from verifypd.kernels import build

pytestmark = pytest.mark.xdist_group("eagle")  # one head is taught

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_draft": 3, "max_model_len": 64, "kv_memory": "32MB"}
OPTIONS |= {"controller": "fixed", "measure_costs": False, "batch_size": 4, "block_size": 8, "prefill_chunk": 7}
SHORT = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in ({"temperature": 0.0}, {"seed": 1})]
KERNELS = ("native", "torch") if build.library() is not None else ("torch",)


@pytest.fixture(scope="module")
def taught(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An EAGLE-3 head some of whose drafts stand."""
    return str(eagle3_for(pair[0], tmp_path_factory.mktemp("eagle3") / "head"))


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("unified", {}),
        ("unified", {"late_tickets": True}),
        ("pdv", {}),
        ("auto", {"controller": "throughput"}),
        ("unified", {"kernels": "torch", "attention": "torch", "prefix_cache": False}),
    ],
    ids=["unified", "late", "pdv", "auto", "torch"],
)
def test_text_is_plain_decodings(
    pair: tuple[Path, Path], plain: list[list[int]], taught: str, arch: str, settings: dict[str, Any]
) -> None:
    with make(pair, arch, taught, **settings) as llm:
        assert texts(llm, 10) == plain
        if arch != "auto":
            assert llm.engine.stats.accepted > 20


IDS = [[1 + (i * 7 + j * j) % 60 for j in range(length)] for i, length in enumerate((1, 2, 9, 20))]


def written(draft: str | None, **settings: Any) -> list[list[int]]:
    """What the verifier of the references writes."""
    arch = "unified" if draft else "plain"
    with LLM(str(DATA / "verifier"), draft=draft, arch=arch, **{**OPTIONS, **settings}) as llm:
        outputs = [llm.generate(IDS, params) for params in SHORT]
        assert bool(draft) == (llm.engine.stats.drafted > 50)
    return [out.outputs[0].token_ids for some in outputs for out in some]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return written(None)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_downloaded_heads(kind: str, kernels: str, expected: list[list[int]]) -> None:
    """The checkpoints that are held against the reference, on the verifier they were made for."""
    assert written(str(DATA / kind), kernels=kernels, attention=kernels) == expected


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma3"])
def test_dummy_heads_beside_every_family(family: str, kind: str, tmp_path: Path) -> None:
    """Shapes for benchmarks: any verifier, no file of a head."""
    folder = str(tiny(family, tmp_path))
    found = []
    for draft, arch in ((None, "plain"), (kind, "unified")):
        with LLM(folder, draft=draft, arch=arch, load_format="dummy", **OPTIONS) as llm:
            found.append([out.outputs[0].token_ids for out in llm.generate(prompts(4), SHORT[0])])
            assert bool(draft) == (llm.engine.stats.drafted > 50)
    assert found[0] == found[1]


def test_a_draft_vocabulary_past_the_tokenizers(tmp_path: Path) -> None:
    """Rows for ids that no text has are left out: here the tokenizer lacks the last 20 of them."""
    verifier = tiny("llama", tmp_path / "verifier", vocab_size=VOCAB + 20)
    tiny("llama", tmp_path / "small")
    (verifier / "tokenizer.json").write_text((tmp_path / "small" / "tokenizer.json").read_text())
    head = eagle3_for(verifier, tmp_path / "head", taught=False)
    held = load_file(head / "model.safetensors")
    held["d2t"] = torch.full((300,), VOCAB + 20 - 300)  # the last 300 of them
    save_file(held, head / "model.safetensors")
    found = []
    for draft, arch in ((None, "plain"), (str(head), "unified")):
        with LLM(str(verifier), draft=draft, arch=arch, **OPTIONS) as llm:
            found.append([out.outputs[0].token_ids for out in llm.generate(prompts(3), SHORT[1])])
    assert found[0] == found[1]


def test_draft_layers(pair: tuple[Path, Path], plain: list[list[int]], taught: str) -> None:
    """Other states change what is drafted and never what is written."""
    drafted = []
    for layers in ("1,2", "2,1"):
        with make(pair, "unified", taught, draft_layers=layers) as llm:
            assert texts(llm, 6) == plain[:6]
            drafted.append(llm.engine.stats.accepted)
    assert drafted[0] > drafted[1]
    with pytest.raises(ModelError, match="reads 2 states and there are 3 ids"):
        make(pair, "unified", taught, draft_layers="0,1,2")
    with pytest.raises(ConfigError, match="'2;3' is not a list of layer numbers"):
        make(pair, "unified", taught, draft_layers="2;3")
    with pytest.raises(ConfigError, match="--draft-layers is for EAGLE-3 heads"):
        make(pair, "unified", "head", draft_layers="1,2")


# -- a head that does not fit is loud ----------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first drafts" in r.getMessage()]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [({}, 1), ({"synthetic_acceptance": "0.05"}, 0), ({"draft": "ngram"}, 0)],
    ids=["a random head", "set acceptance", "look-up"],
)
def test_few_drafts_that_stand_are_said_once(
    settings: dict[str, Any],
    lines: int,
    pair: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verifypd.engine.first_drafts.LOOK", 20)
    options = {**OPTIONS, "draft": "eagle3", "load_format": "dummy", "arch": "unified", **settings}
    with caplog.at_level(logging.WARNING), LLM(str(pair[0]), **options) as llm:
        llm.generate(prompts(4), SHORT[0])
        llm.generate(prompts(4), SHORT[0])
    found = warnings_of(caplog)
    assert len(found) == lines
    assert all("--draft-layers" in line and "evaluate-draft --search-layers" in line for line in found)


@pytest.mark.parametrize(("every", "lines"), [(5, 0), (8, 1)])
def test_what_is_few(every: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """One of five is enough, one of eight is not; and it takes a thousand drafts to say so."""
    first = FirstDrafts()
    for i in range(2000):
        first.count(0, 0)
        first.count(3, int(i % every == 0))
        assert len(warnings_of(caplog)) == (lines if i >= 999 else 0)
