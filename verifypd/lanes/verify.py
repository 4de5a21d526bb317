"""The verify lane: one ragged verifier pass, then the verdict on the device. Knows tensors; nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.attention.base import Reader
from verifypd.batch import Verdict, VerifyBatch, VerifySpan
from verifypd.drafters.base import Drafter
from verifypd.runtime.inputs import Slots, host_tensor, verify_ids, verify_layout
from verifypd.runtime.padded import VerifyPasses
from verifypd.runtime.runner import ModelRunner
from verifypd.runtime.streams import HostCopy, Ticket
from verifypd.sampling.case import Finish, Spans, Verdicts
from verifypd.sampling.grammar import GrammarState
from verifypd.sampling.logprobs import Logprobs, token_logprobs
from verifypd.sampling.state import SamplingState
from verifypd.sampling.verify import judge

LOGPROB_ROWS = 64  # prompt rows whose logits are held at once
FINISH: dict[int, str | None] = {
    Finish.RUNNING: None, Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ERROR: "error",
}  # fmt: skip

TokenLogprobs = tuple[float, int, tuple[tuple[int, float], ...]]  # own, rank, most likely (id, logprob)


@dataclass(frozen=True, slots=True)
class PassResult:
    """What came of a verify batch: a verdict for each span that emits, and prompt logprobs by slot."""

    verdicts: tuple[Verdict | None, ...]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class VerifyLane:
    """Checks the drafts of many requests in one pass; plain tokens and prompt chunks ride in the same pass."""

    name = "verify"

    def __init__(
        self,
        runner: ModelRunner,
        slots: Slots,
        sampling: SamplingState,
        drafters: dict[str, Drafter],
        wait: str = "block",
        padded: VerifyPasses | None = None,
    ) -> None:
        self.padded = padded  # passes of fixed shape; None: every pass is launched as it comes
        self.runner = runner
        self.slots = slots
        self.sampling = sampling
        self.drafters = drafters
        self.wait = wait  # how the host waits for verdicts
        self.grammars: dict[int, GrammarState] = {}  # slot -> what its output must follow
        self.shown: set[int] = set()  # slots whose drafts come to the host with their verdicts
        self.keeps = True  # whether states kept for a draft head count: not while nobody can draft

    @property
    def reader(self) -> Reader | None:
        """Of hidden states, for a draft head."""
        return next((each.reader for each in self.drafters.values() if each.reader is not None), None)

    @property
    def captured(self) -> int:
        """Graphs captured so far, of all lanes."""
        return len(self.padded.graphs) if self.padded is not None else 0

    @torch.inference_mode()
    def launch(self, batch: VerifyBatch, replay: bool = True, hidden: Tensor | None = None) -> Ticket:
        """Forward pass, then verdict; both are queued on the device and nothing is waited for.

        Except for the drafts of constrained requests: the host reads them, while the forward pass runs, to make masks.
        Prompt chunks go last, whatever order the batch has them in. hidden: of a pass over chunks that ran elsewhere,
        right in the rows that emit.
        """
        batch = VerifyBatch(tuple(sorted(batch.spans, key=lambda span: span.start is not None)))
        spans, rows = batch.spans, None
        if spans[-1].start is not None:
            emitting = [(first, span) for first, span in _first_rows(batch.spans) if span.emits]
            spans, rows = tuple([span for _, span in emitting]), _emitting_rows(emitting)
        constrained = self._read_constrained(spans)
        hidden = self.forward(batch, replay) if hidden is None else hidden
        tensors: dict[str, Tensor] = {}
        if spans:
            logits = self.runner.logits(hidden if rows is None else _take(hidden, rows, self.slots.device))
            mask = self._masks(spans, constrained) if constrained else None
            if self.shown and any(span.drafts and span.slot in self.shown for span in spans):
                tensors["drafts"] = self.slots.drafts[host_tensor([span.slot for span in spans], self.slots.device)]
            verdicts = self.verdict(spans, logits, mask)
            tensors["verdicts"] = verdicts.packed()
            if verdicts.logprobs is not None:
                tensors.update(_named("", verdicts.logprobs))
        tensors.update(self._prompt_logprobs(batch, hidden))
        return Ticket(batch, HostCopy(tensors, self.wait), lambda arrays: _read(batch, arrays))

    def forward(self, batch: VerifyBatch, replay: bool = True) -> Tensor:
        """Stage one: hidden states of every row. Graphs share memory: what runs beside others is not replayed."""
        if replay and self.padded is not None and self.padded.takes(batch.spans):
            return self.padded.run(batch.spans)
        layout = verify_layout(batch.spans, self.slots, self.runner.tables)
        ids = verify_ids(batch.spans, layout, self.slots)
        return self.runner.forward(ids, layout, reader=self.reader if self.keeps else None)

    def verdict(self, spans: Sequence[VerifySpan], logits: Tensor, mask: Tensor | None = None) -> Verdicts:
        """Stage two: accept, draw, cut and write the slots. `mask` [rows, vocab] forbids tokens, e.g. by a grammar."""
        laid = self.padded.judged(spans) if self.padded is not None else None
        return judge(
            logits,
            laid or Spans.of([span.slot for span in spans], [span.drafts for span in spans], self.slots.device),
            self.sampling,
            self.slots.tokens,
            self.slots.lengths,
            self.slots.drafts,
            self.slots.draft_lens,
            self.slots.draft_q,
            [span.drafter is None or self.drafters[span.drafter].point_mass for span in spans],
            mask=mask,
            context=max([span.context for span in spans]),
        )

    def _read_constrained(self, spans: Sequence[VerifySpan]) -> HostCopy | None:
        """Start bringing what grammars must read to the host: confirmed tokens they have not seen, and drafts."""
        some = [span for span in spans if span.slot in self.grammars] if self.grammars else []
        if not some:
            return None
        slots = host_tensor([span.slot for span in some], self.slots.device)
        begins = [self.grammars[span.slot].position for span in some]
        width = max(1, max(span.context - begin for span, begin in zip(some, begins, strict=True)))
        column = host_tensor(begins, self.slots.device)[:, None] + torch.arange(width, device=self.slots.device)
        tokens = self.slots.tokens[slots[:, None], column.clamp_max(self.slots.capacity - 1)]
        counts = torch.stack([self.slots.lengths[slots], self.slots.draft_lens[slots]], dim=1)
        return HostCopy({"tokens": tokens, "counts": counts, "drafts": self.slots.drafts[slots]})

    def _masks(self, spans: Sequence[VerifySpan], copy: HostCopy) -> Tensor:
        """int32 [rows, words], bit set where a token is allowed; everything is in rows without a grammar."""
        arrays = copy.wait()
        rows = sum(span.drafts + 1 for span in spans)
        masks = np.full((rows, -(-self.sampling.vocab // 32)), -1, dtype=np.int32)
        asked: list[tuple[GrammarState, int, int]] = []  # each with its first row and the one after its last
        first = 0
        for span in spans:
            state = self.grammars.get(span.slot)
            if state is not None:
                place = len(asked)
                length, drafted = (int(count) for count in arrays["counts"][place])
                output = [int(token) for token in arrays["tokens"][place, : max(0, length - state.position)]]
                drafts = [int(token) for token in arrays["drafts"][place, : min(drafted, span.drafts)]]
                state.ask(output, drafts)
                asked.append((state, first, first + span.drafts + 1))
            first += span.drafts + 1
        for state, begin, end in asked:
            state.fill(masks[begin:end])
        host = torch.from_numpy(masks)
        if self.slots.device.type == "cpu":
            return host
        return host.pin_memory().to(self.slots.device, non_blocking=True)

    def _prompt_logprobs(self, batch: VerifyBatch, hidden: Tensor) -> dict[str, Tensor]:
        """Logprobs of the token after each prompt row, where wanted: [rows] own and rank, [rows, K] most likely."""
        if batch.spans[-1].start is None:  # no prompt
            return {}
        wanted = [(first, span) for first, span in _first_rows(batch.spans) if span.prompt_logprobs >= 0]
        if not wanted:
            return {}
        rows = [first + j for first, span in wanted for j in range(span.rows)]
        slots = host_tensor([span.slot for _, span in wanted for _ in range(span.rows)], self.slots.device)
        following = [(span.start or 0) + j + 1 for _, span in wanted for j in range(span.rows)]
        targets = self.slots.tokens[slots, host_tensor(following, self.slots.device)]
        wide = max(span.prompt_logprobs for _, span in wanted)
        parts = zip(
            _take(hidden, rows, self.slots.device).split(LOGPROB_ROWS), targets.split(LOGPROB_ROWS), strict=True
        )
        found = [
            _named("prompt_", token_logprobs(self.runner.logits(part)[:, : self.sampling.vocab], ids, wide))
            for part, ids in parts
        ]
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def _first_rows(spans: Sequence[VerifySpan]) -> list[tuple[int, VerifySpan]]:
    """Each span with its first row in the pass."""
    placed, first = [], 0
    for span in spans:
        placed.append((first, span))
        first += span.rows
    return placed


def emitting_rows(batch: VerifyBatch) -> list[int]:
    """Rows of a pass whose logits a verdict needs."""
    return _emitting_rows([(first, span) for first, span in _first_rows(batch.spans) if span.emits])


def _emitting_rows(emitting: Sequence[tuple[int, VerifySpan]]) -> list[int]:
    """Rows whose logits a verdict needs: all of a decode span, the last of a chunk."""
    return [first + j for first, span in emitting for j in range(span.rows - span.drafts - 1, span.rows)]


def _take(hidden: Tensor, rows: list[int], device: torch.device) -> Tensor:
    return hidden if len(rows) == hidden.shape[0] else hidden[host_tensor(rows, device)]


def _named(prefix: str, logprobs: Logprobs) -> dict[str, Tensor]:
    parts = {"chosen": logprobs.chosen, "ranks": logprobs.ranks, "top_ids": logprobs.top_ids, "top": logprobs.top}
    return {prefix + name: tensor for name, tensor in parts.items()}


def _read(batch: VerifyBatch, arrays: dict[str, np.ndarray[Any, Any]]) -> PassResult:
    """Arrays on the host back into verdicts, span by span."""
    verdicts: list[Verdict | None] = []
    index = 0
    rows = arrays["verdicts"].tolist() if "verdicts" in arrays else []
    for span in batch.spans:
        if not span.emits:
            verdicts.append(None)
            continue
        count, accepted, drafted, finish, _, *tokens = rows[index]
        if count <= accepted and finish != Finish.ERROR:
            drafted = accepted  # it ended inside the accepted drafts: the others were never judged
        logprobs = tuple(_token_logprobs(arrays, "", (index, j)) for j in range(count)) if "chosen" in arrays else ()
        drafts = tuple(arrays["drafts"][index, :drafted].tolist()) if "drafts" in arrays else ()
        verdicts.append(Verdict(span.slot, accepted, drafted, tuple(tokens[:count]), FINISH[finish], logprobs, drafts))
        index += 1
    prompt: dict[int, list[TokenLogprobs]] = {}
    row = 0
    for span in batch.spans:
        if span.prompt_logprobs >= 0:
            prompt[span.slot] = [_token_logprobs(arrays, "prompt_", (row + j,)) for j in range(span.rows)]
            row += span.rows
    return PassResult(tuple(verdicts), prompt)


def _token_logprobs(arrays: dict[str, np.ndarray[Any, Any]], prefix: str, at: tuple[int, ...]) -> TokenLogprobs:
    ids, values = arrays[f"{prefix}top_ids"][at].tolist(), arrays[f"{prefix}top"][at].tolist()
    own, rank = float(arrays[f"{prefix}chosen"][at]), int(arrays[f"{prefix}ranks"][at])
    return own, rank, tuple(zip(ids, values, strict=True))
