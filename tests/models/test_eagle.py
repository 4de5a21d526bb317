"""EAGLE heads as people download them: the reference's draft logits, and one clear line for each way to be wrong."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import FAMILIES, _reference, random_ids, tiny
from verifypd.attention.base import PassLayout
from verifypd.attention.choose import available_backends, backend
from verifypd.distil.dense import read_features
from verifypd.errors import ConfigError, HubError, ModelError
from verifypd.kernels import select
from verifypd.kernels.weights import Int8Weight
from verifypd.kv.pool import KVCache
from verifypd.models import hub
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig
from verifypd.models.head import DraftHead
from verifypd.models.head_loader import dummy_head, load_head
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables

DATA = Path(__file__).parent / "data" / "eagle"
KINDS = ("eagle", "eagle3", "speculators", "speculators31")
STEPS, WINDOW = 3, 6
CPU = torch.device("cpu")
BLOCK = 8


def verifier_of(
    folder: Path = DATA / "verifier", kernels: str = "torch", length: int = 64, int8: bool = False
) -> Model:
    return load_model(
        resolve(str(folder)),
        dtype=torch.float32,
        device=CPU,
        kernels=select(CPU, kernels),
        max_model_len=64,
    )


@pytest.fixture(scope="module")
def verifier() -> Model:
    return verifier_of()


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    return load_file(DATA / "reference.safetensors")


def streams_of(model: Model, head: DraftHead, ids: Tensor) -> list[Tensor]:
    """What the head reads of a text [T], each [T, H]."""
    layers = tuple(layer for layer in head.feature_layers if layer >= 0)
    hidden, captured = read_features(model, ids[None], layers)
    embedded = [model.embed(ids)] if -1 in head.feature_layers else []
    return [*embedded, *(each[0] for each in captured), *([hidden[0]] if head.reads_output else [])]


class Pages:
    """One slot of a head's cache."""

    def __init__(self, head: DraftHead, kernels: str) -> None:
        config = head.config
        self.head = head
        self.attention = backend(kernels)
        self.tables = BlockTables(1, 32, BLOCK, CPU)
        self.tables.write(0, [3, 1, 4, 2])
        self.tables.flush()
        self.cache = KVCache(config.layers, 5, BLOCK, config.kv_heads, config.head_dim, torch.float32, CPU)

    def read(self, ids: Tensor, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Logits and what is carried, of rows from position `start` on."""
        # no row of an EAGLE head comes before position 1: here their positions count from 0 instead
        first = start - (0 if self.head.from_start else 1)
        layout = PassLayout.build(
            [len(ids)], [first + len(ids)], torch.tensor([0]), torch.tensor([first]), self.tables.data, BLOCK
        )
        prepared = self.attention.prepare(layout)
        normed, carried = self.head.read(ids, features, layout, self.attention, self.cache, prepared)
        return self.head.logits(normed), carried


def chain(pages: Pages, ids: Tensor, features: Tensor, t: int) -> list[Tensor]:
    """Logits of three draft steps after the text up to token t + 1, which go on with the text's own tokens."""
    logits, carried = pages.read(ids[1 : t + 2], features[: t + 1], 1)
    steps = [logits[-1]]
    carried = carried[-1:]
    for step in range(1, STEPS):
        logits, carried = pages.read(ids[t + 1 + step : t + 2 + step], carried, t + 1 + step)
        steps.append(logits[0])
    return steps


# -- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", available_backends("cpu"))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_draft_logits_are_the_references(kind: str, kernels: str, reference: dict[str, Tensor]) -> None:
    model = verifier_of(kernels=kernels)
    head = load_head(resolve(str(DATA / kind)), model)
    ids, expected = reference["ids"], reference[kind]
    features = head.project(streams_of(verifier_of(), head, ids))
    assert features.shape == (len(ids), head.feature_width)
    assert expected.shape[:2] == (STEPS, len(ids) - STEPS)
    for t in (0, 2, 5, len(ids) - STEPS - 1):
        found = chain(Pages(head, kernels), ids, features, t)
        # training unrolls with the window of the first step; while drafting it moves on
        windowed = any(head.config.windows) and t + STEPS > WINDOW
        for step, logits in enumerate(found[: 1 if windowed else STEPS]):
            torch.testing.assert_close(logits, expected[step, t], atol=1e-4, rtol=1e-4)
            assert logits.argmax() == expected[step, t].argmax()


def test_the_window_of_a_head_holds(verifier: Model, reference: dict[str, Tensor], tmp_path: Path) -> None:
    """Without it the reference's logits are not met where a text is longer: the test above sees it."""
    folder = altered("speculators31", tmp_path, lambda config: config["transformer_layer_config"].pop("layer_types"))
    head, ids = load_head(resolve(str(folder)), verifier), reference["ids"]
    assert head.config.windows == (None, None)
    with torch.inference_mode():
        features = head.project(streams_of(verifier, head, ids))
        last = len(ids) - STEPS - 1
        assert not torch.allclose(
            chain(Pages(head, "torch"), ids, features, last)[0], reference["speculators31"][0, last], atol=1e-2
        )


def test_what_each_format_reads(verifier: Model) -> None:
    heads = {kind: load_head(resolve(str(DATA / kind)), verifier) for kind in KINDS}
    reads = {kind: (head.feature_layers, head.reads_output, head.from_start) for kind, head in heads.items()}
    assert reads == {
        "eagle": ((), True, False),
        "eagle3": ((1, 2, 3), False, False),  # hidden_states 2, 7 // 2 and 7 − 3
        "speculators": ((-1, 2, 5), False, False),
        "speculators31": ((1, 2, 3), False, False),
    }
    assert heads["eagle"].vocab_map is None and heads["eagle"].head is verifier.head
    for kind in KINDS:
        assert heads[kind].embedding is verifier.embedding, "a copy of the verifier's is not kept twice"
    for kind in KINDS[1:]:
        ids = heads[kind].vocab_map
        assert ids is not None and ids.shape == (24,) and len(ids.unique()) == 24
        held = {"eagle3": DATA / kind / "pytorch_model.bin"}.get(kind, DATA / kind / "model.safetensors")
        assert heads[kind].weight_bytes < 2 * held.stat().st_size


@torch.inference_mode()
def test_output_rows_come_from_the_verifier_where_the_file_has_none(verifier: Model, tmp_path: Path) -> None:
    head = load_head(resolve(str(changed("speculators", tmp_path, **{"lm_head.weight": None}))), verifier)
    x = torch.randn(3, 32)
    assert head.vocab_map is not None
    torch.testing.assert_close(head.logits(x), verifier.logits(x)[:, head.vocab_map])


@torch.inference_mode()
def test_a_head_of_another_width(tmp_path: Path, verifier: Model) -> None:
    """Its own embedding and output rows; the verifier's width only in what `fc` reads."""
    wide = tiny("llama", tmp_path / "verifier", vocab_size=64, hidden_size=48, num_hidden_layers=7)
    folder = changed("speculators", tmp_path, **{"fc.weight": torch.randn(32, 3 * 48)})
    edit(folder, lambda config: config.update(target_hidden_size=48))
    model = verifier_of(wide)
    head = load_head(resolve(str(folder)), model)
    ids = torch.tensor([1, 2, 3])
    assert head.project(streams_of(model, head, ids)).shape == (3, 32) and head.feature_width == 32
    assert head.embedding is not model.embedding
    bare = changed("speculators", tmp_path / "bare", **{"fc.weight": torch.randn(32, 144), "embed_tokens.weight": None})
    edit(bare, lambda config: config.update(target_hidden_size=48))
    refuses(bare, model, "no embedding of its own")


@torch.inference_mode()
def test_states_in_any_order_and_twice(verifier: Model, reference: dict[str, Tensor]) -> None:
    ids = reference["ids"]
    straight = load_head(resolve(str(DATA / "eagle3")), verifier, states=(2, 3, 4))
    turned = load_head(resolve(str(DATA / "eagle3")), verifier, states=(4, 2, 4))
    assert turned.feature_layers == (1, 3) and straight.feature_layers == (1, 2, 3)
    low, high = streams_of(verifier, turned, ids)
    torch.testing.assert_close(turned.project([low, high]), straight.project([high, low, high]))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_int8(kind: str, reference: dict[str, Tensor]) -> None:
    model = verifier_of()
    exact, packed = (
        load_head(resolve(str(DATA / kind)), model, quantization="int8" if int8 else None) for int8 in (False, True)
    )
    layer = packed.layers[0]
    assert all(isinstance(w, Int8Weight) for w in (packed.head, layer.qkv, layer.output, layer.gate_up, layer.down))
    found = []
    for head in (exact, packed):
        features = head.project(streams_of(model, head, reference["ids"]))
        found.append(torch.stack(chain(Pages(head, "torch"), reference["ids"], features, 5)))
    assert 0 < (found[1] - found[0]).norm() < 0.05 * found[0].norm()
    assert packed.weight_bytes < 0.5 * exact.weight_bytes or kind == "eagle"  # which then has output rows of its own


@torch.inference_mode()
def test_tokens_without_a_meaning_are_not_proposed(verifier: Model) -> None:
    whole = load_head(resolve(str(DATA / "eagle3")), verifier)
    short = load_head(resolve(str(DATA / "eagle3")), verifier, tokens=50)
    assert whole.vocab_map is not None and short.vocab_map is not None
    known = whole.vocab_map < 50
    assert 0 < len(short.vocab_map) < 24 and torch.equal(short.vocab_map, whole.vocab_map[known])
    x = torch.randn(2, 32)
    torch.testing.assert_close(short.logits(x), whole.logits(x)[:, known])


# -- what families give ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_auxiliary_states_of_every_family(family: str, tmp_path: Path) -> None:
    """id k is hidden_states[k]: 0 the embedding as the layers get it (Gemma's is scaled), k after layer k − 1."""
    folder, ids = tiny(family, tmp_path), random_ids(20)
    model = verifier_of(folder)
    layers = model.config.layers
    theirs = _reference(folder)(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    hidden, streams = read_features(model, torch.tensor([ids]), tuple(range(layers)))
    torch.testing.assert_close(model.embed(torch.tensor(ids)), theirs[0][0], rtol=1e-4, atol=1e-4)
    for k in range(1, layers):
        torch.testing.assert_close(streams[k - 1], theirs[k], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(hidden, theirs[layers], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kernels", available_backends("cpu"))
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_dummy_head_for_every_family(family: str, kind: str, kernels: str, tmp_path: Path) -> None:
    model = verifier_of(tiny(family, tmp_path), kernels)
    head = load_head(dummy_head(kind, model.config), model, load_format="dummy")
    ids = torch.tensor(random_ids(9))
    features = head.project(streams_of(verifier_of(tmp_path), head, ids))
    logits, carried = Pages(head, kernels).read(ids[1:], features[:-1], 1)
    assert logits.shape == (8, model.config.vocab_size) and bool(logits.isfinite().all())
    assert carried.shape == (8, head.feature_width) and head.embedding is model.embedding
    assert (head.head is model.head) == (kind == "eagle")
    assert head.streams == len(head.feature_layers) + (kind == "eagle")


def test_a_dummy_draft_vocabulary_is_that_of_published_heads() -> None:
    config = hub.resolve("llama-2-7b", load_format="dummy").config
    assert dummy_head("eagle3", config).config.draft_vocab_size == 32_000
    assert dummy_head("eagle3", config).config.eagle.states == (2, 16, 29)  # type: ignore[union-attr]
    assert dummy_head("eagle", config).config.draft_vocab_size is None


def test_a_shape_alone_is_no_head() -> None:
    with pytest.raises(HubError, match="'eagle3' is the shape of a head, for benchmarks: add --load-format dummy"):
        resolve("eagle3")


# -- what a file may say -----------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def altered(kind: str, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A head whose config was changed."""
    shutil.copytree(DATA / kind, to / "head")
    return edit(to / "head", change)


def changed(kind: str, to: Path, **tensors: Tensor | None) -> Path:
    """A head some of whose tensors were changed; None: taken out. As safetensors, whatever it came as."""
    folder = to / "head"
    shutil.copytree(DATA / kind, folder)
    pickled = folder / "pytorch_model.bin"
    held = torch.load(pickled, weights_only=True) if pickled.exists() else load_file(folder / "model.safetensors")
    held |= tensors
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def refuses(folder: Path, model: Model, why: str, **options: Any) -> None:
    with pytest.raises((ModelError, ConfigError), match=why) as caught:
        load_head(resolve(str(folder)), model, **options)
    assert "\n" not in str(caught.value)


def test_names_of_older_files(verifier: Model, reference: dict[str, Tensor], tmp_path: Path) -> None:
    """`model.midlayer.` and aux_norm_low/mid/high are the same head."""
    folder = tmp_path / "head"
    shutil.copytree(DATA / "speculators31", folder)
    edit(folder, lambda config: config.pop("fc_norm"))
    old = {
        "layers.0.": "midlayer.",
        "fc_norm.0": "aux_norm_low",
        "fc_norm.1": "aux_norm_mid",
        "fc_norm.2": "aux_norm_high",
    }
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, before in old.items():
            name = name.replace(new, before)
        held[f"model.{name}"] = tensor
    save_file(held, folder / "model.safetensors")
    same, other = (load_head(resolve(str(each)), verifier) for each in (DATA / "speculators31", folder))
    with torch.inference_mode():
        streams = streams_of(verifier, same, reference["ids"])
        torch.testing.assert_close(other.project(streams), same.project(streams))


def test_norm_before_residual_is_false_where_nobody_says(tmp_path: Path) -> None:
    """As the speculators library takes it, and the published code of EAGLE-3."""
    folder = altered("speculators31", tmp_path, lambda config: config.pop("norm_before_residual"))
    for source in (folder, DATA / "eagle3"):
        assert ModelConfig.from_folder(source).eagle.norm_before_residual is False  # type: ignore[union-attr]


def test_a_layer_without_a_type_is_qwen3s_in_speculators(tmp_path: Path) -> None:
    folder = altered("speculators31", tmp_path, lambda config: config["transformer_layer_config"].pop("model_type"))
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(DATA / "speculators31")


def test_sglangs_ids_are_counted_from_the_first_layers_output(tmp_path: Path, verifier: Model) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    folder = altered("eagle3", tmp_path, lambda config: config.update(ids))
    assert load_head(resolve(str(folder)), verifier).feature_layers == (1, 2, 4)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    edit(folder, lambda config: config.update(ids))
    assert load_head(resolve(str(folder)), verifier).feature_layers == (0, 1, 3), "what stands at the top goes first"
    assert load_head(resolve(str(folder)), verifier, states=(0, 3, 7)).feature_layers == (-1, 2, 6)


def test_ids_that_look_like_the_other_convention_are_said(
    tmp_path: Path, verifier: Model, caplog: pytest.LogCaptureFixture
) -> None:
    folder = altered("eagle3", tmp_path, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    with caplog.at_level(logging.INFO):
        load_head(resolve(str(folder)), verifier)
        [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "try --draft-layers 2,3,4" in line
        caplog.clear()
        load_head(resolve(str(DATA / "eagle3")), verifier)
        assert "it reads 2,3,4 (--draft-layers)" in caplog.text


def test_another_verifiers_name_is_only_said(verifier: Model, caplog: pytest.LogCaptureFixture) -> None:
    for name, lines in (("somewhere/Verifier", 0), ("other", 1)):
        caplog.clear()
        load_head(resolve(str(DATA / "speculators")), verifier, verifier_name=name)
        assert len(caplog.records) == lines
    assert "made for example/verifier, not for other" in caplog.text


def test_heads_under_the_plain_name_of_a_llama(tmp_path: Path) -> None:
    plain = altered("eagle3", tmp_path, lambda config: config.update(architectures=["LlamaForCausalLM"]))
    assert ModelConfig.from_folder(plain) == ModelConfig.from_folder(DATA / "eagle3")


def test_a_plain_one_layer_llama_is_no_eagle(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(tiny("llama", tmp_path, num_hidden_layers=1))
    assert config.family == "llama" and not config.is_head


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles(sharded: bool, tmp_path: Path, verifier: Model) -> None:
    folder = tmp_path / "head"
    shutil.copytree(DATA / "eagle", folder)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if sharded:
        names = sorted(held)
        parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        for file, some in parts.items():
            torch.save({name: held[name] for name in some}, folder / file)
        index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(held, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    head, same = load_head(resolve(str(folder)), verifier), load_head(resolve(str(DATA / "eagle")), verifier)
    torch.testing.assert_close(head._fc, same._fc)
    torch.testing.assert_close(head.layers[0].qkv, same.layers[0].qkv)


class Rogue:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('ran code')",)


def test_pickles_that_hold_more_or_less_than_tensors(tmp_path: Path, verifier: Model) -> None:
    folder = tmp_path / "head"
    shutil.copytree(DATA / "eagle3", folder)
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    torch.save({"fc.weight": Rogue()}, path)
    refuses(folder, verifier, "could run code")
    torch.save({"step": 3}, path)
    refuses(folder, verifier, "not a plain dict of tensors")
    path.write_bytes(whole[: len(whole) // 2])
    refuses(folder, verifier, "download it again")
    path.unlink()
    refuses(folder, verifier, "holds no safetensors file")


def test_a_hub_repository_with_pickles_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifier: Model) -> None:
    """The second look is for pickles; a model of many layers is still refused."""
    asked: list[bool] = []

    def fetch(hub_id: str, *, pickles: bool = False, **_: Any) -> Path:
        asked.append(pickles)
        folder = tmp_path / hub_id.replace("/", "+")
        if not folder.exists():
            folder.mkdir()
            shutil.copy((DATA / hub_id.split("/")[1] / "config.json"), folder)
        if pickles:
            shutil.copy(DATA / "eagle3" / "pytorch_model.bin", folder)
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    head = load_head(resolve("someone/eagle3"), verifier)
    assert asked == [False, True] and head.config.family == "eagle3"
    with pytest.raises(Exception, match="no safetensors weights"):
        resolve("someone/verifier")


BAD_CONFIGS: list[tuple[str, str, dict[str, Any], str]] = [
    ("speculators", "another format", {"speculators_model_type": "dflash"}, "'dflash' is not supported; supported"),
    ("speculators", "no layer", {"transformer_layer_config": None}, "transformer_layer_config is missing"),
    ("speculators", "P-EAGLE", {"mask_token_id": 5}, "P-EAGLE heads are not supported"),
    ("eagle3", "P-EAGLE", {"pard_token": 5}, "P-EAGLE heads are not supported"),
    ("speculators", "both norms", {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    ("speculators", "a norm it has not", {"norm_before_fc": True}, "tensor input_norm.weight is missing"),
    ("speculators", "words for ids", {"eagle_aux_hidden_state_layer_ids": ["a"]}, "not a list of layer numbers; give"),
    ("speculators", "too deep", {"eagle_aux_hidden_state_layer_ids": [2, 3, 8]}, "has 0 to 7: give the ids"),
    ("speculators", "two ids", {"eagle_aux_hidden_state_layer_ids": [2, 3]}, "reads 3 states and there are 2 ids"),
    ("speculators", "no width", {"target_hidden_size": "x"}, "target_hidden_size is 'x'"),
    ("speculators", "another width", {"target_hidden_size": 48}, "fc.weight reads 2 states and there are 3"),
    ("eagle3", "no states", {"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary states"),
    ("eagle3", "another name", {"architectures": ["QwenEagle9"]}, "no EAGLE format known here; supported"),
    ("eagle3", "vocabulary", {"vocab_size": 65}, "65 tokens; this one has 32 and 64: give --model"),
    ("eagle3", "larger draft", {"draft_vocab_size": 100}, "past the 64 tokens"),
    ("eagle3", "smaller draft", {"draft_vocab_size": 20}, r"lm_head.weight has shape \(24, 32\)"),
    ("eagle3", "a type", {"model_type": "mamba"}, "layers of 'mamba' is not supported"),
    ("eagle3", "no window", {"sliding_window": 0, "layer_types": ["sliding_attention"]}, "must be a positive"),
    ("eagle3", "quantised", {"quantization_config": {"quant_method": "awq"}}, "awq quantisation is not supported"),
    ("eagle", "hidden size", {"hidden_size": 48}, "hidden size 48 and 64 tokens; this one has 32 and 64"),
]


@pytest.mark.parametrize(("kind", "name", "fields", "why"), BAD_CONFIGS, ids=[f"{b[0]}-{b[1]}" for b in BAD_CONFIGS])
def test_a_config_that_is_wrong(
    kind: str, name: str, fields: dict[str, Any], why: str, tmp_path: Path, verifier: Model
) -> None:
    refuses(altered(kind, tmp_path, lambda config: config.update(fields)), verifier, why)


D2T = torch.arange(24)
BAD_TENSORS: list[tuple[str, str, dict[str, Tensor | None], str]] = [
    ("eagle3", "no fc", {"fc.weight": None}, "no fc.weight: this is no EAGLE head"),
    ("eagle3", "no d2t", {"d2t": None}, "d2t is missing, which says"),
    ("eagle3", "d2t short", {"d2t": D2T[:5]}, r"d2t has shape \(5,\)"),
    ("eagle3", "d2t past the end", {"d2t": D2T + 40}, "ids outside the vocabulary of 64"),
    ("eagle3", "d2t twice", {"d2t": -D2T}, "names a token twice"),
    ("eagle3", "d2t of floats", {"t2d": torch.zeros(3, dtype=torch.int8)}, "tensor t2d is stored as I8"),
    ("eagle3", "no norm", {"norm.weight": None}, "norm.weight is missing: the download is incomplete"),
    ("eagle3", "other shape", {"norm.weight": torch.ones(8)}, r"norm.weight has shape \(8,\)"),
    ("eagle3", "too much", {"layers.3.mlp.up_proj.weight": torch.ones(8, 8)}, "has no place in a 1-layer eagle3"),
    ("eagle3", "P-EAGLE", {"mask_hidden": torch.zeros(1, 1, 96)}, "of a P-EAGLE head, which is not supported"),
    ("speculators", "odd fc", {"fc.weight": torch.ones(32, 70)}, "fc.weight reads 70 numbers"),
]


@pytest.mark.parametrize(("kind", "name", "tensors", "why"), BAD_TENSORS, ids=[f"{b[0]}-{b[1]}" for b in BAD_TENSORS])
def test_a_file_that_is_wrong(
    kind: str, name: str, tensors: dict[str, Tensor | None], why: str, tmp_path: Path, verifier: Model
) -> None:
    refuses(changed(kind, tmp_path, **tensors), verifier, why)


def test_a_verifier_that_is_wrong(tmp_path: Path, verifier: Model) -> None:
    qwen = verifier_of(
        tiny("qwen2", tmp_path / "qwen", vocab_size=64, hidden_size=32, num_hidden_layers=7, num_key_value_heads=4)
    )
    refuses(DATA / "speculators", qwen, "is a head for LlamaForCausalLM; this verifier is of the qwen2 family: give")
    load_head(resolve(str(DATA / "eagle3")), qwen)  # whose config does not say
    shallow = verifier_of(tiny("llama", tmp_path / "shallow", vocab_size=64, hidden_size=32, num_hidden_layers=2))
    refuses(DATA / "eagle3", shallow, "the default names the states 2,1,-1")
    load_head(resolve(str(DATA / "eagle3")), shallow, states=(0, 1, 2))
    refuses(DATA / "eagle3", verifier, "--draft-layers names the states 2,3,8", states=(2, 3, 8))
    refuses(DATA / "eagle", verifier, "--draft-layers is for EAGLE-3", states=(1,))
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}
    stretched = altered("eagle3", tmp_path, lambda config: config.update(dynamic))
    refuses(stretched, verifier, "use --max-model-len 32 or less")
    with pytest.raises(ConfigError, match="--draft"):
        load_model(resolve(str(DATA / "eagle3")), dtype=torch.float32, device=CPU, kernels=select(CPU, "torch"))
