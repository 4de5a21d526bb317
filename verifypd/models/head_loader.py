"""Makes a draft head beside its verifier, from whatever format it comes in. Knows files and what can be wrong in them.

Whatever a file leaves open is settled here once: which states of the verifier are read, what is shared with it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from verifypd.errors import ConfigError, ModelError
from verifypd.kernels.weights import PackedWeight, Quantization, Weight
from verifypd.models.base import Model
from verifypd.models.checkpoint import D2T, VOCAB_MAP, SafetensorsFolder, TensorSource, canonical, open_folder
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.eagle import Eagle3Head, EagleHead
from verifypd.models.eagle_config import EAGLE, EAGLE3, EagleFields, default_states, shown
from verifypd.models.fp8 import scaled
from verifypd.models.head import DistilledHead, DraftHead, rows_of
from verifypd.models.loader import HEADS, allocate, fill, fill_dummy, pack

log = logging.getLogger(__name__)

DUMMIES = (EAGLE, EAGLE3)  # --draft names that need no file, with --load-format dummy
DUMMY_VOCAB = 32_000  # tokens a dummy EAGLE-3 head proposes, as most published ones
# tensors under the names of older files
RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# family of a verifier -> what checkpoints call it
KINDS = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
}


def load_head(
    source: ModelSource,
    verifier: Model,
    *,
    load_format: str = "auto",
    quantization: Quantization | None = None,
    seed: int = 0,
    states: tuple[int, ...] | None = None,
    verifier_name: str | None = None,
    tokens: int | None = None,
) -> DraftHead:
    """A draft head beside its verifier: `fit_head`, then `make_head`."""
    fitted = fit_head(source, verifier.config, load_format=load_format, states=states, verifier_name=verifier_name)
    return make_head(fitted, verifier, load_format=load_format, quantization=quantization, seed=seed, tokens=tokens)


def fit_head(
    source: ModelSource,
    verifier: ModelConfig,
    *,
    load_format: str = "auto",
    states: tuple[int, ...] | None = None,
    verifier_name: str | None = None,
) -> ModelSource:
    """The head with everything settled that its file leaves open, or one error: from configs and the names of tensors,
    before any weight is read.

    states: ids of the auxiliary states an EAGLE-3 head reads, whatever its config says. verifier_name: what ours is
    called.
    """
    if states is not None and source.config.family != EAGLE3:
        raise ConfigError(f"--draft-layers is for EAGLE-3 heads: what {source.name} reads is fixed, leave it out")
    if source.config.family == "head":
        _check_distilled(source, verifier)
        return source
    config = _with_states(source, verifier, states)
    config = _dummy_parts(config) if load_format == "dummy" else _held(config, _open(source))
    _check_verifier(source, config, verifier, verifier_name)
    return replace(source, config=config)


def make_head(
    source: ModelSource,
    verifier: Model,
    *,
    load_format: str = "auto",
    quantization: Quantization | None = None,
    seed: int = 0,
    tokens: int | None = None,
) -> DraftHead:
    """A fitted head beside its verifier, on the same device and in the same dtype.

    quantization: of its matrices and its copy of the verifier's output rows, whatever the verifier's are in. tokens:
    ids from there on mean nothing and are not proposed.
    """
    config = source.config
    if config.family == "head":
        return _distilled(source, verifier, load_format, quantization, seed, tokens)
    if config.rope.kind == "dynamic" and verifier.max_model_len > config.max_position:
        raise ConfigError(
            f"{source.name}: dynamic rope scaling past {config.max_position} tokens is not supported;"
            f" use --max-model-len {config.max_position} or less"
        )
    tensors = None if load_format == "dummy" else _open(source)
    weights, ids = _weights(source, verifier, tensors, quantization, seed)
    if ids is not None and tokens is not None and int(ids.max()) >= tokens:
        known = (ids < tokens).nonzero()[:, 0]
        ids = ids[known]
        if "head" in weights:
            weights["head"] = rows_of(weights["head"], known, verifier.kernels)
    return (EagleHead if config.family == EAGLE else Eagle3Head)(
        config, weights, verifier.kernels, verifier=verifier, vocab_map=ids, dtype=verifier.dtype,
        max_model_len=verifier.max_model_len, quantization=quantization,
    )  # fmt: skip


def dummy_head(name: str, verifier: ModelConfig) -> ModelSource:
    """The shape of an EAGLE or EAGLE-3 head as it would be trained for a verifier; only dummy weights can be made."""
    states = tuple(max(0, min(k, verifier.layers)) for k in default_states(verifier.layers))
    config = replace(
        verifier,
        family=name,
        layers=1,
        windows=(None,),
        local_rope=None,
        activation="silu",
        scale=verifier.head_dim**-0.5,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        unit_offset=False,
        embed_scale=None,
        attention_softcap=None,
        logit_softcap=None,
        draft_vocab_size=min(DUMMY_VOCAB, verifier.vocab_size) if name == EAGLE3 else None,
        eagle=EagleFields(states=states if name == EAGLE3 else None),
    )
    return ModelSource(name=name, config=config)


def _folder(source: ModelSource) -> Path:
    if source.folder is None:
        raise ModelError(f"{source.name} has no weights, only a shape: use --load-format dummy, or give a folder")
    return source.folder


# -- our own format ----------------------------------------------------------------------------------------------------


def _check_distilled(source: ModelSource, other: ModelConfig) -> None:
    own = source.config
    deepest = max(own.feature_layers or (0,))
    if (own.hidden_size, own.vocab_size) != (other.hidden_size, other.vocab_size) or deepest >= other.layers:
        raise ModelError(
            f"{source.name} is a draft head for a verifier of hidden size {own.hidden_size}, {own.vocab_size} tokens"
            f" and more than {deepest} layers; this one has {other.hidden_size}, {other.vocab_size} and {other.layers}:"
            " make one for it with `verifypd distil`"
        )


def _distilled(
    source: ModelSource,
    verifier: Model,
    load_format: str,
    quantization: Quantization | None,
    seed: int,
    tokens: int | None,
) -> DraftHead:
    config = source.config
    device, dtype, kernels = verifier.device, verifier.dtype, verifier.kernels
    specs = DistilledHead.specs(config)
    weights = allocate(source, specs, dtype, device, kernels.activation_dtype(dtype), quantization)
    rows = config.draft_vocab_size or config.vocab_size
    ids = torch.arange(rows, dtype=torch.int32)
    if load_format == "dummy":
        fill_dummy(weights, config, seed)
    else:
        tensors = SafetensorsFolder(_folder(source))
        fill(weights, specs, tensors, config)
        if tensors.shapes.get(VOCAB_MAP) != (rows,):
            raise ModelError(
                f"weights of {tensors.where}: {VOCAB_MAP} must hold {rows} token ids; make the draft again"
            )
        tensors.read_into(VOCAB_MAP, ids)
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise ModelError(f"weights of {tensors.where}: {VOCAB_MAP} has ids outside the vocabulary")
    pack(weights, specs, config, kernels)
    ids = ids if tokens is None else ids[ids < tokens]
    return DistilledHead(
        config,
        weights,
        kernels,
        verifier=verifier,
        vocab_map=ids.to(device, torch.int64),
        dtype=dtype,
        max_model_len=verifier.max_model_len,
        quantization=quantization,
    )


# -- EAGLE -------------------------------------------------------------------------------------------------------------


def _open(source: ModelSource) -> TensorSource:
    return scaled(open_folder(_folder(source), _name), source.config.fp8)


def _eagle(config: ModelConfig) -> EagleFields:
    assert config.eagle is not None
    return config.eagle


def _name(name: str) -> str:
    """What a tensor of an EAGLE file is called here."""
    name = canonical(name)
    old = next((old for old in RENAMED if name.startswith(old)), None)
    return name if old is None else RENAMED[old] + name.removeprefix(old)


def _with_states(source: ModelSource, verifier: ModelConfig, given: tuple[int, ...] | None) -> ModelConfig:
    """The head's config with the states that it reads of this verifier."""
    config, eagle, layers = source.config, _eagle(source.config), verifier.layers
    if config.family == EAGLE:
        if config.layers != 1:
            raise ModelError(f"{source.name}: an EAGLE head of {config.layers} layers is not supported; use one of one")
        return config
    usual = default_states(layers)
    states = given or eagle.states or usual
    if min(states) < 0 or max(states) > layers:
        said = "--draft-layers" if given else "its config" if eagle.states else "the default"
        raise ModelError(
            f"{source.name}: {said} names the states {shown(states)} and a verifier of {layers} layers has 0 to"
            f" {layers}: give the ids it was trained with as --draft-layers"
        )
    if given is None and eagle.states is None:
        log.info("%s names no auxiliary states: it reads %s (--draft-layers)", source.name, shown(usual))
    elif given is None and tuple(k + 1 for k in states) == usual:
        log.warning(
            "%s reads the states %s, each one below the usual %s: its config may count them as SGLang does; if few"
            " drafts stand, try --draft-layers %s",
            source.name,
            shown(states),
            shown(usual),
            shown(usual),
        )
    return replace(config, eagle=replace(eagle, states=states))


def _held(config: ModelConfig, tensors: TensorSource) -> ModelConfig:
    """The config with what the file holds: biases, norms, an embedding, output rows."""
    shapes, eagle = tensors.shapes, _eagle(config)
    where = f"weights of {tensors.where}"
    if "mask_hidden" in shapes:
        raise ModelError(f"{where} are of a P-EAGLE head, which is not supported: use an EAGLE-3 one")
    if len(shapes.get("fc.weight", ())) != 2:
        raise ModelError(f"{where} have no fc.weight: this is no EAGLE head; give --draft the folder of one")
    if config.family == EAGLE3:
        width, columns = eagle.target_hidden or config.hidden_size, shapes["fc.weight"][1]
        count = len(eagle.states or ())
        if columns != count * width:
            reads = f"{columns // width} states" if columns % width == 0 else f"{columns} numbers"
            raise ModelError(
                f"{where}: fc.weight reads {reads} and there are {count} ids of states of {width} numbers: give"
                " --draft-layers with the ids it was trained with"
            )
    rows = shapes.get("lm_head.weight", (config.draft_vocab_size or config.vocab_size,))[0]
    attention = "layers.0.self_attn"
    return replace(
        config,
        qkv_bias=f"{attention}.q_proj.bias" in shapes,
        output_bias=f"{attention}.o_proj.bias" in shapes,
        mlp_bias="layers.0.mlp.down_proj.bias" in shapes,
        qk_norm=f"{attention}.q_norm.weight" in shapes,
        draft_vocab_size=(config.draft_vocab_size or rows) if config.family == EAGLE3 else None,
        eagle=replace(
            eagle,
            own_embedding="embed_tokens.weight" in shapes,
            own_head="lm_head.weight" in shapes,
            fc_bias="fc.bias" in shapes,
            fc_norm=eagle.fc_norm or "fc_norm.0.weight" in shapes,
            norm_before_fc=eagle.norm_before_fc or "input_norm.weight" in shapes,
        ),
    )


def _dummy_parts(config: ModelConfig) -> ModelConfig:
    """As published: EAGLE shares all with its verifier, EAGLE-3 has output rows of its own."""
    eagle = _eagle(config)
    narrow = eagle.target_hidden not in (None, config.hidden_size)
    parts = replace(eagle, own_embedding=narrow, own_head=config.family == EAGLE3)
    return replace(config, eagle=parts)


def _check_verifier(source: ModelSource, config: ModelConfig, other: ModelConfig, name: str | None) -> None:
    """Refuse a head that was made for another verifier."""
    eagle = _eagle(config)
    made_for = f" (it was made for {eagle.verifier})" if eagle.verifier else ""
    advice = f"give --model the verifier it was made for, or another head{made_for}"
    width = eagle.target_hidden or config.hidden_size
    if (width, config.vocab_size) != (other.hidden_size, other.vocab_size):
        raise ModelError(
            f"{source.name} is a head for a verifier of hidden size {width} and {config.vocab_size} tokens; this one"
            f" has {other.hidden_size} and {other.vocab_size}: {advice}"
        )
    if eagle.verifier_kinds and not set(eagle.verifier_kinds) & set(KINDS[other.family]):
        kinds = ", ".join(eagle.verifier_kinds)
        raise ModelError(
            f"{source.name} is a head for {kinds}; this verifier is of the {other.family} family: {advice}"
        )
    if config.hidden_size != other.hidden_size and not (eagle.own_embedding and eagle.own_head):
        lacks = "embedding" if not eagle.own_embedding else "output rows"
        raise ModelError(
            f"{source.name} has no {lacks} of its own, and the verifier's are {other.hidden_size} wide, not"
            f" {config.hidden_size}: download the whole checkpoint"
        )
    if (config.draft_vocab_size or 0) > config.vocab_size:
        raise ModelError(
            f"{source.name}: a draft_vocab_size of {config.draft_vocab_size} is past the {config.vocab_size} tokens of"
            " the verifier: download the config again"
        )
    if eagle.verifier and name and eagle.verifier.rstrip("/").split("/")[-1].lower() != name.split("/")[-1].lower():
        log.warning("%s was made for %s, not for %s: it fits, but may draft poorly", source.name, eagle.verifier, name)


def _weights(
    source: ModelSource, verifier: Model, tensors: TensorSource | None, quantization: Quantization | None, seed: int
) -> tuple[dict[str, Weight], Tensor | None]:
    """What the head holds itself, and the ids of the tokens that it proposes."""
    config, dtype, device = source.config, verifier.dtype, verifier.device
    specs = HEADS[config.family].specs(config)
    weights = allocate(source, specs, dtype, device, verifier.kernels.activation_dtype(dtype), quantization, tensors)
    rows = config.draft_vocab_size or config.vocab_size
    if tensors is None:
        fill_dummy(weights, config, seed)
        ids = None if rows == config.vocab_size else torch.arange(rows) * config.vocab_size // rows
    else:
        fill(weights, specs, tensors, config)
        ids = _ids(tensors, rows, config.vocab_size)
    own, shared = weights.get("embedding"), verifier.embedding
    if isinstance(own, Tensor) and isinstance(shared, PackedWeight):
        shared = shared.dequantize(shared.dtype)
    if isinstance(own, Tensor) and isinstance(shared, Tensor) and torch.equal(own, shared):
        del weights["embedding"]  # a copy of the verifier's
    pack(weights, specs, config, verifier.kernels)
    return weights, None if ids is None else ids.to(device)


def _ids(tensors: TensorSource, rows: int, vocab: int) -> Tensor | None:
    """The verifier's ids of the rows of the head; None: they are the same."""
    where = f"weights of {tensors.where}"
    if D2T not in tensors.shapes:
        if rows != vocab:
            raise ModelError(
                f"{where}: {D2T} is missing, which says what the {rows} tokens of the draft are among the {vocab} of"
                " the verifier: download the checkpoint again"
            )
        return None
    if tensors.shapes[D2T] != (rows,):
        raise ModelError(
            f"{where}: {D2T} has shape {tensors.shapes[D2T]}, the draft has {rows} tokens: download it again"
        )
    ids = torch.zeros(rows, dtype=torch.int64)
    tensors.read_into(D2T, ids)
    ids += torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ModelError(f"{where}: {D2T} has ids outside the vocabulary of {vocab}: download it again")
    if int(torch.bincount(ids).max()) > 1:
        raise ModelError(f"{where}: {D2T} names a token twice: download it again")
    return None if rows == vocab and torch.equal(ids, torch.arange(rows)) else ids
