"""Who waits and who runs: slots and blocks given and taken back, and each request's way from lane to lane."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from weakref import WeakMethod

from verifypd.config import EngineConfig
from verifypd.control.prompts import PromptKey, admissible, prompt_key
from verifypd.control.snapshot import Plan
from verifypd.engine.memory import RequestMemory
from verifypd.engine.plans import keep
from verifypd.engine.terms import targets
from verifypd.errors import EngineError
from verifypd.lanes.placement import Placements
from verifypd.metrics.stats import EngineStats
from verifypd.request import Request, State
from verifypd.runtime.inputs import Slots
from verifypd.sampling.grammar import GrammarState
from verifypd.sampling.state import SamplingState

GROWTH_STEPS = 50  # steps after which one request more may run, once memory had run out


class Residents:
    """The requests of one engine. Launches nothing and reads no verdicts."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: RequestMemory,
        slots: Slots,
        sampling: SamplingState,
        grammars: dict[int, GrammarState],
        shown: set[int],
        placements: Placements,
        stats: EngineStats,
        eos_ids: tuple[int, ...],
        clock: Callable[[], float],
        forget: Callable[[Request], None],
    ) -> None:
        self.config = config
        self.memory = memory
        self.slots = slots
        self.sampling = sampling
        self.grammars = grammars
        self.shown = shown  # slots whose drafts the host is told
        self.placements = placements
        self.stats = stats
        self.eos_ids = eos_ids
        self.clock = clock
        self._forget = WeakMethod(forget)  # the engine's, whose memory must not wait for the garbage collector
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}  # slot -> request, until its slot is free again
        self.free_slots = deque(range(config.slots))
        self.most = config.slots  # requests that may run at once by the settings
        self.limit = config.slots  # requests that may run at once; less for a while after memory had run out

    def forget(self, request: Request) -> None:
        """It has ended and left: tell the engine, if there still is one."""
        if (tell := self._forget()) is not None:
            tell(request)

    def add(self, request: Request) -> None:
        """Queue a request behind those of its rank."""
        insort(self.waiting, request, key=Request.rank)

    def admit(self, unread: bool) -> list[Request]:
        """Give waiting requests a slot and blocks, as the policy has them follow each other, as long as both last.

        `unread`: nobody keeps what a draft head would read of their prompts. Returns who got a slot.
        """
        admitted: list[Request] = []
        if not (self.waiting and self.free_slots):
            return admitted
        now, keys = self.clock(), dict[int, PromptKey]()

        def key(request: Request) -> PromptKey:
            """Found once: hundreds wait, and all of them are looked at for each that gets a slot."""
            found = keys.get(id(request))
            if found is None:
                found = keys[id(request)] = self._prompt_key(request, now)
            return found

        held = [request for request in self.running.values() if request.state is State.PREFILL]
        while self.waiting and self.free_slots and len(self.running) < self.limit:
            tokens = sum([len(r.tokens) - r.computed for r in held])
            request = admissible(self.waiting, held, tokens, self.config.prefill_chunk, key)
            if request is None:
                break
            request.unread = unread
            if not self.memory.admit(request, self.free_slots[0], spare=len(self.running)):
                break
            self.waiting.remove(request)
            held.append(request)
            del keys[id(request)]  # some of its prompt may be known from others
            request.slot = self.free_slots.popleft()
            self.enter(request, State.PREFILL)
            self.running[request.slot] = request
            self.slots.assign(request.slot, request.tokens)
            self.sampling.assign(
                request.slot,
                request.params,
                seed=request.seed,
                choice=request.choice,
                prompt_len=request.prompt_len,
                max_len=request.max_length,
                eos_ids=self.eos_ids,
                bad_words_ids=request.bad_words_ids,
                acceptance=self.config.acceptance,
            )
            if request.grammar is not None:
                self.grammars[request.slot] = request.grammar
            if request.origins is not None:
                self.shown.add(request.slot)
            admitted.append(request)
        return admitted

    def _prompt_key(self, request: Request, now: float) -> PromptKey:
        first, _ = targets(request, self.config)
        left, waited = len(request.tokens) - request.computed, now - request.last_output
        return prompt_key(request.rank(), left, waited, first, self.config.slo_gap)

    def enter(self, request: Request, state: State, now: float | None = None) -> None:
        """Move a request along its path, and count it in the lanes."""
        lanes = self.stats.lanes
        before, after = lanes.get(request.state), lanes.get(state)
        waited = request.enter(state, self.clock() if now is None else now)
        if before is not None:
            before.leave(waited)
        if after is not None:
            after.enter()

    def reserve(self, plan: Plan) -> Plan:
        """Make room for what the plan may write, best rank first. Drafts give way first, then the youngest request."""
        wanted = {span.slot: span.drafts for span in plan.draft.spans} if plan.draft else {}
        for batch in (plan.verify, plan.prefill):
            wanted.update({span.slot: span.drafts for span in batch.spans} if batch else {})
        requests = {slot: self.running[slot] for slot in wanted}
        short = {slot for slot, length in wanted.items() if not self._has_room(requests[slot], length)}
        if not short:
            return plan
        drafts = {slot: length for slot, length in wanted.items() if slot not in short}
        for slot in sorted(short, key=lambda slot: requests[slot].rank()):
            for length in (wanted[slot], 0) if wanted[slot] else (0,):
                if self._make_room(requests[slot], length, may_preempt=length == 0):
                    drafts[slot] = length
                    break
        return keep(plan, {slot: length for slot, length in drafts.items() if not _gone(requests[slot])})

    def _has_room(self, request: Request, drafts: int) -> bool:
        """Whether it holds all the blocks it needs, as most do in most steps."""
        return self.memory.holds(request, request.length_bound + drafts + 1) and not request.preempting

    def _make_room(self, request: Request, drafts: int, may_preempt: bool) -> bool:
        needed = request.length_bound + drafts + 1
        while not _gone(request):
            if self.memory.reserve(request, needed):
                return True
            victim = max((r for r in self.running.values() if not r.finished and not r.preempting), key=Request.rank)
            leaving = any(r.finished or r.preempting for r in self.running.values())
            if not may_preempt or (victim is request and leaving):
                return False  # blocks are on their way back: try again next step
            if victim is request and len(self.running) == 1:
                raise EngineError("the KV pool cannot hold one request: raise --kv-memory or lower --max-model-len")
            self.preempt(victim)
            if victim.preempting:
                return False  # its verdicts are still out: its blocks come back when they are absorbed
        return False

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a request; it waits, keeps its tokens and is recomputed later."""
        request.preempting = True
        request.metrics.preemptions += 1
        self.stats.preemptions += 1
        if not request.tickets:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Free slot and blocks; a preempted request queues again."""
        assert request.slot is not None and not request.tickets
        self.placements.settle(request.slot)
        self.memory.release(request)
        self.sampling.release(request.slot)
        self.grammars.pop(request.slot, None)
        self.shown.discard(request.slot)
        del self.running[request.slot]
        self.free_slots.append(request.slot)
        request.slot = None
        if request.finished:
            self.forget(request)
            return
        request.preempting = False
        request.served = 0  # nothing of it is read any more
        self.enter(request, State.WAITING)
        self.add(request)

    def withdraw(self, request: Request) -> None:
        """It has ended from outside: it leaves now, or when nothing of it is in flight."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.forget(request)  # it may have run before, and been preempted
        elif request.slot is not None:
            self.grammars.pop(request.slot, None)  # nothing is asked of it any more, whatever is in flight
            if not request.tickets:
                self.leave(request)

    def grow(self) -> None:
        """Some steps have gone well since memory ran out: one request more may run."""
        if self.limit < self.most and self.stats.steps % GROWTH_STEPS == 0:
            self.limit += 1

    def check(self) -> None:
        """Prove that nothing leaks: blocks have one owner, slots are free or taken, lanes count who is in them."""
        self.memory.check()
        assert sorted([*self.free_slots, *self.running]) == list(range(self.config.slots)), "a slot is lost"
        for name, lane in self.stats.lanes.items():
            members = sum(request.state == name for request in self.running.values())
            assert lane.depth == members, f"the {name} lane counts {lane.depth} requests and holds {members}"
        active = [r for r in self.running.values() if not r.finished]
        assert all(r.confirmed == len(r.tokens) for r in active), "a token that no verdict brought"
        assert all((r.pending > 0) <= (r.state is State.VERIFY) for r in self.running.values()), (
            "a draft outside a lane"
        )


def _gone(request: Request) -> bool:
    """Whether it has given way, or is about to."""
    return request.preempting or request.slot is None
