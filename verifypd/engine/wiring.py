"""From loaded models to an engine: caches, lanes, drafters, graphs and policies, put together. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from verifypd.attention.base import AttentionBackend
from verifypd.attention.choose import backend
from verifypd.buckets import CHUNKS, bucket
from verifypd.config import EngineConfig
from verifypd.control.architectures import Architecture
from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.drafters.base import Drafter
from verifypd.drafters.choice import Choice
from verifypd.drafters.head import HeadDrafter
from verifypd.drafters.model import ModelDrafter
from verifypd.drafters.ngram import NgramDrafter
from verifypd.drafters.remote import RemoteDrafter
from verifypd.engine.engine import Engine
from verifypd.engine.memory import PagedPool, RequestMemory
from verifypd.inflight import CAUGHT_UP
from verifypd.kv.blocks import BlockPool
from verifypd.kv.budget import Budget
from verifypd.kv.pool import FeatureCache
from verifypd.lanes.decode import DecodeLane
from verifypd.lanes.hand_over import PrefillProcess
from verifypd.lanes.placement import Placements
from verifypd.lanes.verify import VerifyLane
from verifypd.models.base import Model
from verifypd.models.head import DraftHead
from verifypd.parallel.ranks import ParallelRunner, Ranks
from verifypd.runtime.graphs import Graphs, capture
from verifypd.runtime.inputs import BlockTables, Slots, host_tensor
from verifypd.runtime.padded import DraftLoops, Drawing, VerifyPasses
from verifypd.runtime.passes import reachable
from verifypd.runtime.peer import Peer
from verifypd.runtime.runner import HeadRunner, ModelRunner, cache_of
from verifypd.runtime.streams import HostCopy
from verifypd.sampling.state import SamplingState

DRAFT_PROCESS = "verifypd.engine.draft_process"  # the module that it runs
PREFILL_PROCESS = "verifypd.engine.prefill_process"
CAPTURED_SPANS = 256  # requests up to which passes are captured at start; larger ones when they first come


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    config: EngineConfig
    model: Model
    draft: Model | None
    lookup: bool  # whether text is looked up for drafts
    budget: Budget
    vocab_map: Tensor | None  # [draft vocab] -> verifier ids; None: the ids are the same
    vocab: int
    eos_ids: tuple[int, ...]
    max_len: int
    capacity: int  # tokens a slot holds
    sampler: str
    replayed: str  # when passes are captured: off, lazy or start
    processes: Mapping[str, dict[str, Any]]  # of lanes that run apart: what each is told
    ranks: Ranks | None = None  # who hold the rest of the model
    sample: tuple[int, ...] = ()  # tokens that a cache in e4m3 is scaled by; none: keys and values stay as they are


def may_draft(config: EngineConfig) -> bool:
    """Whether an engine of these settings ever speculates."""
    return config.arch != "plain" and config.max_draft > 0


def chunk_rows(config: EngineConfig) -> int:
    """Most prompt rows of one pass."""
    return config.prefill_chunk


def graph_count(config: EngineConfig, draft: bool) -> int:
    """How many graphs there may be, about: those captured at start, and draft loops with penalties, which are captured
    when they come."""
    spans, widest = _captured(config)
    passes = len(reachable(spans, widest, chunk_rows(config)))
    if not (draft and may_draft(config)):
        return passes
    loops = len({bucket(n) for n in range(1, spans + 1)}) * config.max_draft
    return 2 * loops + len(reachable(0, widest, _catch_up_rows(config))) + passes


def _catch_up_rows(config: EngineConfig) -> int:
    """Most rows of one pass that brings drafts up to date: what a step may spend on it, and the routine of each; or
    the prompt chunks that a head reads behind the verifier."""
    return max(config.draft_chunk + CHUNKS * (config.max_draft + 1), chunk_rows(config))


def _captured(config: EngineConfig) -> tuple[int, int]:
    """Requests of the largest pass that is captured, and most rows of each."""
    return min(config.slots, CAPTURED_SPANS), config.max_draft + 1 if may_draft(config) else 1


def wire(parts: Parts, cost: CostModel) -> Engine:
    """The engine, with every graph it may replay at hand."""
    config, device = parts.config, parts.model.device
    fp8 = config.kv_cache_dtype == "fp8"
    attention = backend(config.attention, device, batch_invariant=config.batch_invariant, fp8=fp8)
    draws = may_draft(config) and (parts.draft is not None or "decode" in parts.processes)
    slots = Slots(config.slots, parts.capacity, config.max_draft, device, parts.vocab if draws else 0)
    sampling = SamplingState(config.slots, parts.vocab, config.max_draft, device, parts.sampler)
    runner, pool = _paged(parts, parts.model, attention, fp8=fp8)
    if parts.ranks is not None:
        runner = ParallelRunner(parts.ranks, runner)
    if fp8:
        runner.calibrate(host_tensor(parts.sample, device))
    spans, widest = _captured(config)
    graphs = Graphs(device) if parts.replayed != "off" else None
    shape = (slots, widest, chunk_rows(config) + spans * widest)
    drafters: dict[str, Drafter] = {}
    draft_pool, work = None, []
    head = parts.draft if isinstance(parts.draft, DraftHead) else None
    origin = None if head is None else 0 if head.from_start else 1
    if may_draft(config) and parts.draft is not None:
        draft_runner, draft_pool = _paged(parts, parts.draft, attention, origin)
        drawing = Drawing(sampling, parts.vocab_map if head is None else head.vocab_map)
        drafting = draft_runner if head is None else _beside(head, draft_runner, parts.budget, config.block_size)
        routine = CAUGHT_UP if head is None else config.max_draft + 1
        most = _catch_up_rows(config)
        loops = DraftLoops(graphs, drafting, slots, widest, most, routine, drawing) if graphs is not None else None
        work = loops.work(spans, most) if loops is not None else []
        if isinstance(drafting, HeadRunner):
            drafters["head"] = HeadDrafter(drafting, slots, drawing, loops)
        else:
            drafters["model"] = ModelDrafter(drafting, slots, drawing, loops)
    reader = next((drafter.reader for drafter in drafters.values()), None)
    passes = VerifyPasses(graphs, runner, *shape, reader) if graphs is not None else None
    if passes is not None:
        work = [*passes.work(spans, chunk_rows(config)), *work]
    if may_draft(config) and "decode" in parts.processes:
        drafters["model"] = _apart(parts, slots)
    if may_draft(config) and parts.lookup:
        always = config.alphas is not None and not drafters
        drafters["ngram"] = NgramDrafter(slots, config.ngram_min, config.ngram_max, config.max_draft, always=always)
    cost.padded = passes is not None
    cost.one_pass = bool(drafters) and next(iter(drafters.values())).one_pass
    if graphs is not None and parts.replayed == "start":
        capture(graphs, work)
    choice = None
    if len(drafters) > 1:
        choice = Choice("ngram", next(iter(drafters)), config.ngram_min, config.ngram_max)
    verify = VerifyLane(runner, slots, sampling, drafters, config.wait, passes)
    return Engine(
        config,
        architectures=policies(config, cost),
        memory=RequestMemory(pool, draft_pool, parts.capacity, head_origin=origin if draft_pool else None),
        slots=slots,
        sampling=sampling,
        verify=verify,
        prefill=_reading(parts, verify),
        decode=DecodeLane(drafters, slots),
        placements=Placements(config.placements, device),
        eos_ids=parts.eos_ids,
        max_model_len=parts.max_len,
        verifier_bytes=parts.model.weight_bytes,
        choice=choice,
        cost=cost,
    )


def _apart(parts: Parts, slots: Slots) -> RemoteDrafter:
    """The drafter of a model in a process of its own, which is up."""
    told = parts.processes["decode"]
    about = f"{told['draft']} on {told['device']}, {told['threads']} threads"
    drafter = RemoteDrafter(slots, _starter(parts, "decode", DRAFT_PROCESS), parts.config.acceptance, about)
    drafter.keeper.wait_ready()
    return drafter


def _reading(parts: Parts, lane: VerifyLane) -> PrefillProcess | None:
    """The process that reads prompts, which is up; None: the verifier does."""
    if "prefill" not in parts.processes:
        return None
    found = lane.runner.cache.scales
    scales = None if found is None else [float(scale) for scale in HostCopy({"all": found}).wait()["all"].flat]
    process = PrefillProcess(lane, _starter(parts, "prefill", PREFILL_PROCESS, scales=scales))
    process.keeper.wait_ready()
    return process


def _starter(parts: Parts, lane: str, module: str, **more: Any) -> Callable[[], Peer]:
    """What starts the process of a lane, each time anew."""
    known = {"vocab": parts.vocab, "eos_ids": parts.eos_ids, "max_len": parts.max_len, "capacity": parts.capacity}
    return partial(Peer, module, {**parts.processes[lane], **known, **more})


def policies(config: EngineConfig, cost: CostModel) -> Callable[[str], Architecture]:
    """Architectures by name, over one controller and one cost model; each is made once and keeps what it has learnt."""
    controller = make_controller(
        config.controller, config.max_draft, cost, search_temperature=config.search_temperature
    )
    return cache(lambda name: make_architecture(name, controller, cost))


def _paged(
    parts: Parts, model: Model, attention: AttentionBackend, first: int | None = None, fp8: bool = False
) -> tuple[ModelRunner, PagedPool]:
    config = parts.config
    cache = cache_of(model, parts.budget.blocks, config.block_size, fp8)
    tables = BlockTables(config.slots, parts.capacity, config.block_size, model.device, first)
    blocks = BlockPool(parts.budget.blocks, config.block_size, config.prefix_cache)
    return ModelRunner(model, attention, cache, tables), PagedPool(blocks, tables)


def _beside(head: DraftHead, runner: ModelRunner, budget: Budget, block_size: int) -> HeadRunner:
    """The head's runner, with room for its features in every block."""
    features = FeatureCache(
        head.feature_layers, head.reads_output, head.project, budget.blocks, block_size, head.feature_width,
        head.activation_dtype, head.kernels, runner.tables.data,
    )  # fmt: skip
    return HeadRunner(head, runner.attention, runner.cache, runner.tables, features)
