"""Arms of a comparison by name, `ours:head` or `vllm:eagle:k=2`, and the settings each engine starts with.

Knows names and settings; loads nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifypd.bench.dummy import HEADS, POSITIONS, TINY, dummy_draft, dummy_model, parsed
from verifypd.config import EngineConfig
from verifypd.errors import ConfigError
from verifypd.models.builtin import find

DRAFT_MODEL = "tinyllama-1.1b"
OURS = {"plain": None, "auto": "", "head": "eagle", "eagle3": "eagle3", "tiny1b": DRAFT_MODEL}  # "": as --draft says
VLLM = {"plain": None, "eagle": "eagle", "tiny1b": DRAFT_MODEL}
DRAFTS = 4  # tokens of a draft, ours at most and vLLM's always
STEP_TOKENS = 8192  # of vLLM
OFFLINE = {  # for vLLM's process: no network, loopback only, nothing that a slim installation lacks
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "4",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """An engine as it is named on a command line."""

    name: str
    engine: str  # "ours" or "vllm"
    draft: str | None  # a head, a built-in shape, or none
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The name in letters that any file system takes."""
        return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in self.name)


def parse(text: str, draft: str = DRAFT_MODEL) -> Arm:
    """An arm from `ENGINE:NAME` or `ENGINE:NAME:SETTING=VALUE,…`. draft: that of `ours:auto`."""
    engine, _, rest = text.partition(":")
    name, _, given = rest.partition(":")
    known: dict[str, str | None] | None = {"ours": OURS, "vllm": VLLM}.get(engine)  # type: ignore[arg-type]
    if known is None or name not in known:
        names = [f"{each}:{arm}" for each, arms in (("ours", OURS), ("vllm", VLLM)) for arm in arms]
        raise ConfigError(
            f"arm {text!r} is not known; arms are {', '.join(names)}, with settings as in {names[1]}:arch=pd"
        )
    chosen = known[name]
    return Arm(text, engine, draft if chosen == "" else chosen, parsed(pairs_of(given, text)))


def pairs_of(given: str, text: str) -> list[str]:
    """`a=1,b=x,y` -> ["a=1", "b=x,y"]: a comma may be part of a value."""
    pairs: list[str] = []
    for part in given.split(",") if given else ():
        if "=" in part:
            pairs.append(part)
        elif pairs:
            pairs[-1] += f",{part}"
        else:
            raise ConfigError(f"arm {text!r}: give settings as NAME=VALUE,…")
    return pairs


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms have in common."""

    model: str  # a built-in shape
    alpha: float  # chance that a draft token stands
    batch: int  # requests in a pass
    max_len: int  # prompt and output, tokens
    kv_bytes: int  # of each arm
    tiny: bool = False

    @property
    def vocab(self) -> int:
        """Token ids of the model."""
        return int(self._shape["vocab_size"])

    @property
    def _shape(self) -> dict[str, Any]:
        known = find(self.model)
        if known is None:
            raise ConfigError(f"--model {self.model} is no built-in model; `verifypd models` lists them")
        return TINY if self.tiny else dict(known.raw)


def ours_settings(arm: Arm, setup: Setup, folder: Path) -> dict[str, Any]:
    """Settings of our engine, checked."""
    settings: dict[str, Any] = {
        "model": dummy_model(setup.model, folder, setup.tiny), "draft": None, "arch": "plain", "load_format": "dummy",
        "batch_size": setup.batch, "max_model_len": setup.max_len, "kv_memory": setup.kv_bytes, "prefix_cache": False,
    }  # fmt: skip
    if arm.draft is not None:
        draft = dummy_draft(arm.draft, folder / "draft", setup.tiny) if arm.draft != "ngram" else arm.draft
        settings |= {"draft": draft, "arch": "auto", "max_draft": DRAFTS, "synthetic_acceptance": setup.alpha}
        settings["measure_costs"] = not setup.tiny
    if setup.tiny:
        settings |= {"dtype": "float32", "device": "cpu"}
    settings |= arm.settings
    EngineConfig.from_kwargs(**settings)
    return settings


def vllm_settings(arm: Arm, setup: Setup, folder: Path) -> dict[str, Any]:
    """Arguments of vLLM's engine: prefix cache off, graphs as it has them by default."""
    given = dict(arm.settings)
    drafts = int(given.pop("k", DRAFTS)) if arm.draft is not None else 0
    alpha = float(given.pop("alpha", setup.alpha))
    settings: dict[str, Any] = {
        "model": peer_model(setup.model, folder / "llama7b", setup.tiny),
        "load_format": "dummy", "dtype": "bfloat16", "seed": 0,
        "max_model_len": setup.max_len, "max_num_seqs": setup.batch, "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_memory_bytes": setup.kv_bytes, "gpu_memory_utilization": 0.1,  # the share is only checked, not used
        "enable_prefix_caching": False, "tensor_parallel_size": 1, "generation_config": "vllm",
    }  # fmt: skip
    if arm.draft is not None:
        head = arm.draft in HEADS
        settings["speculative_config"] = {
            "model": peer_model(
                setup.model if head else arm.draft,
                folder / ("eagle7b" if head else "tiny1b"),
                setup.tiny,
                **({"num_hidden_layers": 1} if head else {}),
            ),
            "method": arm.draft if head else "draft_model",
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [alpha ** (i + 1) for i in range(drafts)],  # each position's, unconditional
        }
    return {**settings, **given}


def peer_model(name: str, path: Path, tiny: bool, **changes: Any) -> str:
    """A folder with a model's shape and a tokenizer of numbered words, as vLLM reads it. Its weights are random too."""
    known = find(name)
    if known is None:
        raise ConfigError(f"{name} is no built-in model; `verifypd models` lists them")
    shape: dict[str, Any] = TINY if tiny else {**known.raw, "max_position_embeddings": POSITIONS}
    shape = {**shape, "torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": True, **changes}
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, shape["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    files = {
        "config.json": shape,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "model_max_length": POSITIONS,
        },
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (path / file).write_text(json.dumps(content))
    return str(path)
