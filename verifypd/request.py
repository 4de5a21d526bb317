"""What a caller asks for and what it gets back, and the host-side state of a request. Knows nothing of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from verifypd.config import DRAFT_TEMPERATURES
from verifypd.errors import RequestError
from verifypd.inflight import Progress

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults are those of vLLM's offline API, plus ours at the end."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: up to the model's length
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    # Verify-PD's own
    speculation: bool = True
    max_draft: int | None = None
    draft_temperature: float | None = None  # times the request's: what the drafter draws at; None: the engine chooses
    acceptance: str | None = None  # "rejection", "coupled"; None: coupled when a seed is given
    priority: int = 0  # lower runs first, as in vLLM
    slo_ttft: float | None = None  # ms
    slo_tpot: float | None = None  # ms
    deadline_ms: float | None = None  # after so long it ends with what it has, for "deadline"
    token_origins: bool = False  # tell of each output token who wrote it

    def __post_init__(self) -> None:
        _integer(self, "n", 1, 128)
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _integer(self, "top_k", -1, 2**31 - 1)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", -(2**63), MAX_SEED, optional=True)
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 1e-3, 100.0)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        _integer(self, "max_tokens", 1, 2**31 - 1, optional=True)
        _integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _integer(self, "max_draft", 0, 64, optional=True)
        _number(self, "draft_temperature", *DRAFT_TEMPERATURES, optional=True)
        _integer(self, "priority", -(2**31), 2**31 - 1)
        _number(self, "slo_ttft", 0.0, math.inf, optional=True, open_low=True)
        _number(self, "slo_tpot", 0.0, math.inf, optional=True, open_low=True)
        _number(self, "deadline_ms", 0.0, math.inf, optional=True, open_low=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}", param="min_tokens"
            )
        if self.acceptance not in (None, "rejection", "coupled"):
            raise RequestError(
                f"acceptance={self.acceptance!r} is not known; use 'rejection' or 'coupled'", param="acceptance"
            )
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "speculation")
        for name in (*flags, "token_origins"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be true or false", param=name)
        _list_of(self, "allowed_token_ids", int)
        _list_of(self, "stop_token_ids", int)
        _list_of(self, "bad_words", str)
        if not isinstance(self.stop, str):
            _list_of(self, "stop", str)
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise RequestError("logit_bias must map token ids to numbers in -100..100", param="logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= 100  # NaN fails too
            if not isinstance(token, int) or not number:
                raise RequestError(
                    f"logit_bias[{token!r}]={bias!r} must map a token id to a number in -100..100", param="logit_bias"
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: no token could be drawn", param="allowed_token_ids")
        if any(not s for s in self.stop_strings):
            raise RequestError("stop holds an empty string", param="stop")
        if len(self.stop_strings) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in self.stop_strings):
            raise RequestError(
                f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters", param="stop"
            )
        if any(not word for word in self.bad_words or ()):
            raise RequestError("bad_words holds an empty string", param="bad_words")
        if len(self.bad_words or ()) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(self.bad_words or ())} words; give at most {MAX_BAD_WORDS}", param="bad_words"
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", param="stop")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        return self.temperature < 1e-5

    def coupled(self, default: str = "rejection") -> bool:
        """Whether a draft stands when it is what the verifier draws itself; `default` holds where nothing is said."""
        return (self.acceptance or ("coupled" if self.seed is not None else default)) == "coupled"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All parameter names."""
        return tuple(f.name for f in fields(cls))


def check_bad_words(words: Sequence[Sequence[int]], vocab: int) -> None:
    """Refuse bad words that are too long as token ids, or that this model could never say."""
    longest = max(map(len, words), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words: a word has {longest} tokens; give words of at most {MAX_BAD_WORD_TOKENS}", param="bad_words"
        )
    wrong = next((token for word in words for token in word if not 0 <= token < vocab), None)
    if wrong is not None:
        raise RequestError(f"bad_words: token id {wrong} is outside the vocabulary of {vocab}", param="bad_words")


def _integer(params: SamplingParams, name: str, low: int, high: int, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} must be a whole number in {low}..{high}", param=name)


def _list_of(params: SamplingParams, name: str, kind: type) -> None:
    value = getattr(params, name)
    if value is None:
        return
    whole = isinstance(value, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not whole:
        what = {int: "token ids", str: "strings"}[kind]
        raise RequestError(f"{name}={value!r} must be a list of {what}", param=name)


def _number(
    params: SamplingParams, name: str, low: float, high: float, *, optional: bool = False, open_low: bool = False
) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or value != value
    if wrong or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name}={value!r} must be a number in {bracket}{low:g}, {high:g}]", param=name)


class State(StrEnum):  # of strings, which look themselves up quickly: in PATH, and among the lanes by name
    """Where a request stands on its way through the lanes."""

    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # has a slot and blocks; part of its tokens are not in the verifier's cache yet
    DECODE = "decode"  # every confirmed token but the last is in the verifier's cache: ready to draft
    VERIFY = "verify"  # its draft is launched and queues for the verify lane
    FINISHED = "finished"


# The path: what may follow. Back to WAITING is preemption; to FINISHED from anywhere, by a verdict or an abort.
PATH: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FINISHED}),
    State.PREFILL: frozenset({State.DECODE, State.WAITING, State.FINISHED}),
    State.DECODE: frozenset({State.VERIFY, State.WAITING, State.FINISHED}),
    State.VERIFY: frozenset({State.DECODE, State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The verifier's own log-probability of a token at one position, and its rank (1: most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Who wrote an output token, and the drafted tokens that it stands in place of.

    `draft` is a draft model's or head's token that stood, `lookup` one found in the text. The verifier wrote the
    others: `correction` in place of a draft that fell, `bonus` after one that stood whole, `plain` without any.
    """

    writer: str
    rejected: tuple[int, ...] = ()


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock, and what speculation did for this request."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None  # from when the engine queued it until it first had a slot
    spans: int = 0  # verifier passes that carried draft tokens
    passes: int = 0  # verifier passes that emitted tokens after the prefill
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # tokens emitted by those passes
    span_emitted: int = 0  # of those, by passes that carried draft tokens
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / drafted tokens; corrections and bonus tokens do not count."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per pass that carried drafts, the correction or bonus token included; 1 without any draft."""
        return self.span_emitted / self.spans if self.spans else 1.0

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Add one verdict."""
        self.passes += 1
        self.emitted += emitted
        if not drafted:
            return
        self.spans += 1
        self.span_emitted += emitted
        self.drafted += drafted
        self.accepted += accepted
        proposed, stood = self.drafted_per_position, self.accepted_per_position
        if drafted > len(proposed):
            proposed += [0] * (drafted - len(proposed))
            stood += [0] * (drafted - len(stood))
        for position in range(drafted):
            proposed[position] += 1
        for position in range(accepted):
            stood[position] += 1


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "deadline", "abort", "error"
    stop_reason: int | str | None = None  # the stop token id or string that ended it; None for EOS
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    token_origins: list[TokenOrigin] | None = None

    def finished(self) -> bool:
        """Whether this choice is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class Request(Progress):
    """One choice on its way through the engine. Owned by the engine; every field is host data, at most one step old."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_length: int,
        choice: int = 0,
        arrival: float = 0.0,
        order: int = 0,
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        output: Sequence[int] = (),
    ) -> None:
        """`output`: tokens that another engine has given it; it goes on after them."""
        super().__init__(len(prompt_ids) + len(output), max_length)
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.choice = choice
        self.order = order  # arrival order: ties in priority go to the older request
        self.bad_words_ids = bad_words_ids
        self.prompt_len = len(prompt_ids)
        self.tokens: list[int] = [*prompt_ids, *output]  # confirmed: prompt and output
        self.state = State.WAITING
        self.entered = arrival  # s, when it came into this state
        self.last_output = arrival  # s, when it last got tokens
        self.slot: int | None = None
        self.unread = False  # whether the verifier passed over tokens of it whose states count for no draft head
        self.late_features = False  # whether those that a draft head got begin past its first token
        self.tickets = 0  # launched passes that still touch this request's slot or blocks
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.preempting = False
        self.served = 0  # number of the step that last carried it
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None and choice == 0 and not output else None
        )
        self.origins: list[TokenOrigin] | None = [] if params.token_origins else None
        self.terms: Any = None  # what the engine has worked out of its parameters
        self.grammar: Any = None  # a sampling.grammar.GrammarState; None: anything goes
        self.last_draft = (0, 0)  # drafted and accepted tokens of the last verdict that judged a draft
        self.metrics = RequestMetrics(arrival_time=arrival)

    @property
    def output_ids(self) -> list[int]:
        """Confirmed output tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        """How many output tokens are confirmed."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.state is State.FINISHED

    def enter(self, state: State, now: float) -> float:
        """Move on along the path; returns how long it was where it was, s."""
        if state not in PATH[self.state]:
            raise ValueError(f"a request cannot go from {self.state.value} to {state.value}")
        waited = max(0.0, now - self.entered)
        if state is State.PREFILL and self.metrics.time_in_queue is None:
            self.metrics.time_in_queue = waited
        self.state = state
        self.entered = now
        if state is not State.VERIFY:
            self.dropped()
        return waited

    def rank(self) -> tuple[int, int]:
        """Order of service: priority first, then arrival."""
        return (self.params.priority, self.order)
