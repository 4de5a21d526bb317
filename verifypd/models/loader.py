"""Makes a Model: weights from safetensors, a GGUF file or thin air, fused and converted tensor by tensor.

Knows which checkpoint tensor goes where; nothing of hubs, downloads or how the model will be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifypd.errors import ConfigError, ModelError
from verifypd.kernels.base import Kernels
from verifypd.kernels.weights import FP8, Fp8Weight, Int8Weight, Quantization, Weight
from verifypd.models.base import Model
from verifypd.models.checkpoint import MAPS, SafetensorsFolder, TensorSource, copy_chunks
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.eagle import Eagle3Head, EagleHead
from verifypd.models.eagle_config import EAGLE, EAGLE3
from verifypd.models.fp8 import Fp8Folder, scaled
from verifypd.models.gemma import Gemma, Gemma2, Gemma3
from verifypd.models.gguf import GGUFFile
from verifypd.models.head import DistilledHead, DraftHead
from verifypd.models.layers import WeightSpec
from verifypd.models.llama import Llama
from verifypd.models.qwen import Qwen2, Qwen3
from verifypd.models.shards import ADDED_ONCE, WHOLE, Shard

FAMILIES: dict[str, type[Model]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
}
HEADS: dict[str, type[DraftHead]] = {"head": DistilledHead, EAGLE: EagleHead, EAGLE3: Eagle3Head}
DUMMY_STD = 0.02
# tensors a checkpoint may hold that a text model does not use
IGNORED = ("vision_tower.", "multi_modal_projector.", "vision_model.", "verifier_lm_head.", "verifier_norm.", *MAPS)
IGNORED_ENDS = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    load_format: str = "auto",
    quantization: Quantization | None = None,
    seed: int = 0,
    max_model_len: int | None = None,
    shard: Shard = WHOLE,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Model:
    """A model ready to run on `device`.

    dtype: of the weights. quantization: of linear layers, with a scale per row; see `_form` for what it leaves.
    max_model_len: positions to make rotary tables for, the config's own maximum unless given. seed: of dummy weights,
    the same for every rank. shard: the part of the model that is held here; reduce: see Model.
    """
    config = shard.config(source.config, source.name)
    if config.family not in FAMILIES:
        raise ConfigError(f"{source.name} is a draft head: give it as --draft, beside the verifier it was made for")
    length = config.max_position if max_model_len is None else max_model_len
    if config.rope.kind == "dynamic" and length > config.max_position:
        raise ConfigError(
            f"{source.name}: dynamic rope scaling past {config.max_position} tokens is not supported;"
            f" use --max-model-len {config.max_position} or less"
        )
    family = FAMILIES[config.family]
    specs = family.specs(config)
    held = replace(source, config=config)
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format {load_format!r} is not known; choose from auto, dummy")
    tensors = None if load_format == "dummy" else _open(source)
    if tensors is None and config.fp8 is not None and config.fp8.block is None:
        quantization = quantization or "fp8"  # as the checkpoint would be
    weights = allocate(held, specs, dtype, torch.device(device), kernels.activation_dtype(dtype), quantization, tensors)
    if tensors is None:
        fill_dummy(weights, config, seed)
    else:
        fill(weights, specs, tensors, source.config, family.specs(source.config), shard)
    pack(weights, specs, config, kernels)
    return family(config, weights, kernels, dtype=dtype, max_model_len=length, reduce=reduce)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
    """Bytes the matrices of a model will take, before anything is loaded (norms and biases are below a thousandth)."""
    total = 0
    for spec in (FAMILIES | HEADS)[config.family].specs(config).values():
        if spec.columns is not None:
            packed = _form(spec, config, quantization) is not None
            total += spec.rows * (spec.columns + 4 if packed else spec.columns * dtype.itemsize)
    return total


def _form(
    spec: WeightSpec, config: ModelConfig, quantization: Quantization | None, stored: frozenset[str] = frozenset()
) -> Quantization | None:
    """What a matrix is kept in. int8: all that are multiplied with. fp8: those within layers and before them, but no
    output rows, unless they are stored so: their logits are what is sampled from."""
    if not _packs(spec, config):
        return None
    if quantization == "int8":
        return "int8"
    layers = quantization == "fp8" and spec.target not in ("embedding", "head")
    kept = spec.target != "embedding" and all(name in stored for name, _ in spec.pieces)
    return "fp8" if layers or kept else None


def _packs(spec: WeightSpec, config: ModelConfig) -> bool:
    """Whether it is a matrix that is multiplied with, and so may be packed; an untied embedding is only looked up."""
    return spec.columns is not None and (spec.target != "embedding" or config.tie_embeddings)


def pack(weights: dict[str, Weight], specs: dict[str, WeightSpec], config: ModelConfig, kernels: Kernels) -> None:
    """Matrices take the form that the kernels read fastest, one after another: a model is never in memory twice."""
    for target, weight in weights.items():
        if isinstance(weight, Tensor | Int8Weight | Fp8Weight) and _packs(specs[target], config):
            weights[target] = kernels.pack(weight)


def _open(source: ModelSource) -> TensorSource:
    if source.gguf is not None:
        return GGUFFile(source.gguf, source.config)
    if source.folder is not None:
        return scaled(SafetensorsFolder(source.folder), source.config.fp8)
    raise ModelError(f"{source.name} has no weights, only a shape: use --load-format dummy, or give a folder")


def allocate(
    source: ModelSource,
    specs: dict[str, WeightSpec],
    dtype: torch.dtype,
    device: torch.device,
    vector_dtype: torch.dtype,
    quantization: Quantization | None,
    tensors: TensorSource | None = None,
) -> dict[str, Weight]:
    """Uninitialised tensors for every spec. Norms and biases take the activation dtype. tensors: what is stored in fp8
    stays so."""
    stored = tensors.stored if isinstance(tensors, Fp8Folder) else frozenset[str]()
    weights: dict[str, Weight] = {}
    try:
        for target, spec in specs.items():
            if spec.columns is None:
                weights[target] = torch.empty(spec.rows, dtype=vector_dtype, device=device)
                continue
            form = _form(spec, source.config, quantization, stored)
            kind = {"int8": torch.int8, "fp8": FP8, None: dtype}[form]
            values = torch.empty(spec.rows, spec.columns, dtype=kind, device=device)
            if form is None:
                weights[target] = values
                continue
            scale = torch.empty(spec.rows, device=device)
            weights[target] = Int8Weight(values, scale) if form == "int8" else Fp8Weight(values, scale, dtype)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error) and "memory" not in str(error):
            raise
        size = weight_bytes(source.config, dtype, quantization) / 1e9
        raise ModelError(
            f"{source.name} needs {size:.1f} GB for its weights and {device} has less free: choose a smaller model,"
            f" --dtype bfloat16 or --quantization {'int8' if source.config.fp8 is None else 'fp8'}"
        ) from None
    return weights


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint tensor goes, and how much of it."""

    target: str
    first: int  # row of the target
    shape: tuple[int, ...]  # of the checkpoint tensor
    rows: slice  # of it
    columns: slice | None  # of those; None: a vector


def fill(
    weights: dict[str, Weight],
    specs: dict[str, WeightSpec],
    tensors: TensorSource,
    config: ModelConfig,
    whole: dict[str, WeightSpec] | None = None,
    shard: Shard = WHOLE,
) -> None:
    """Read every tensor once, in file order, each into its rows of a fused one. Names and shapes are checked before.

    config, whole: of the whole model, where `specs` are of a shard.
    """
    places = _places(specs, whole or specs, shard)
    _check(places, tensors, config)
    for name in tensors.shapes:
        place = places.get(name)
        weight = weights.get(place.target) if place is not None else None
        if place is None or weight is None:
            continue
        first, rows = place.first, place.rows.stop - place.rows.start
        if isinstance(weight, Fp8Weight) and isinstance(tensors, Fp8Folder) and name in tensors.stored:
            weight.scale[first : first + rows] = tensors.scale(name)[place.rows]
            chunks = _rows(tensors.stored_chunks(name), place.rows)
            copy_chunks((c[:, place.columns] for c in chunks), weight.values[first : first + rows])
            continue
        if isinstance(weight, Int8Weight | Fp8Weight):
            for chunk in _rows(tensors.chunks(name), place.rows):
                packed = type(weight).quantize(chunk.to(weight.device))  # by whole rows: all ranks have the same scale
                part = slice(first, first + len(chunk))
                weight.values[part], weight.scale[part] = packed.values[:, place.columns], packed.scale
                first += len(chunk)
            continue
        assert isinstance(weight, Tensor)  # it is packed when it is whole
        held = weight[first : first + rows]
        if held.shape == place.shape:
            tensors.read_into(name, held)
        else:
            chunks = _rows(tensors.chunks(name), place.rows)
            copy_chunks((c if place.columns is None else c[:, place.columns] for c in chunks), held)
        if shard.rank and place.target.endswith(ADDED_ONCE):
            held.zero_()


def _places(specs: dict[str, WeightSpec], whole: dict[str, WeightSpec], shard: Shard) -> dict[str, _Place]:
    """Checkpoint name -> its place; names that only other ranks hold have one too, of a target that is not here."""
    places: dict[str, _Place] = {}
    for target, spec in whole.items():
        own, width, first = specs.get(target, spec), spec.columns, 0
        for (name, rows), (_, held) in zip(spec.pieces, own.pieces, strict=True):
            shape = (rows,) if width is None else (rows, width)
            columns = None if width is None or own.columns is None else shard.part(width, own.columns)
            places[name] = _Place(target, first, shape, shard.part(rows, held), columns)
            first += held
    return places


def _rows(chunks: Iterator[Tensor], rows: slice) -> Iterator[Tensor]:
    """Some of the rows that come in chunks."""
    start = 0
    for chunk in chunks:
        part = chunk[max(0, rows.start - start) : max(0, rows.stop - start)]
        start += len(chunk)
        if len(part):
            yield part
        if start >= rows.stop:
            return


def _check(places: dict[str, _Place], tensors: TensorSource, config: ModelConfig) -> None:
    where = f"weights of {tensors.where}"
    mixed = "the folder mixes two models; download it again"
    for name, place in places.items():
        if name not in tensors.shapes:
            raise ModelError(f"{where}: tensor {name} is missing: the download is incomplete; download it again")
        if tensors.shapes[name] != place.shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {tensors.shapes[name]}, config says {place.shape}: {mixed}"
            )
    for name in tensors.shapes:
        tied = config.tie_embeddings and name == "lm_head.weight"  # a second copy of the embedding
        if name not in places and not tied and not name.startswith(IGNORED) and not name.endswith(IGNORED_ENDS):
            model = f"{config.layers}-layer {config.family} model"
            raise ModelError(f"{where}: tensor {name} has no place in a {model}: {mixed}")


def fill_dummy(weights: dict[str, Weight], config: ModelConfig, seed: int) -> None:
    """Random matrices of a trained model's size; norms that scale by one; no biases."""
    for target, weight in weights.items():
        if isinstance(weight, Int8Weight):
            weight.values.random_(-127, 128, generator=_generator(weight.device, seed))
            weight.scale.fill_(DUMMY_STD / 73)  # 73: standard deviation of the integers -127..127
        elif isinstance(weight, Fp8Weight):
            _dummy_fp8(weight, seed)
        elif isinstance(weight, Tensor) and weight.dim() == 2:
            _noise(weight, seed)
        elif isinstance(weight, Tensor):
            weight.fill_(1.0 if target.endswith("norm") and not config.unit_offset else 0.0)
        seed += 1


def _noise(weight: Tensor, seed: int) -> None:
    bound = DUMMY_STD * 3**0.5  # uniform of the wanted deviation: drawn several times faster than normal
    weight.uniform_(-bound, bound, generator=_generator(weight.device, seed))


def _dummy_fp8(weight: Fp8Weight, seed: int) -> None:
    """What `_noise` would give, quantised, some rows at a time: a large model in bfloat16 may not fit."""
    for start in range(0, len(weight.values), 4096):
        part = slice(start, start + 4096)
        noise = torch.empty(weight.values[part].shape, dtype=weight.dtype, device=weight.device)
        _noise(noise, seed + start)
        packed = Fp8Weight.quantize(noise)
        weight.values[part], weight.scale[part] = packed.values, packed.scale


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
