"""What a policy may look at, and the plan it answers with. Pure data; knows nothing of tensors or of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verifypd.batch import DraftBatch, VerifyBatch
from verifypd.control.observe import StepTiming
from verifypd.control.tuning import MEAN_OUTPUT, PRIOR_TRIALS


class RequestView(NamedTuple):  # a tuple, because one is made for every request in every step
    """One admitted request as the host knows it: up to the verdicts of the step before last."""

    slot: int
    rank: tuple[int, int]  # priority, arrival: lower is served first
    served: int  # number of the step that last carried it; lower waits longer
    chunk_start: int  # first token the verifier has not computed, while prefilling
    prefill_left: int  # known tokens the verifier has still to compute; 0: decoding
    length_floor: int  # the device length lies between these two
    length_bound: int
    max_length: int  # length at which it ends
    draft_limit: int  # longest draft it allows; 0: no speculation
    draft_lag: int  # tokens the draft's cache may lack, upper bound
    expected: int  # tokens its drafter expects to be able to propose
    prompt_logprobs: int  # as in VerifySpan
    request_id: int = 0  # slots are used again, ids never
    waited: float = 0.0  # s since it entered its lane: prefill, decode (ready to draft) or verify (drafted)
    pending: int = 0  # draft tokens written and waiting for the verify lane
    drafter: str | None = None  # who wrote them
    slo_ttft: float = 500.0  # ms, its target for the first token
    slo_tpot: float = 15.0  # ms, its target per output token
    decoding: float = 0.0  # s since its first token
    since_output: float = 0.0  # s since its last output, or since it arrived
    emitted: int = 0  # output tokens, of verdicts that were absorbed
    greedy: bool = False
    coupled: bool = False  # acceptance rule of a sampled request
    temperature: float = 1.0  # its own, not the drafter's
    draft_temperature: float | None = None  # its drafter's relative to that, where it is set; None: the controller's
    proposer: str | None = None  # who drafts for it next, where it is not the snapshot's drafter
    lookups: tuple[int, int] = (0, 0)  # look-ups that its text so far has borne out, of so many

    @property
    def room(self) -> int:
        """Tokens it can still emit, at most; 0 when the verdicts in flight are sure to end it."""
        return self.max_length - self.length_floor

    def expected_left(self, mean_output: float) -> float:
        """Tokens it is expected to write yet: as many as others did, or as many again as it has."""
        return max(1.0, min(max(mean_output - self.emitted, float(self.emitted)), self.room))

    @property
    def context(self) -> int:
        """Upper bound of its confirmed tokens."""
        return min(self.length_bound, self.max_length)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a policy sees."""

    step: int
    requests: tuple[RequestView, ...]
    batch_size: int
    prefill_chunk: int  # prompt tokens of one pass, at most
    draft_chunk: int  # tokens that drafts' caches catch up with in one step, at most
    drafter: str | None
    drafter_has_cache: bool
    copier: str | None = None  # the drafter beside it that looks up
    now: float = 0.0  # s of the engine's clock
    waiting: int = 0  # requests that arrived and hold no slot yet
    waiting_tokens: int = 0  # of their prompts
    emitted: int = 0  # output tokens of all requests so far, the first of each left out
    verdicts: int = 0  # that brought them
    mean_output: float = MEAN_OUTPUT  # tokens of a request that has ended
    away: int = 0  # requests left out of `requests`: their prompts run beside the rest
    most_chunks: int = 1 << 30  # prompts that may have a chunk in one pass
    verify_batch: int = 1  # drafts the verify lane of `pdv` waits for
    verify_wait_ms: float = 0.0  # ms the oldest of them waits at most
    workers: int = 1  # requests that share the device under `baseline`
    queue_factor: float = 1.2  # decode queue at most this many times the batch size
    lane_weights: tuple[tuple[str, float], ...] = ()  # lane -> share of a contended step; missing: 1
    slo_ttft: float = 500.0  # ms, target for the first token
    slo_gap: float = 30.0  # ms, target for the time between two outputs of a request
    offline: bool = False  # whether nobody reads an answer before all are written
    verifier_bytes: int = 0  # weights of the verifier
    routine_lag: int = 2  # tokens a draft's cache lacks, at most, after a verdict that followed a draft; more is a debt


def mean_output(tokens: int, requests: int) -> float:
    """Tokens of a request that has ended with any, of so many in all; before many have, about what is expected."""
    return (PRIOR_TRIALS * MEAN_OUTPUT + tokens) / (PRIOR_TRIALS + requests)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step runs, in this order: draft, verify, prefill.

    A draft without a verify span of the same slot leaves the tokens pending: the verify lane takes them in a later
    plan, as they stand. `verify` may carry prompt chunks; `prefill` is a pass of its own for them.
    """

    draft: DraftBatch | None = None
    verify: VerifyBatch | None = None
    prefill: VerifyBatch | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return self.draft is None and self.verify is None and self.prefill is None

    @property
    def leaves_drafts(self) -> bool:
        """Whether a draft of it waits for a later verify."""
        verified = {span.slot for span in self.verify.spans} if self.verify else set()
        return self.draft is not None and any(span.drafts and span.slot not in verified for span in self.draft.spans)

    @property
    def decodes(self) -> bool:
        """Whether anybody gets a token who has one already."""
        return self.verify is not None and any(span.start is None for span in self.verify.spans)

    def work(self, **seconds: float) -> StepTiming:
        """Its rows and contexts as the host knows them, bounds; `seconds`: measured. Look-ups cost next to nothing."""
        drafts = [span for span in self.draft.spans if span.drafter in (None, self.draft.drafter)] if self.draft else []
        verify = self.verify.spans if self.verify else ()
        beside = [span for span in verify if span.start is not None]
        chunks = [*beside, *(self.prefill.spans if self.prefill else ())]
        return StepTiming(
            draft_requests=len(drafts),
            draft_steps=max([span.drafts for span in drafts], default=0),
            draft_rows=sum([span.rows for span in drafts]),
            draft_context=sum([span.context for span in drafts]),
            verify_requests=len(verify) - len(beside),
            verify_rows=sum([span.rows for span in verify]),
            verify_context=sum([span.context for span in verify]),
            chunk_rows=sum([span.rows for span in chunks]),
            chunk_context=sum([span.rows * span.context for span in chunks]),
            **seconds,
        )
