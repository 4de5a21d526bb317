"""Which drafts fit a verifier, and drafters of other kinds behind the same protocol."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.heads import head_for
from tests.engine.pairs import assert_greedy, noisy_copy
from tests.models.checkpoints import VOCAB, tiny
from verifypd import LLM, SamplingParams
from verifypd.batch import DraftBatch
from verifypd.errors import ConfigError, ModelError, TokenizerError
from verifypd.kernels import Int8Weight, build
from verifypd.kernels.weights import Int8Panels
from verifypd.runtime.inputs import host_tensor

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_draft": 3, "max_model_len": 128, "kv_memory": "64MB"}
OPTIONS |= {"controller": "fixed", "measure_costs": False}
PROMPT = [5, 9, 200, 31, 7]


@pytest.mark.parametrize("draft_vocab", [VOCAB - 32, VOCAB + 64])
def test_padded_vocabulary_sizes_may_differ(tmp_path: Path, draft_vocab: int) -> None:
    verifier = tiny("qwen2", tmp_path / "verifier")
    draft = tiny("qwen2", tmp_path / "draft", vocab_size=draft_vocab)
    words = json.loads((verifier / "tokenizer.json").read_text())
    smallest = min(VOCAB, draft_vocab)
    words["model"]["vocab"] = {t: i for t, i in words["model"]["vocab"].items() if i < smallest}
    words["model"]["merges"] = words["model"]["merges"][: smallest - 259]
    for folder in (verifier, draft):
        (folder / "tokenizer.json").write_text(json.dumps(words))
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=40, ignore_eos=True)):
        texts = []
        for arch, name in (("plain", None), ("unified", str(draft))):
            with LLM(str(verifier), draft=name, arch=arch, **OPTIONS) as llm:
                texts.append(llm.generate([PROMPT], params)[0].outputs[0].token_ids)
        assert texts[0] == texts[1]
        assert max(texts[0]) < smallest, "padding is never drawn"


def test_a_draft_may_know_fewer_ids_than_a_verifier_without_a_tokenizer(tmp_path: Path) -> None:
    verifier = tiny("qwen2", tmp_path / "verifier")
    draft = tiny("qwen2", tmp_path / "draft", vocab_size=VOCAB - 32)
    for folder in (verifier, draft):
        (folder / "tokenizer.json").unlink()
    prompt = [VOCAB - 1, 5, VOCAB - 20, 7]  # the first and third are no ids of the draft
    params = SamplingParams(max_tokens=24, temperature=3.0, seed=1, ignore_eos=True)
    texts = []
    for arch in ("plain", "unified"):
        with LLM(str(verifier), draft=str(draft), arch=arch, **OPTIONS) as llm:
            texts.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert max(texts[0]) >= VOCAB - 32, "nothing was drawn that the draft does not know"


NATIVE = "native" if build.library() is not None else "torch"


@pytest.mark.parametrize("drafter", ["draft", "head"])
@pytest.mark.parametrize(
    ("settings", "int8"),
    [
        ({"kernels": NATIVE}, NATIVE == "native"),
        ({"kernels": NATIVE, "draft_quantization": "none"}, False),
        ({"kernels": "torch"}, False),
        ({"kernels": "torch", "draft_quantization": "int8"}, True),
        ({"kernels": "torch", "quantization": "int8"}, True),
        ({"kernels": "torch", "quantization": "int8", "draft_quantization": "none"}, False),
    ],
)
def test_what_the_draft_is_kept_in(pair: tuple[Path, Path], drafter: str, settings: dict[str, Any], int8: bool) -> None:
    folder = pair[1] if drafter == "draft" else pair[0].parent / "head"
    with LLM(str(pair[0]), draft=str(folder), **OPTIONS, **settings) as llm:
        engine: Any = llm.engine
        verifier, draft = engine.verify.runner.model, engine.drafter.runner.model
        parts = dict(llm.budget.parts)
    assert isinstance(draft.layers[0].down, Int8Weight | Int8Panels) is int8
    assert isinstance(verifier.layers[0].down, Int8Weight) is (settings.get("quantization") == "int8")
    assert parts["draft weights"] == draft.weight_bytes and parts["verifier weights"] == verifier.weight_bytes


@pytest.mark.parametrize(("quantization", "said"), [(None, "float32 weights"), ("int8", "int8 weights")])
def test_the_log_says_what_weights_are_kept_in(
    pair: tuple[Path, Path], quantization: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), LLM(str(pair[0]), draft="ngram", quantization=quantization, **OPTIONS):
        assert said in caplog.text


def test_a_different_tokenizer_is_refused_with_the_first_differing_token(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    other = noisy_copy(pair[0], tmp_path / "other", 0.0)
    words = json.loads((other / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == n) for n in (300, 301))
    vocab[first], vocab[second] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(TokenizerError) as error:
        LLM(str(pair[0]), draft=str(other), **OPTIONS)
    assert "300" in str(error.value) and "\n" not in str(error.value)


def subset_draft(verifier: Path, to: Path, ids: torch.Tensor) -> Path:
    """The verifier as its own draft, with a head that covers only `ids`, in that order."""
    noisy_copy(verifier, to, 0.0)
    weights = load_file(to / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][ids].contiguous()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "draft_vocab_size": len(ids)}))
    save_file({"ids": ids}, to / "vocab_map.safetensors")
    return to


def test_a_draft_may_cover_a_subset_of_the_vocabulary_through_a_map(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:200]
    draft = subset_draft(pair[0], tmp_path / "subset", kept)
    for params in (GREEDY, SamplingParams(seed=9, max_tokens=40, ignore_eos=True)):
        with LLM(str(pair[0]), draft=None, arch="plain", **OPTIONS) as llm:
            [plain] = llm.generate([PROMPT], params)
        with LLM(str(pair[0]), draft=str(draft), **OPTIONS) as llm:
            [mapped] = llm.generate([PROMPT], params)
            assert 0 < llm.engine.stats.accepted < llm.engine.stats.drafted
            assert set(llm.engine.slots.drafts.flatten().tolist()) <= {0, *kept.tolist()}
        assert mapped.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_map_that_does_not_fit_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    draft = subset_draft(pair[0], tmp_path / "subset", torch.arange(10))
    save_file({"ids": torch.arange(9)}, draft / "vocab_map.safetensors")
    with pytest.raises(ModelError, match="10 int64 token ids"):
        LLM(str(pair[0]), draft=str(draft), **OPTIONS)
    (draft / "vocab_map.safetensors").unlink()
    with pytest.raises(ModelError, match="says which"):
        LLM(str(pair[0]), draft=str(draft), **OPTIONS)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier with 20 ids more than its tokenizer: no request can be given one of those."""
    base = tmp_path_factory.mktemp("padded")
    verifier = tiny("llama", base / "verifier", vocab_size=VOCAB + 20)
    shutil.copy(tiny("llama", base / "small") / "tokenizer.json", verifier)
    return verifier


def test_a_map_to_ids_that_the_tokenizer_lacks_is_refused(tmp_path: Path, padded: Path) -> None:
    draft = subset_draft(padded, tmp_path / "subset", torch.arange(VOCAB - 30, VOCAB + 10))
    with pytest.raises(ModelError, match=f"40 int64 token ids below {VOCAB}"):
        LLM(str(padded), draft=str(draft), **OPTIONS)


@pytest.mark.parametrize("kernels", ["torch", NATIVE])
def test_a_head_proposes_no_id_that_the_tokenizer_lacks(tmp_path: Path, padded: Path, kernels: str) -> None:
    head = head_for(padded, tmp_path / "head", taught=False)
    weights = load_file(head / "model.safetensors")
    weights["vocab_map"] = torch.arange(VOCAB + 20 - 300, VOCAB + 20, dtype=torch.int32)
    save_file(weights, head / "model.safetensors", metadata={"format": "pt"})
    for params in (GREEDY, SamplingParams(seed=9, max_tokens=40, ignore_eos=True)):
        texts = []
        for draft, arch in ((None, "plain"), (str(head), "unified")):
            with LLM(str(padded), draft=draft, arch=arch, kernels=kernels, **OPTIONS) as llm:
                texts.append(llm.generate([PROMPT], params)[0].outputs[0].token_ids)
                drafts = llm.engine.slots.drafts
                assert bool(draft) == (llm.engine.stats.drafted > 20) and int(drafts.max()) < VOCAB
        assert texts[0] == texts[1]


class HiddenReader:
    """A drafter that reads the verifier's hidden states: it proposes the argmax of each slot's last row."""

    name = "head"
    has_cache = False
    point_mass = True
    layers, output = (), True
    keeps_drafts, one_pass, follows, routine = True, True, False, 0

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.guess = torch.zeros(llm.config.slots, dtype=torch.int64)
        self.passes = 0
        self.reader = self

    def keep(self, streams: Any, layout: Any) -> None:
        self.passes += 1
        [hidden] = streams
        assert hidden.shape == (layout.rows, self.engine.verify.runner.model.config.hidden_size)
        ends = layout.row_offsets[1:] - 1
        self.guess[layout.slots] = self.engine.verify.runner.logits(hidden[ends]).argmax(-1)

    def launch(self, batch: DraftBatch) -> None:
        index = host_tensor([span.slot for span in batch.spans], self.guess.device)
        self.engine.slots.drafts[index, 0] = self.guess[index]
        self.engine.slots.draft_lens[index] = 1

    def admitted(self, request: Any) -> None: ...

    def expected(self, request: Any) -> int:
        return 1

    def observe(self, requests: Any) -> None: ...

    def forget(self, request: Any) -> None: ...

    def close(self) -> None: ...


def test_a_drafter_may_read_hidden_states(pair: tuple[Path, Path]) -> None:
    with LLM(str(pair[0]), **OPTIONS) as llm:
        head = HiddenReader(llm)
        llm.engine.decode.drafters.clear()
        llm.engine.decode.drafters["head"] = head
        llm.engine.drafter = head
        [output] = llm.generate([PROMPT], GREEDY)
        assert head.passes and llm.engine.stats.drafted
    assert_greedy(pair[0], PROMPT, output.outputs[0].token_ids)


@pytest.mark.parametrize("draft", [True, False])
def test_an_engine_that_is_gone_leaves_nothing_to_the_collector(pair: tuple[Path, Path], draft: bool) -> None:
    """Gigabytes would wait for it otherwise: it counts objects, not what they hold."""
    arms = {"draft": str(pair[1])} if draft else {"draft": None, "arch": "plain"}
    gc.collect()
    gc.disable()
    try:
        with LLM(str(pair[0]), **{**OPTIONS, **arms}) as llm:
            llm.generate([PROMPT], GREEDY)
            parts = [weakref.ref(part) for part in (llm.engine, llm.engine.verify.runner.model, llm.engine.residents)]
        del llm
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_settings_that_cannot_work_say_what_to_do(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        LLM(str(pair[0]), draft=None, arch="plain", dtype="float32", max_model_len=200, kv_memory="40KB")
    with pytest.raises(ConfigError, match="256 tokens"):
        LLM(str(pair[0]), draft=None, arch="plain", dtype="float32", max_model_len=100_000)
    with pytest.raises(ConfigError, match="cpu"):
        LLM(str(pair[0]), device="toaster")


def test_every_id_that_ends_a_text_is_known(tmp_path: Path) -> None:
    """Config, generation config and tokenizer may each name one; all of them count."""
    folder = tiny("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<unk>"}))
    with LLM(str(folder), draft=None, arch="plain", **OPTIONS) as llm:
        assert set(llm.engine.eos_ids) == {1, 7, 2}


def test_dynamic_rope_starts_within_its_range(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = tiny("llama", tmp_path / "model", rope_parameters=rope)
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 256}) as llm:
        llm.generate([PROMPT], GREEDY)


def test_batch_invariance_needs_native_attention_too(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="attention"):
        LLM(str(pair[0]), batch_invariant=True, attention="torch", **OPTIONS)


def test_a_drafter_that_plain_does_not_load_is_named(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "kv_memory": "8MB", "dtype": "float32", "arch": "plain"}
    with caplog.at_level(logging.INFO), LLM(str(pair[0]), draft=str(pair[1]), **settings):
        pass
    assert f"{pair[1]} is not loaded: --arch plain never drafts" in caplog.text
