"""Feeds an engine from messages and sends back what each step gave. Knows requests; nothing of sockets or text."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from verifypd.errors import ConfigError, RequestError
from verifypd.request import Logprob, Request, SamplingParams, check_bad_words
from verifypd.runtime.faults import out_of_memory
from verifypd.sampling.grammar import GrammarState
from verifypd.server.admission import Admission, LeaveRate, Load, Refusal
from verifypd.server.joining import Compile, Joiner, Joining
from verifypd.server.live import Lookout
from verifypd.server.messages import (
    Abort,
    Answer,
    Gone,
    Output,
    Outputs,
    Quit,
    Scores,
    Stats,
    Submit,
    Switch,
    ToEngine,
    ToWorker,
)
from verifypd.server.totals import Totals, figures

log = logging.getLogger(__name__)

PURGE = 64  # deadlines kept before those of requests that have ended are thrown out


@dataclass(slots=True)
class Counted:
    """Figures of a request's speculation when they were last looked at."""

    passes: int = 0
    emitted: int = 0
    spans: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Track:
    """A request in the engine, and how much of it its worker has been told."""

    request: Request
    worker: int
    call: int
    choice: int
    begun: int = 0  # output tokens that it came with
    sent: int = 0  # output tokens, with those
    counted: Counted = field(default_factory=lambda: Counted())  # what of it is in the totals
    prompt_sent: bool = False


class EngineLoop:
    """One engine and the calls of all workers. `send` takes a worker's number and a message.

    `compile_grammar` works beside the loop; `ring`, called from its thread, must make the loop turn soon. What steps
    give within `gather` s travels together.
    """

    def __init__(
        self,
        engine: Any,
        *,
        epoch: int,
        admission: Admission,
        send: Callable[[int, ToWorker], None],
        workers: Iterable[int],
        compile_grammar: Compile | None = None,
        ring: Callable[[], None] = lambda: None,
        interval: float = 0.5,
        gather: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
    ) -> None:
        self.engine = engine
        self.epoch = epoch
        self.admission = admission
        self.send = send
        self.workers = tuple(workers)
        self.joining = Joining(compile_grammar, ring) if compile_grammar is not None else None
        self.interval = interval
        self.gather = gather
        self.clock = clock
        self.model = model
        self.totals = Totals()
        self.lookout = Lookout()
        self.stopping = False
        self.tracks: dict[int, Track] = {}  # request order -> track
        self.calls: dict[tuple[int, int], dict[int, Track]] = {}  # (worker, call) -> its unfinished choices
        self._keys: dict[tuple[int, int], int] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (time, request order)
        self._orders = 0
        self._left = LeaveRate()
        self._told = -math.inf  # when figures were last sent
        self._begun = 0.0  # when the step began with collecting; 0: it did not
        self._fresh: dict[int, Track] = {}  # by request order: those with tokens that nobody has been told of
        self._pending: dict[int, list[Output]] = {}  # worker -> outputs not sent yet
        self._sent = -math.inf  # when outputs were last sent
        self.gpu: Callable[[], dict[str, float]] = dict

    # -- messages in --------------------------------------------------------------------------------------------------

    def take(self, message: ToEngine) -> None:
        """Act on a message, between two steps."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Switch):
            self._switch(message)
        elif isinstance(message, Gone):
            self._drop_joining(message.worker)
            for worker, call in [key for key in self.calls if key[0] == message.worker]:
                self._abort(Abort(worker, call, -1))
        elif isinstance(message, Quit):
            self.stopping = True

    def _submit(self, message: Submit) -> None:
        refusal = self._replaced(message)
        if refusal is None and message.begun is None:  # who was let in once is not turned away
            refusal = self._refusal(message)
        requests: list[Request] = []
        if refusal is None:
            try:
                requests = self._requests(message)
            except RequestError as error:
                refusal = Refusal(400, "invalid_value", str(error), param=error.param)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        self.admission.enter(message.key)
        self._keys[message.worker, message.call] = message.key
        if message.grammar is not None and self.joining is not None:
            self.joining.add(message, requests)
        else:
            self._enter(message, requests)

    def _replaced(self, message: Submit) -> Refusal | None:
        """Why a call of another model cannot go on here, if it is one: its tokens mean something else."""
        if message.model == self.model:
            return None
        log.warning("a call of %s came to an engine of %s", message.model, self.model)
        return Refusal(503, "model_replaced", "the model was replaced meanwhile; send the request again", retry_after=1)

    def _refusal(self, message: Submit) -> Refusal | None:
        """Why a new call may not come in, if so."""
        now = self.clock()
        waiting = len(self.engine.waiting) + (self.joining.requests if self.joining else 0)
        load = Load(waiting, len(self.engine.free_slots), self._left.rate(now))
        spent = (now - message.arrival) * 1e3
        return self.admission.refuse(len(message.open), message.key, load, message.params.get("deadline_ms"), spent)

    def _switch(self, message: Switch) -> None:
        """Change the architecture, and tell every worker, the one that asked for it last."""
        answer = Answer(self.epoch, message.call)
        before = self.engine.architecture.name
        try:
            self.engine.switch(message.architecture)
            self.lookout.changed(self.clock(), before, message.architecture, "set by the operator")
        except ConfigError as error:
            answer = Answer(self.epoch, message.call, 400, str(error), "invalid_value", "architecture")
        else:
            self._report()
        self.send(message.worker, answer)

    def _enter(self, message: Submit, requests: list[Request]) -> None:
        """Queue a call's requests in the engine, and tell its worker. The wait for a slot begins here."""
        call = self.calls[message.worker, message.call] = {}
        deadline = message.params.get("deadline_ms")
        if not self.engine.busy:
            self._begun = 0.0  # waiting for work is part of no step
        for begun, request in zip(message.open, requests, strict=True):
            request.entered = self.clock()
            self.engine.add(request)
            had = len(begun.tokens)
            track = Track(request, message.worker, message.call, begun.choice, had, had)
            call[begun.choice] = self.tracks[request.order] = track
            if deadline is not None:
                heapq.heappush(self._deadlines, (message.arrival + deadline / 1e3, request.order))
        self.send(message.worker, Answer(self.epoch, message.call))

    def _refuse(self, message: Submit, refusal: Refusal) -> None:
        answer = Answer(
            self.epoch, message.call, refusal.status, refusal.message, refusal.code, refusal.param, refusal.retry_after
        )
        self.send(message.worker, answer)

    def join(self) -> None:
        """Take in the calls whose output format has been compiled since."""
        for joiner in self.joining.ready() if self.joining else ():
            try:
                grammars = joiner.grammars.result()
            except RequestError as error:
                self._turn_away(joiner, Refusal(400, "invalid_value", str(error), param=error.param))
            except Exception as error:  # noqa: BLE001  # whatever it is, it concerns this call alone
                log.error("a grammar could not be compiled: %r", error)
                self._turn_away(joiner, Refusal(500, "engine_error", "the output format could not be compiled"))
            else:
                for request, grammar in zip(joiner.requests, grammars, strict=True):
                    request.grammar = GrammarState(grammar, request.prompt_len)
                self._enter(joiner.message, joiner.requests)

    def _turn_away(self, joiner: Joiner, refusal: Refusal) -> None:
        """A call that was let in cannot join after all."""
        self.admission.leave(self._keys.pop((joiner.message.worker, joiner.message.call)))
        self._refuse(joiner.message, refusal)

    def _drop_joining(self, worker: int, call: int | None = None) -> None:
        for joiner in self.joining.drop(worker, call) if self.joining else ():
            self.admission.leave(self._keys.pop((worker, joiner.message.call)))
            self.totals.finished["abort"] += len(joiner.requests)

    def _requests(self, message: Submit) -> list[Request]:
        """The engine's requests of a call; raises RequestError before any of them is queued."""
        params = SamplingParams(**message.params)
        if message.grammar is not None and self.joining is None:
            raise RequestError("output cannot be constrained: this model has no tokenizer that llguidance can read")
        limit = self.engine.max_model_len
        bad_words = tuple(tuple(word) for word in message.bad_words)
        check_bad_words(bad_words, self.engine.sampling.vocab)
        requests = []
        for begun in message.open:
            place, choice = divmod(begun.choice, message.n)
            prompt = message.prompts[place]
            self.engine.validate([*prompt, *begun.tokens])
            request = Request(
                message.name,
                prompt,
                params,
                seed=message.seeds[place],
                choice=choice,
                max_length=limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens),
                arrival=message.arrival,
                order=self._orders,
                bad_words_ids=bad_words,
                output=begun.tokens,
            )
            self._orders += 1
            requests.append(request)
        return requests

    def _abort(self, message: Abort) -> None:
        self._drop_joining(message.worker, message.call)
        call = self.calls.get((message.worker, message.call), {})
        chosen = list(call.values()) if message.choice < 0 else [call[message.choice]] if message.choice in call else []
        for track in chosen:
            self.engine.finish(track.request, message.reason)
            self._tell(track)

    # -- the step -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One engine step, and what came of it on its way to the workers."""
        self._stop_overdue()
        begun, self._begun = self._begun or self.clock(), 0.0
        self._pass_on(self.engine.step)
        self.totals.step(self.clock() - begun, self.engine.architecture.ran)

    def collect(self) -> None:
        """Wait for the device where the next step must, and pass on what it has brought: messages are read after."""
        self._begun = self.clock()
        self._pass_on(self.engine.collect)

    def _pass_on(self, work: Callable[[], list[Request]]) -> None:
        """Do something with the engine, and send what came of it to the workers."""
        try:
            news = [self.tracks.get(request.order) for request in work()]
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.totals.out_of_memory += 1
            log.error("a step ran out of memory: %s", " ".join(str(error).split())[:200])
            news = list(self.tracks.values())  # what the step had confirmed before it broke off is not lost
        self._fresh.update((track.request.order, track) for track in news if track is not None)
        self.flush()

    def flush(self) -> None:
        """Send what has gathered, one message a worker, and the figures when they are due."""
        now = self.clock()
        if now - self._sent >= self.gather or not self.engine.busy:
            for order, track in self._fresh.items():
                if order in self.tracks:  # it has not left meanwhile
                    self._tell(track)
            self._fresh = {}
            for worker, outputs in self._pending.items():
                self.send(worker, Outputs(self.epoch, outputs))
                self._sent = now
            self._pending = {}
        if now - self._told >= self.interval:
            self._report()

    def _report(self) -> None:
        """Send the figures to every worker."""
        now = self._told = self.clock()
        counted = figures(self.engine, self.totals, self.gpu())
        stats = Stats(self.epoch, counted | {"live": self.lookout.look(self.engine, now)})
        for worker in self.workers:
            self.send(worker, stats)

    def _stop_overdue(self) -> None:
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            track = self.tracks.get(heapq.heappop(self._deadlines)[1])
            if track is not None:
                self.engine.finish(track.request, "deadline")
                self._tell(track)

    def _tell(self, track: Track) -> None:
        """Queue what is new of a request for its worker."""
        request = track.request
        new = request.tokens[request.prompt_len + track.sent :]
        if not new and not request.finished:
            return
        if not track.sent and new:
            self.totals.queries += request.prompt_len
            self.totals.cached_tokens += request.metrics.cached_tokens
            self.totals.prompt_tokens += request.prompt_len if request.choice == 0 else 0
            self.totals.queued.add(request.metrics.time_in_queue or 0.0)
        start = track.sent - track.begun  # of what this engine gave it
        logprobs = None
        if request.logprobs is not None:
            logprobs = [_flat(row) for row in request.logprobs[start : start + len(new)]]
        prompt_logprobs = None
        if request.prompt_logprobs is not None and not track.prompt_sent and (new or request.finished):
            prompt_logprobs = [_flat(row) for row in request.prompt_logprobs[1:] if row is not None]
            track.prompt_sent = True
        origins = None
        if request.origins is not None:
            told = request.origins[start : start + len(new)]
            origins = [(origin.writer, origin.rejected) for origin in told]
        track.sent += len(new)
        self._count(track)
        metrics = request.metrics
        spec = [metrics.spans, metrics.drafted, metrics.accepted, metrics.span_emitted, metrics.cached_tokens]
        spec += metrics.accepted_per_position
        stop = request.stop_reason if isinstance(request.stop_reason, int) else None
        self._pending.setdefault(track.worker, []).append(
            Output(
                track.call,
                track.choice,
                new,
                request.finish_reason,
                stop,
                spec,
                logprobs,
                prompt_logprobs,
                request.grammar.error if request.finish_reason == "error" and request.grammar is not None else None,
                origins,
                track.sent - len(new),
            )
        )
        if request.finished:
            self._forget(track)

    def _forget(self, track: Track) -> None:
        self.tracks.pop(track.request.order, None)
        if track.request.grammar is not None:
            track.request.grammar.close()
        if len(self._deadlines) > max(PURGE, 2 * len(self.tracks)):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.tracks]
            heapq.heapify(self._deadlines)
        self.totals.finished[track.request.finish_reason or "abort"] += 1
        self._left.add(self.clock())
        key = (track.worker, track.call)
        call = self.calls.get(key, {})
        call.pop(track.choice, None)
        if not call and key in self.calls:
            del self.calls[key]
            self.admission.leave(self._keys.pop(key))

    # -- figures ------------------------------------------------------------------------------------------------------

    def _count(self, track: Track) -> None:
        """Add what a request's speculation did since it was last looked at."""
        metrics, totals, before = track.request.metrics, self.totals, track.counted
        totals.verdicts += metrics.passes - before.passes
        totals.verdict_tokens += metrics.emitted - before.emitted
        before.passes, before.emitted = metrics.passes, metrics.emitted
        if metrics.spans == before.spans:
            return
        spans, drafted, accepted = (
            metrics.spans - before.spans,
            metrics.drafted - before.drafted,
            metrics.accepted - before.accepted,
        )
        totals.drafts += spans
        totals.draft_tokens += drafted
        totals.accepted_tokens += accepted
        totals.draft_lengths[round(drafted / spans)] += spans
        context = 1 << (len(track.request.tokens) - 1).bit_length()
        totals.drafted_by_context[context] += drafted
        totals.accepted_by_context[context] += accepted
        _add(totals.drafted_per_position, metrics.drafted_per_position, before.drafted_per_position)
        _add(totals.accepted_per_position, metrics.accepted_per_position, before.accepted_per_position)
        before.spans, before.drafted, before.accepted = metrics.spans, metrics.drafted, metrics.accepted
        before.drafted_per_position = list(metrics.drafted_per_position)
        before.accepted_per_position = list(metrics.accepted_per_position)


def _add(totals: Counter[int], now: list[int], before: list[int]) -> None:
    """Count by position what has come since."""
    for position, count in enumerate(now):
        totals[position] += count - (before[position] if position < len(before) else 0)


def _flat(row: dict[int, Logprob]) -> Scores:
    """A position's logprobs as the message has them."""
    return [(token, _finite(entry.logprob), entry.rank) for token, entry in row.items()]


def _finite(value: float) -> float:
    """JSON has no infinities; -9999 is what others send for an impossible token."""
    return value if math.isfinite(value) else -9999.0
