"""What a policy may look at, and the plan it answers with. Pure data; knows nothing of tensors or of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.batch import DraftBatch, VerifyBatch


@dataclass(frozen=True, slots=True)
class RequestView:
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
    promise: int  # tokens the drafter expects to be able to propose
    prompt_logprobs: int  # as in VerifySpan

    @property
    def room(self) -> int:
        """Tokens it can still emit, at most; 0 when the verdicts in flight are sure to end it."""
        return self.max_length - self.length_floor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a policy sees."""

    step: int
    requests: tuple[RequestView, ...]
    batch_size: int
    prefill_chunk: int  # tokens
    draft_chunk: int  # tokens
    drafter: str | None
    drafter_has_cache: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step runs, lane by lane."""

    draft: DraftBatch | None = None
    verify: VerifyBatch | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return self.draft is None and self.verify is None
