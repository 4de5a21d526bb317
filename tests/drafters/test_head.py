"""A draft loop in one call of C is the loop in Python: the same drafts, and the same keys and values, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.heads import head_for
from tests.models.checkpoints import VOCAB, tiny
from verifypd.attention.choose import available_backends, backend
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.drafters.head import HeadDrafter
from verifypd.kernels import select
from verifypd.kv.pool import FeatureCache
from verifypd.models.head import DraftHead
from verifypd.models.head_loader import load_head
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.request import SamplingParams
from verifypd.runtime.inputs import BlockTables, Slots
from verifypd.runtime.padded import Drawing
from verifypd.runtime.runner import HeadRunner, cache_of
from verifypd.sampling.state import SamplingState

pytestmark = pytest.mark.skipif("native" not in available_backends("cpu"), reason="no C compiler")
CPU = torch.device("cpu")
SLOTS, CAPACITY, BLOCK, DRAFTS = 4, 64, 8, 4
LENGTHS = (5, 40, 23, 1)
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "int8": True},
}
# a text from its start, one with drafts to read again, one that only catches up, and one of a single token
SPANS = (DraftSpan(0, 5, 5, 2, 7), DraftSpan(1, 3, 3, 4, 44), DraftSpan(2, 9, 6, 0, 23), DraftSpan(3, 1, 1, 4, 5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("head")
    verifier = tiny("llama3", folder / "verifier")
    return verifier, head_for(verifier, folder / "head", layers=2, window=10, taught=False)


def load(folders: tuple[Path, Path], int8: bool = False, **options: Any) -> DraftHead:
    model = load_model(
        resolve(str(folders[0])),
        device=CPU,
        kernels=select(CPU, "native"),
        max_model_len=CAPACITY,
        quantization="int8" if int8 else None,
        **options,
    )
    return load_head(resolve(str(folders[1])), model, quantization="int8" if int8 else None)


class Bench:
    """A drafter over slots with some text, and features as if the verifier had been there."""

    def __init__(self, head: DraftHead, compiled: bool, begins: int = 0, **params: Any) -> None:
        noise = torch.Generator().manual_seed(3)
        tables = BlockTables(SLOTS, CAPACITY, BLOCK, CPU, 0)
        blocks = (torch.randperm(SLOTS * CAPACITY // BLOCK, generator=noise) + 1).view(SLOTS, -1)
        for slot in range(SLOTS):
            tables.write(slot, blocks[slot].tolist())
        tables.flush()
        tables.begin(1, begins)
        features = FeatureCache(
            head.feature_layers, True, head.project, blocks.numel() + 1, BLOCK, head.feature_width, torch.float32,
            head.kernels, tables.data,
        )  # fmt: skip
        features.data.copy_(torch.randn(features.data.shape, generator=noise))
        self.slots = Slots(SLOTS, CAPACITY, DRAFTS, CPU, VOCAB)
        self.slots.draft_temperatures.copy_(torch.tensor([0.7, 1.0, 1.0, 1.2]))
        self.sampling = SamplingState(SLOTS, VOCAB, DRAFTS, "cpu", "native")
        for slot, length in enumerate(LENGTHS):
            self.slots.assign(slot, torch.randint(3, VOCAB, (length,), generator=noise).tolist())
            self.sampling.assign(
                slot, SamplingParams(**{"temperature": 0.0, **params}), seed=7, prompt_len=1, max_len=60, eos_ids=[0]
            )
        runner = HeadRunner(head, backend("native"), cache_of(head, blocks.numel() + 1, BLOCK), tables, features)
        runner.cache.data.copy_(torch.randn(runner.cache.data.shape, generator=noise))  # texts that were read before
        self.drafter = HeadDrafter(runner, self.slots, Drawing(self.sampling, head.vocab_map))
        assert self.drafter.native is not None
        if not compiled:
            self.drafter.native = None
            head.native_head = None

    def run(self, *spans: DraftSpan) -> list[torch.Tensor]:
        self.drafter.launch(DraftBatch("head", spans))
        assert isinstance(self.drafter.runner, HeadRunner)
        return [self.slots.drafts, self.slots.draft_lens, self.drafter.runner.cache.data, self.slots.draft_q]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_drafts_and_caches_are_the_same(weights: str, folders: tuple[Path, Path]) -> None:
    """Uneven drafts of texts that lag by more or less, alone and together; a text whose first part is not there."""
    for begins, spans in ((0, SPANS), (0, SPANS[1:2]), (38, SPANS[:2]), (0, SPANS[2:3])):
        ours, theirs = (Bench(load(folders, **WEIGHTS[weights]), compiled, begins) for compiled in (True, False))
        same(ours.run(*spans), theirs.run(*spans))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "top_k": 60}, {"acceptance": "coupled"}], ids=str)
def test_sampled_drafts_and_their_distributions_are_the_same(
    params: dict[str, Any], folders: tuple[Path, Path]
) -> None:
    benches = [
        Bench(load(folders, **WEIGHTS["float32"]), compiled, temperature=0.8, **params) for compiled in (True, False)
    ]
    same(*(bench.run(*SPANS) for bench in benches))
    drawn = benches[0].slots.draft_q
    assert drawn is not None and bool(drawn.any()) == ("acceptance" not in params)


def test_a_chunk_whose_start_is_given(folders: tuple[Path, Path]) -> None:
    spans = (DraftSpan(1, 40, 12, 0, 40, start=9), DraftSpan(3, 1, 1, 2, 3))
    ours, theirs = (Bench(load(folders, **WEIGHTS["bfloat16"]), compiled) for compiled in (True, False))
    same(ours.run(*spans), theirs.run(*spans))


def test_the_loop_is_of_c_where_scores_are_the_heads(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only there: penalties change them."""
    head = load(folders, **WEIGHTS["float32"])
    for params, expected in (({}, 1), ({"temperature": 1.0}, 1), ({"repetition_penalty": 1.5}, 0)):
        bench, calls = Bench(head, True, **params), []
        assert bench.drafter.native is not None
        real = bench.drafter.native.run
        monkeypatch.setattr(
            bench.drafter.native, "run", lambda spans, real=real, calls=calls: (calls.append(1), real(spans))
        )
        bench.run(*SPANS)
        assert len(calls) == expected
        assert bench.slots.draft_lens.tolist() == [2, 4, 0, 4]


def test_a_row_outside_its_slot_is_an_error(folders: tuple[Path, Path]) -> None:
    bench = Bench(load(folders, **WEIGHTS["float32"]), True)
    bench.slots.lengths[1] = CAPACITY
    with pytest.raises(IndexError, match="outside its slot"):
        bench.run(SPANS[1])


def test_tokens_outside_the_vocabulary_are_an_error(folders: tuple[Path, Path]) -> None:
    bench = Bench(load(folders, **WEIGHTS["float32"]), True)
    bench.slots.tokens[1, 39] = VOCAB
    with pytest.raises(IndexError, match="outside the vocabulary"):
        bench.run(SPANS[1])
