"""Engine settings: frozen, checked at birth, the one source of CLI flags. Knows nothing of tensors or files."""

from __future__ import annotations

import math
import os
import re
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from verifypd.errors import ConfigError
from verifypd.hints import advice

ARCHITECTURES = ("plain", "baseline", "pd", "pdv", "unified", "table", "auto")
CONTROLLERS = ("throughput", "threshold", "fixed")
LANES = ("prefill", "decode", "verify")
PLACEMENTS = ("fused", "stream", "partition")
APART = r"process|cpu|cuda(:\d+)?"  # a process of its own, on the same device or on another
WAITS = ("block", "spin")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFT_TEMPERATURES = (0.1, 10.0)  # of the drafter, relative to the request's

# settings that only these architectures read; giving one to another architecture is an error, not a no-op
_BELONGS = {
    "workers": ("baseline",),
    "verify_batch": ("pdv", "table"),
    "verify_wait_ms": ("pdv", "table"),
    "lane_weights": ("pdv", "table"),
}
VERIFY_WAIT_MS = 5.0

# what the device decides where 0 is given: tokens, and ms; a gap is about what a step with a chunk takes
BY_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"prefill_chunk": 256, "slo_ttft": 500.0, "slo_gap": 250.0},
    "cuda": {"prefill_chunk": 2048, "slo_ttft": 200.0, "slo_gap": 30.0},
}

SHORTEST_TARGET = 1e-3  # ms


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A field with the help text and argparse hints the CLI shows."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs to start."""

    model: str = setting("smollm2", "verifier: a built-in name, a Hugging Face folder, a GGUF file or a hub id")
    draft: str | None = setting(
        "auto",
        "drafter: path, name or hub id of a draft model or head, 'ngram', both as 'NAME,ngram', 'none', or 'auto': what"
        " comes with the verifier, else ngram",
    )
    arch: str = setting("auto", "scheduling architecture", choices=ARCHITECTURES)
    controller: str = setting("throughput", "what sets the draft length", choices=CONTROLLERS)
    search_temperature: bool = setting(
        False, "let the throughput controller look for the drafter temperature with most accepted tokens"
    )
    draft_temperature: float | None = setting(
        None,
        "the drafter draws at this many times the request's temperature, 0.1 to 10 (default: 1, or what"
        " --search-temperature finds)",
    )
    max_draft: int = setting(8, "longest draft, in tokens; the 'fixed' controller always asks for this many")
    acceptance: str = setting(
        "rejection", "acceptance rule for requests without a seed", choices=("rejection", "coupled")
    )
    synthetic_acceptance: str | float | tuple[float, ...] | None = setting(
        None,
        "accept drafts by chance: one value, a comma-separated list (one a request) or drift:FILE; text means nothing",
    )
    batch_size: int = setting(32, "requests in one verifier pass")
    verify_batch: int | None = setting(None, "requests in a verify batch (pdv; default: a quarter of the batch size)")
    verify_wait_ms: float | None = setting(None, "longest wait for a full verify batch, ms (pdv; default: 5)")
    workers: int | None = setting(None, "requests that take turns at batch 1 (baseline; default: the batch size)")
    queue_factor: float = setting(1.2, "admitted requests at most this many times the batch size, 1.0 to 2.0")
    lane_weights: str | None = setting(None, "relative lane weights, e.g. prefill=1,verify=2,decode=4 (pdv)")
    slo_ttft: float = setting(0.0, "target for the first token, ms (default: 0, which is 500 on a CPU, 200 on a GPU)")
    slo_tpot: float = setting(15.0, "target per output token, ms")
    slo_gap: float = setting(
        0.0, "target for the time between two outputs of a request, ms (default: 0, which is 250 on a CPU, 30 on a GPU)"
    )
    placement: str = setting(
        "fused",
        "where lanes run: fused or stream, for all or by lane (prefill=fused,decode=stream); prompts or drafts also on"
        " some multiprocessors only (prefill=partition:48). In a process of its own: the draft model, on the same"
        " device (decode=process) or another (decode=cuda:1, decode=cpu), prompts (prefill=process, with pd and pdv),"
        " or the verifier (verify=cuda:1). See docs/devices.md",
    )
    measure_costs: bool | None = setting(
        None,
        "time passes at start, some seconds; off: learn them from the run"
        " (default: where auto or throughput uses them and none are kept for this model and device)",
    )
    wait: str = setting(
        "block", "how the host waits for a CUDA device: asleep, or polling on a core of its own", choices=WAITS
    )
    dtype: str = setting("auto", "weights: auto is what the device does best", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "quantisation of the linear layers, with a scale for each row: int8, or fp8 (CUDA; embedding and lm_head stay)",
        choices=("int8", "fp8"),
    )
    draft_quantization: str = setting(
        "auto",
        "the draft's weights: int8, fp8, or none: the verifier's dtype"
        " (auto: int8 with native kernels, else what --quantization says)",
        choices=("auto", "int8", "fp8", "none"),
    )
    load_format: str = setting("auto", "'dummy': random weights in the shape of the config", choices=("auto", "dummy"))
    kv_memory: str | int | None = setting(None, "memory for both models' KV blocks, e.g. 2GB (default: by device)")
    kv_cache_dtype: str = setting(
        "auto",
        "keys and values of the verifier: as they are computed, or fp8 (e4m3 with a scale for each head), half the"
        " bytes of bfloat16; drafts keep theirs as they are computed",
        choices=("auto", "fp8"),
    )
    max_model_len: int | None = setting(None, "longest prompt + output, tokens (default: the model's, 8192 at most)")
    batch_invariant: bool = setting(False, "fixed reduction order: a request's numbers do not depend on its neighbours")
    record: str | None = setting(None, "folder to write one JSON line per step to", metavar="DIR")
    block_size: int = setting(16, "tokens in a KV block")
    prefill_chunk: int = setting(
        0, "prompt tokens one pass takes, at most (default: 0, which is 256 on a CPU, 2048 on a GPU)"
    )
    draft_layers: str | None = setting(
        None,
        "states an EAGLE-3 head reads, whatever its config says: 2,16,29 are hidden_states 2, 16 and 29 as Hugging Face"
        " counts them, 0 the embedding",
        metavar="IDS",
    )
    draft_chunk: int = setting(1024, "tokens a step of the draft model may catch up with")
    prefix_cache: bool = setting(True, "share KV blocks between requests with the same prefix")
    device: str = setting("auto", "cpu, cuda or cuda:N (auto: cuda where there is one)")
    tensor_parallel_size: int = setting(
        1,
        "divide the verifier among so many devices, from --device on; on a CPU, among so many processes. --kv-memory is"
        " then of each",
    )
    attention: str = setting(
        "auto",
        "attention backend (auto: the best of the device; flashinfer: CUDA, where it is installed, for comparison)",
        choices=("auto", "torch", "native", "triton", "flashinfer"),
    )
    sampler: str = setting(
        "auto",
        "temperature, top-k, top-p and acceptance (auto: triton on CUDA; native, in C, on a CPU with a"
        " compiler; else torch)",
        choices=("auto", "torch", "native", "triton"),
    )
    graphs: str = setting(
        "auto",
        "CUDA graphs of passes and draft loops: captured at start, when a shape first comes (lazy), or off"
        " (auto: at start, on CUDA with triton attention)",
        choices=("auto", "off", "lazy", "start"),
    )
    kernels: str = setting(
        "auto",
        "a layer's operations: native (CPU, needs a C compiler once), triton (CUDA) or torch",
        choices=("auto", "torch", "native", "triton"),
    )
    seed: int | None = setting(None, "makes requests without a seed repeatable from run to run")
    hf_token: str | None = setting(None, "token for gated hub models (default: $HF_TOKEN or .env)", secret=True)
    revision: str | None = setting(None, "hub revision of the verifier")
    ngram_max: int = setting(4, "longest suffix the n-gram drafter looks up")
    ngram_min: int = setting(2, "shortest suffix the n-gram drafter looks up")
    late_tickets: bool = setting(
        False, "deliver every verdict one step late (tests the asynchronous contract)", hidden=True
    )

    def __post_init__(self) -> None:
        for name in ("model", "draft"):
            if not isinstance(getattr(self, name) or "", str | os.PathLike):
                raise ConfigError(f"{flag(name)} {getattr(self, name)!r} is no name")
        for f in fields(self):
            if str(f.type).startswith("int") and isinstance(getattr(self, f.name), float):
                raise ConfigError(f"{flag(f.name)} {getattr(self, f.name)!r} must be a whole number")
        if not self.model:  # which as a path would be this folder
            raise ConfigError("--model is empty: give a folder, a GGUF file or a name")
        object.__setattr__(self, "draft", None if self.draft in ("none", "") else self.draft)
        models = [name for name in self.drafts if name != "ngram"]
        if len(models) > 1 or "" in models or len(self.drafts) != len(set(self.drafts)):
            raise ConfigError(f"--draft {self.draft!r}: give one draft model, 'ngram', or both as NAME,ngram")
        if len(self.drafts) > 1 and {"auto", "none"} & set(self.drafts):
            raise ConfigError(f"--draft {self.draft!r}: 'auto' and 'none' stand alone")
        for name in (
            "arch",
            "controller",
            "acceptance",
            "dtype",
            "quantization",
            "draft_quantization",
            "load_format",
            "kv_cache_dtype",
            "attention",
            "kernels",
            "sampler",
            "graphs",
            "wait",
        ):
            self._check_choice(name)
        if self.measure_costs is not None and not isinstance(self.measure_costs, bool):
            raise ConfigError(f"--measure-costs {self.measure_costs!r} must be true, false or left out")
        self._check_range("max_draft", 0, 64)
        self._check_range("batch_size", 1, 4096)
        self._check_range("queue_factor", 1.0, 2.0)
        self._check_range("block_size", 1, 1024)
        self._check_range("prefill_chunk", 0, 1 << 20)
        self._check_range("draft_chunk", 2, 1 << 20)
        self._check_range("slo_ttft", SHORTEST_TARGET if self.slo_ttft else 0, math.inf)
        self._check_range("slo_tpot", SHORTEST_TARGET, math.inf)
        self._check_range("slo_gap", 0, math.inf)
        self._check_range("ngram_min", 1, 16)
        self._check_range("ngram_max", self.ngram_min, 16)
        if self.max_model_len is not None:
            self._check_range("max_model_len", 2, 1 << 24)
        if self.draft_temperature is not None:
            self._check_range("draft_temperature", *DRAFT_TEMPERATURES)
            if self.search_temperature:
                raise ConfigError("--search-temperature looks for what --draft-temperature sets: give one of the two")
        for name, archs in _BELONGS.items():
            if getattr(self, name) is not None and self.arch not in archs:
                raise ConfigError(f"{flag(name)} belongs to --arch {archs[0]}; leave it out with --arch {self.arch}")
        if self.verify_batch is not None:
            self._check_range("verify_batch", 1, self.batch_size)
        if self.verify_wait_ms is not None:
            self._check_range("verify_wait_ms", 0.0, 60_000.0)
        if self.workers is not None:
            self._check_range("workers", 1, self.slots)
        self.weights, self.placements, self.draft_states  # noqa: B018  # parsed at birth, so that a bad value is refused at once
        if self.draft_apart and not (self.arch != "plain" and self.max_draft and self.drafts):
            raise ConfigError(f"--placement {self.placement}: nothing is drafted with these settings; leave it out")
        if self.prefill_apart and self.arch not in ("pd", "pdv"):
            raise ConfigError(f"--placement prefill={self.prefill_apart} needs a lane of prompts: use --arch pd or pdv")
        if self.graphs in ("lazy", "start") and not self.in_line:  # captured passes share memory
            raise ConfigError(f"--graphs {self.graphs} runs lanes in line; leave out --placement {self.placement}")
        self._check_range("tensor_parallel_size", 1, 64)
        if self.tensor_parallel_size != 1:
            self._check_parallel()
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory, "kv_memory")
        self.alphas  # noqa: B018  # parsed at birth, so that a bad value is refused at once

    def on(self, device: str) -> EngineConfig:
        """The same with what is left to the device, "cpu" or "cuda"."""
        return replace(self, **{name: value for name, value in BY_DEVICE[device].items() if not getattr(self, name)})

    def _check_choice(self, name: str) -> None:
        choices = next(f for f in fields(self) if f.name == name).metadata["choices"]
        value = getattr(self, name)
        if value not in choices and not (value is None and name == "quantization"):
            raise ConfigError(f"{flag(name)} {value!r} is not known; choose from {', '.join(choices)}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        check_range(name, getattr(self, name), low, high)

    def _check_parallel(self) -> None:
        """Refuse what a verifier over several devices does not do."""
        size = self.tensor_parallel_size
        given = f"--tensor-parallel-size {size}"
        if not isinstance(size, int):
            raise ConfigError(f"{given} must be a whole number")
        if self.graphs in ("lazy", "start"):
            raise ConfigError(f"{given} launches every pass as it comes: use --graphs off, or leave it out")
        if set(self.placements.values()) != {"fused"}:
            raise ConfigError(f"{given} runs lanes in line; leave out --placement {self.placement}")
        if self.attention == "flashinfer":
            raise ConfigError(f"{given} has not been tried with --attention flashinfer; use --attention triton")
        if self.batch_invariant and size > 2:
            raise ConfigError(
                f"--batch-invariant allows --tensor-parallel-size 2 at most, not {size}: in what order more than two"
                " parts are added depends on the size of the pass"
            )

    @property
    def placements(self) -> dict[str, str]:
        """Where each lane runs."""
        chosen = dict.fromkeys(LANES, "fused")
        for part in self.placement.split(","):
            lane, _, where = part.strip().rpartition("=")
            if lane and lane not in LANES:
                raise ConfigError(f"--placement: no lane {lane!r}; lanes are {', '.join(LANES)}")
            apart = re.fullmatch(APART, where) is not None
            if apart and not lane:
                raise ConfigError(f"--placement: {where!r} is for one lane; use decode={where}, verify= or prefill=")
            if apart and lane == "verify":  # the same split, seen from the other side: see `verify_apart`
                lane = "decode"
            if apart and chosen[lane] != "fused":
                raise ConfigError(f"--placement {self.placement}: verify= and decode= are one split; give one of them")
            if not apart and where not in PLACEMENTS and not re.fullmatch(r"partition:[1-9]\d*", where):
                raise ConfigError(f"--placement: {where!r} is not known; use {' or '.join(PLACEMENTS)}")
            if where.startswith("partition") and lane not in ("prefill", "decode"):
                raise ConfigError(f"--placement: {where!r} is for one lane, prompts or drafts; use prefill={where}")
            chosen.update({lane: where} if lane else dict.fromkeys(LANES, where))
        if sum(where.startswith("partition") for where in chosen.values()) > 1:
            raise ConfigError(f"--placement {self.placement}: one lane may have a partition; they would share it")
        return chosen

    @property
    def in_line(self) -> bool:
        """Whether drafting and verifying run one after the other, on one stream."""
        return {where for lane, where in self.placements.items() if lane != "prefill"} <= {"fused", self.draft_apart}

    @property
    def draft_apart(self) -> str | None:
        """Where the draft model runs in a process of its own: `process`, the verifier's device, or a device's name."""
        where = self.placements["decode"]
        return where if re.fullmatch(APART, where) else None

    @property
    def verify_apart(self) -> str | None:
        """Where the verifier is to run, apart from its draft, which then stays on `device`; the engine goes along."""
        found = re.findall(rf"verify=({APART})(?=\s*(?:,|$))", self.placement)
        return found[0][0] if found else None

    @property
    def prefill_apart(self) -> str | None:
        """The same of a process that reads prompts, with weights of its own."""
        where = self.placements["prefill"]
        return where if re.fullmatch(APART, where) else None

    @property
    def weights(self) -> tuple[tuple[str, float], ...]:
        """Lane weights as given; empty: none."""
        pairs = []
        for part in self.lane_weights.split(",") if self.lane_weights is not None else ():
            lane, _, number = part.strip().partition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if lane not in LANES or not 0.0 < weight < math.inf:
                raise ConfigError(
                    f"--lane-weights {self.lane_weights!r}: give positive numbers by lane, prefill=1,verify=2,decode=4"
                )
            pairs.append((lane, weight))
        return tuple(pairs)

    @property
    def verify_limits(self) -> tuple[int, float]:
        """Requests in a verify batch and the longest wait for it, ms: as given, or what suits the batch size."""
        batch = max(1, self.batch_size // 4) if self.verify_batch is None else self.verify_batch
        return batch, VERIFY_WAIT_MS if self.verify_wait_ms is None else self.verify_wait_ms

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafters asked for, side by side; empty: none."""
        return () if self.draft is None else tuple(part.strip() for part in self.draft.split(","))

    @property
    def draft_states(self) -> tuple[int, ...] | None:
        """Ids of --draft-layers; None: as the head's config says."""
        if self.draft_layers is None:
            return None
        parts = [part.strip() for part in str(self.draft_layers).split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ConfigError(f"--draft-layers {self.draft_layers!r} is not a list of layer numbers such as 2,16,29")
        return tuple(int(part) for part in parts)

    @property
    def worker_count(self) -> int:
        """Requests that take turns under `baseline`."""
        return self.batch_size if self.workers is None else self.workers

    @property
    def wants_costs(self) -> bool:
        """Whether pass times are measured, or read where they are kept, before the first request."""
        adaptive = self.arch == "auto" or (self.controller == "throughput" and self.arch != "plain")
        return adaptive if self.measure_costs is None else self.measure_costs

    @property
    def slots(self) -> int:
        """Requests that may hold a slot at once: the batch and the queue kept ready for it."""
        return math.ceil(self.batch_size * self.queue_factor)

    @property
    def alphas(self) -> tuple[float, ...] | str | None:
        """Synthetic acceptance: values used in turn by arriving requests, the path of a drift file, or None."""
        value = self.synthetic_acceptance
        if value is None:
            return None
        if isinstance(value, str) and value.startswith("drift:"):
            return value.removeprefix("drift:")
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, tuple | list) else [value]
        try:
            numbers = tuple(float(part) for part in parts)
        except (TypeError, ValueError):
            numbers = ()
        if not numbers or not all(0.0 <= number <= 1.0 for number in numbers):
            raise ConfigError(f"--synthetic-acceptance {value!r}: give a number in 0..1, a list of them, or drift:FILE")
        return numbers

    def switched(self, arch: str) -> EngineConfig:
        """The same settings under another architecture; those that it does not read stay, for the way back."""
        made = copy(self)
        object.__setattr__(made, "arch", arch)
        made._check_choice("arch")
        return made

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All setting names."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keyword arguments; a name that is not a setting is refused with ours for it, or the nearest."""
        for name in kwargs:
            if name not in cls.names():
                raise ConfigError(f"unknown setting {name!r}{advice(name, cls.names())}")
        return cls(**kwargs)


def flag(name: str) -> str:
    """The CLI flag of a setting."""
    return "--" + name.replace("_", "-")


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Refuse a setting that is no number in `low`..`high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        limits = f"be {low:g} or more" if math.isinf(high) else f"lie in {low:g}..{high:.12g}"
        raise ConfigError(f"{flag(name)} {value!r} must {limits}")


def parse_bytes(value: str | int, name: str = "value") -> int:
    """Bytes from `2GB`, `512MiB`, `1.5g` or a plain number."""
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*", value.lower())
        if not match:
            raise ConfigError(f"{flag(name)} {value!r}: give a size such as 2GB or 512MiB")
        number, unit = float(match[1]), match[2]
        base = 1024 if match[3] or not value.lower().rstrip().endswith("b") else 1000
        number *= base ** " kmgt".index(unit or " ")
    if number <= 0:
        raise ConfigError(f"{flag(name)} {value!r} must be positive")
    return int(number)
