"""From settings to a running engine: loads models, makes the memory budget, has it all wired. Used once, at start."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from verifypd.attention.choose import backend
from verifypd.config import EngineConfig, parse_bytes
from verifypd.control.cost import CostModel
from verifypd.engine import calibration, costs, dtypes
from verifypd.engine.engine import Engine
from verifypd.engine.quantized import check_verifier, draft_quantization, kept_in, verifier_quantization
from verifypd.engine.rehearsal import rehearse
from verifypd.engine.sizes import DEFAULT_MAX_LEN, GPU_SHARE, available_bytes, check_memory, process_bytes
from verifypd.engine.wiring import Parts, chunk_rows, graph_count, wire
from verifypd.errors import ConfigError, HubError, MemoryBudgetError, ModelError, TokenizerError
from verifypd.kernels.base import Kernels
from verifypd.kernels.choose import select
from verifypd.kernels.watch import watch_compiles
from verifypd.kernels.weights import FP8, Quantization
from verifypd.kv.budget import Budget, plan_budget, show
from verifypd.kv.pool import block_bytes
from verifypd.metrics.pauses import watch_collections
from verifypd.models import builtin
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.head import DraftHead
from verifypd.models.head_loader import DUMMIES, dummy_head, fit_head, make_head
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.models.shards import WHOLE, Shard
from verifypd.parallel.group import Job
from verifypd.parallel.ranks import Ranks
from verifypd.runtime.streams import reserve_pinned
from verifypd.sampling.choose import pick_sampler
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT_CPU_KV = 1 << 30  # bytes
GRAPH_BYTES = 6 << 20  # of a captured pass, besides the workspace they share


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine and what its callers need beside it."""

    engine: Engine
    tokenizer: Tokenizer | None  # None: the source has shapes only
    budget: Budget


def build(config: EngineConfig) -> Built:
    """Everything the settings ask for, or one clear error."""
    config = seen_from_the_verifier(config)
    device = pick_device(config.device)
    watch_collections()
    if device.type == "cuda":
        watch_compiles()
    config = config.on(device.type)
    form = verifier_quantization(config)
    source = resolve(config.model, load_format=config.load_format, hf_token=config.hf_token, revision=config.revision)
    check_verifier(config, source, device)
    drafts = drafts_for(config)
    draft_source, draft_name = None, ""
    if drafts and config.arch == "plain" and config.draft != "auto":
        log.info("%s is not loaded: --arch plain never drafts", ", ".join(drafts))
    for name in drafts:
        if name != "ngram" and config.arch != "plain":
            draft_name = name
            if config.load_format == "dummy" and name in DUMMIES:
                draft_source = dummy_head(name, source.config)
            else:
                draft_source = find_draft(name, config)
    head = draft_source is not None and draft_source.config.is_head
    if draft_source is not None and head:
        draft_source = fit_head(
            draft_source, source.config, load_format=config.load_format, states=config.draft_states,
            verifier_name=source.name,
        )  # fmt: skip
    shard = pick_shard(config, source, device)
    apart = check_apart(config, draft_source, device)
    reading = pick_apart(config.prefill_apart, device, "prefill")
    if reading and head:
        raise ConfigError("a draft head reads the verifier's states of prompts: leave out --placement prefill=…")
    here = None if apart else draft_source  # what is loaded into this process
    check_memory(config, source, here, device)  # before kernels are compiled
    kernels = select(device, config.kernels, batch_invariant=config.batch_invariant)
    fp8 = config.kv_cache_dtype == "fp8"
    attends = backend(config.attention, device, fp8=fp8).name
    if config.batch_invariant and (kernels.name == "torch" or attends in ("torch", "flashinfer")):
        raise ConfigError(
            "--batch-invariant needs kernels and attention of one kind, native (--device cpu, and gcc or clang"
            f" installed) or triton (CUDA); these are {kernels.name} and {attends}"
        )
    sampler = pick_sampler(config.sampler, device)
    replayed = pick_graphs(config, device, attends)
    tokenizer = read_tokenizer(source)
    vocab = source.config.vocab_size  # token ids that requests may have
    vocab = vocab if tokenizer is None else min(vocab, tokenizer.vocab_size)
    vocab_map = None
    if draft_source is not None and not head:
        check_pair(source, tokenizer, draft_source, read_tokenizer(draft_source))
        vocab_map = read_vocab_map(draft_source, vocab, device)
    base = process_bytes()  # what a timing takes for a moment, the weights take over
    dtype = pick_dtype(config, source.config, device, kernels)
    aside = 0
    if attends == "flashinfer":
        if head:
            raise ConfigError("--attention flashinfer cannot draft with a head; use --attention triton")
        aside = check_flashinfer(config, dtype, [each for each in (source, draft_source) if each is not None])

    max_len = min(config.max_model_len or DEFAULT_MAX_LEN, source.config.max_position)
    if config.max_model_len and config.max_model_len > source.config.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is past the model's {source.config.max_position} tokens"
        )
    capacity = max_len + config.max_draft + 2
    drafts_in = draft_quantization(config, kernels)
    values = kernels.activation_dtype(dtype)
    check_memory(config, source, here, device, weights=dtype, values=values, draft_quantization=drafts_in or "none")
    ranks = None
    if shard.size > 1:
        ranks = Ranks(
            Job(
                shard=shard, source=source, dtype=dtype, device=device, kernels=kernels.name, attention=attends,
                batch_invariant=config.batch_invariant, load_format=config.load_format,
                quantization=form, max_model_len=max_len, block_size=config.block_size, fp8_kv=fp8,
            )
        )  # fmt: skip
    model = _load(config, source, dtype, device, kernels, max_len, form, shard, ranks)
    draft: Model | None = None
    if draft_source is not None and head:
        draft = make_head(draft_source, model, load_format=config.load_format, quantization=drafts_in, tokens=vocab)
    elif draft_source is not None and not apart:
        draft = _load(config, draft_source, dtype, device, kernels, max_len, drafts_in)
    if ranks is not None:
        ranks.await_weights()
    budget = make_budget(config, model, draft, base, max_len, capacity, replayed != "off", aside)
    if ranks is not None:
        ranks.begin(budget.blocks)
    log.info(
        "%s on %s, %s weights, %s kernels, %s keys and values; %s",
        source.name,
        device if ranks is None else f"{shard.size} ranks from {device} on",
        kept_in(source.config, form, device) or str(dtype).removeprefix("torch."),
        kernels.name,
        "fp8" if fp8 else str(model.activation_dtype).removeprefix("torch."),
        budget,
    )
    if draft is not None and not head:
        draft.narrow = draft.config.vocab_size < vocab
    eos_ids = tuple(dict.fromkeys((*source.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
    lookup = "ngram" in drafts
    cost = CostModel()
    parts = Parts(
        config=config, model=model, draft=draft, lookup=lookup, budget=budget, vocab_map=vocab_map, vocab=vocab,
        eos_ids=eos_ids, max_len=max_len, capacity=capacity, sampler=sampler, replayed=replayed, ranks=ranks,
        sample=tuple(calibration.sample(tokenizer, model.config.vocab_size, max_len)) if fp8 else (),
        processes=lane_processes(config, dtype, draft_name, {"decode": apart, "prefill": reading}),
    )  # fmt: skip
    engine = wire(parts, cost)
    if device.type == "cuda":
        rehearse(engine, whole=replayed == "start")
    if config.wants_costs or (device.type == "cuda" and config.measure_costs is None):
        costs.fit(cost, costs.obtain(engine, fresh=bool(config.measure_costs)))
    if device.type == "cuda":
        gc.collect()  # what the start left behind is not for a step to collect
        reserve_pinned(config.slots)
    engine.started()
    return Built(engine, tokenizer, budget)


def drafts_for(config: EngineConfig) -> tuple[str, ...]:
    """The drafters to run, as asked for. 'auto': the draft that comes with the verifier and look-up, or look-up."""
    if config.drafts != ("auto",):
        return config.drafts
    known = builtin.find(config.model)
    if known is None or known.draft is None or config.load_format == "dummy" or config.alphas is not None:
        return ("ngram",)
    return (known.draft, "ngram")


def find_draft(name: str, config: EngineConfig) -> ModelSource:
    """The draft's files; an error says that it is about the draft."""
    try:
        return resolve(name, load_format=config.load_format, hf_token=config.hf_token)
    except HubError as error:
        raise HubError(f"--draft: {error}") from None


def seen_from_the_verifier(config: EngineConfig) -> EngineConfig:
    """`verify=DEVICE` in the terms of the engine, which is where its verifier is: the draft stays on `--device`."""
    where = config.verify_apart
    if where is None:
        return config
    draft = where if where == "process" else str(pick_device(config.device))
    device = config.device if where == "process" else str(pick_device(where, "--placement verify="))
    return replace(config, device=device, placement=config.placement.replace(f"verify={where}", f"decode={draft}"))


def check_apart(config: EngineConfig, draft: ModelSource | None, device: torch.device) -> torch.device | None:
    """The device of a draft model that runs in a process of its own; None: it runs here. Refuses who cannot."""
    where = config.draft_apart
    if where is None:
        return None
    if draft is None or draft.config.is_head:
        what = "looks text up" if draft is None else "reads the verifier's states"
        raise ConfigError(
            f"--placement decode={where} is for a draft model; {draft.name if draft else 'this drafter'} {what}, in the"
            " verifier's process: leave it out, or give --draft MODEL"
        )
    return pick_apart(where, device, "decode")


def pick_apart(where: str | None, device: torch.device, lane: str) -> torch.device | None:
    """The device of a lane's own process; None: it has none."""
    if where is None:
        return None
    return device if where == "process" else pick_device(where, f"--placement {lane}=")


def lane_processes(
    config: EngineConfig,
    dtype: torch.dtype,
    draft: str,
    devices: dict[str, torch.device | None],
) -> dict[str, dict[str, Any]]:
    """What the processes of lanes are told, by lane, but for what the wiring adds. On a CPU they and this one share the
    threads: more of them than cores would wait for each other."""
    threads = torch.get_num_threads()
    chosen = {lane: device for lane, device in devices.items() if device is not None}
    sharing = sum(device.type == "cpu" for device in chosen.values())
    each = max(1, threads // (1 + sharing))
    if sharing:
        torch.set_num_threads(max(1, threads - sharing * each))
    return {
        lane: {
            "config": {**asdict(config), "dtype": str(dtype).removeprefix("torch.")},
            "draft": draft,
            "device": str(device),
            "threads": each if device.type == "cpu" else threads,
        }
        for lane, device in chosen.items()
    }


def _load(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    length: int,
    quantization: Quantization | None,
    shard: Shard = WHOLE,
    ranks: Ranks | None = None,
) -> Model:
    return load_model(
        source,
        dtype=dtype,
        device=device,
        kernels=kernels,
        load_format=config.load_format,
        quantization=quantization,
        max_model_len=length,
        shard=shard,
        reduce=None if ranks is None else ranks.group.sum,
    )


def make_budget(
    config: EngineConfig,
    model: Model,
    draft: Model | None,
    base: int,
    max_len: int,
    capacity: int,
    replayed: bool = False,
    aside: int = 0,
) -> Budget:
    """Count everything that will be allocated, then give the rest, or what was asked for, to KV blocks."""
    vocab = model.config.vocab_size
    spans = config.batch_size * (config.max_draft + 1 if config.arch != "plain" else 1)
    parts = [("verifier weights", model.weight_bytes)]
    if model.device.type == "cpu":
        parts.insert(0, ("process", base))
    if draft is not None:
        parts.append(("draft weights", draft.weight_bytes))
    if draft is not None or config.draft_apart:
        parts.append(("draft probabilities", config.slots * config.max_draft * vocab * 4))
    rows = spans + chunk_rows(config)
    width = 8 * model.config.hidden_size + 4 * model.config.mlp_size
    parts.append(("workspace", spans * vocab * 4 * 2 + rows * width * model.activation_dtype.itemsize))
    if aside:
        parts.append(("attention", aside))
    if replayed:
        parts.append(("graphs", GRAPH_BYTES * graph_count(config, draft is not None)))
    verifier_block = _block_bytes(model, config.block_size, FP8 if config.kv_cache_dtype == "fp8" else None)
    draft_block = _block_bytes(draft, config.block_size) if draft else 0
    request_blocks = -(-capacity // config.block_size) + 1
    share = available_bytes() // config.tensor_parallel_size  # ranks on a CPU are in one memory
    if config.kv_memory is not None:
        kv_bytes = parse_bytes(config.kv_memory, "kv_memory")
    elif model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        kv_bytes = int(free - (1 - GPU_SHARE) * total - sum(size for name, size in parts if "weights" not in name))
    else:
        kv_bytes = max(DEFAULT_CPU_KV, request_blocks * (verifier_block + draft_block))
        kv_bytes = min(kv_bytes, share // 2)
    if model.device.type == "cpu" and kv_bytes > share:
        raise MemoryBudgetError(
            f"--kv-memory {show(kv_bytes)} is more than the {show(share)} that are free here: ask for less"
        )
    return plan_budget(
        parts=tuple(parts),
        kv_bytes=kv_bytes,
        block_size=config.block_size,
        verifier_block_bytes=verifier_block,
        draft_block_bytes=draft_block,
        request_tokens=capacity,
        max_model_len=max_len,
        most_tokens=config.slots * (capacity + config.block_size),
    )


def _block_bytes(model: Model, block_size: int, kept: torch.dtype | None = None) -> int:
    """kept: dtype of keys and values, where it is not that of activations."""
    shape, dtype = model.config, model.activation_dtype
    features = block_size * model.feature_width * dtype.itemsize if isinstance(model, DraftHead) else 0
    return block_bytes(shape.layers, block_size, shape.kv_heads, shape.head_dim, kept or dtype) + features


def read_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The tokenizer that comes with a model; None where only its weights or its shape are known."""
    if source.folder is None or not (source.folder / "tokenizer.json").is_file():
        log.warning("%s has no tokenizer.json: prompts must be token ids", source.name)
        return None
    return Tokenizer.from_folder(source.folder)


def check_pair(
    verifier: ModelSource, tokenizer: Tokenizer | None, draft: ModelSource, draft_tokenizer: Tokenizer | None
) -> None:
    """Refuse a draft whose token ids mean something else; padded vocabulary sizes may differ."""
    if tokenizer is None or draft_tokenizer is None:
        if draft.config.vocab_size > verifier.config.vocab_size:
            raise TokenizerError(f"{draft.name} has more tokens than {verifier.name}: they are not a pair")
        return
    difference = tokenizer.difference(draft_tokenizer)
    if difference:
        raise TokenizerError(f"{draft.name} cannot draft for {verifier.name}: {difference}; use a draft of its family")


def read_vocab_map(draft: ModelSource, vocab: int, device: torch.device) -> Tensor | None:
    """[rows of the draft's head] -> token ids below vocab, from `vocab_map.safetensors`; None: it covers every id."""
    rows = draft.config.draft_vocab_size
    if rows is None:
        return None
    path = (draft.folder or Path()) / "vocab_map.safetensors"
    if not path.is_file():
        raise ModelError(f"{draft.name} covers {rows} tokens but has no vocab_map.safetensors that says which")
    ids = load_file(path).get("ids")
    whole = ids is not None and ids.dtype == torch.int64 and tuple(ids.shape) == (rows,)
    if ids is None or not whole or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ModelError(f"{path}: 'ids' must hold {rows} int64 token ids below {vocab}")
    return ids.to(device)


def pick_device(name: str, flag: str = "--device ") -> torch.device:
    """The device to run on."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{flag}{name!r} is not known; use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{flag}{name}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use {flag}cpu")
    return device


def pick_shard(config: EngineConfig, source: ModelSource, device: torch.device) -> Shard:
    """The part of the verifier that rank 0 holds; ConfigError where it cannot be divided so, or devices are missing."""
    shard = Shard(0, config.tensor_parallel_size)
    shard.config(source.config, source.name)
    last = (device.index or 0) + shard.size
    if device.type == "cuda" and last > torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size {shard.size} from {device} on needs {last} CUDA devices and PyTorch sees"
            f" {torch.cuda.device_count()}: use a smaller size"
        )
    return shard


def pick_graphs(config: EngineConfig, device: torch.device, attends: str) -> str:
    """When passes are captured. auto: at start, where there are graphs and lanes run in line."""
    if attends == "flashinfer" and config.graphs in ("lazy", "start"):
        raise ConfigError(
            f"--graphs {config.graphs} needs --attention triton: flashinfer plans every pass on the host, use --graphs"
            " off with it"
        )
    if config.graphs != "auto":
        return config.graphs
    captured = config.in_line and config.tensor_parallel_size == 1
    return "start" if device.type == "cuda" and attends == "triton" and captured else "off"


def check_flashinfer(config: EngineConfig, dtype: torch.dtype, sources: list[ModelSource]) -> int:
    """Refuse models FlashInfer has no kernel for. Bytes it sets aside: lanes of their own streams have their own."""
    from verifypd.attention import flashinfer

    for source in sources:
        flashinfer.check_model(dtype, source.config.head_dim)
    return flashinfer.STREAM_BYTES * (
        1 + sum(where.startswith(("stream", "partition")) for where in config.placements.values())
    )


def pick_dtype(config: EngineConfig, shape: ModelConfig, device: torch.device, kernels: Kernels) -> torch.dtype:
    """auto: bfloat16 on a GPU and where the CPU has instructions for it, the faster by a timing with our own CPU
    kernels, else float32."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if kernels.name == "native" and config.quantization != "int8":
        return dtypes.fastest(shape, kernels, drafts=config.arch != "plain" and config.draft is not None)
    if device.type == "cuda" or kernels.name == "native" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32
