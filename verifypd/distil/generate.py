"""Writes text with the verifier, thousands of sequences side by side. Knows tensors; nothing of prompts or training.

Prompts are padded on the left, so every sequence writes its next token into the same column. On a GPU a step is one
captured graph for each width of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from verifypd.distil.dense import DenseAttention, Places, StaticCache, StepAttention
from verifypd.models.base import Model
from verifypd.runtime.graphs import no_collection

WIDTH = 64  # columns; the cache is looked at in multiples of it
PREFILL_ROWS = 512  # sequences whose prompts are read at once
LOOK = 16  # steps between two looks at how many sequences have ended
ENOUGH = 0.96  # share of ended sequences at which a batch is cut off


class Generator:
    """Continues a fixed number of prompts at once. Ended sequences idle until nearly all have ended."""

    def __init__(self, model: Model, sequences: int, columns: int, stop_ids: Sequence[int]) -> None:
        device = model.device
        self.model = model
        self.sequences = sequences
        self.columns = -(-columns // WIDTH) * WIDTH
        self.cache = StaticCache(model, sequences, self.columns)
        self.stop_ids = torch.tensor(list(stop_ids), device=device)
        self.ids = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.done = torch.zeros(sequences, dtype=torch.bool, device=device)
        self.out = torch.zeros(sequences, self.columns, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(sequences, 1, device=device)
        self.min_p = torch.zeros((), device=device)
        self._graphs: dict[int, Any] = {}  # width -> captured step

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new: int,
        *,
        seed: int,
        min_p: float = 0.0,
        tick: Callable[[int], object] = lambda _: None,
    ) -> list[list[int]]:
        """The continuation of each prompt, its stop token included where it ended. tick: called at every step."""
        wanted = len(prompts)
        if not 0 < wanted <= self.sequences:
            raise ValueError(f"{wanted} prompts for {self.sequences} rows")
        longest = max(map(len, prompts))
        if longest + max_new > self.columns:
            raise ValueError(f"prompts of {longest} and {max_new} new tokens do not fit {self.columns} columns")
        rows = [list(prompts[i % wanted]) for i in range(self.sequences)]  # the rest repeats, and is dropped
        self._seed(seed)
        self._prefill(rows, longest)
        self.done.zero_()
        self.done[wanted:] = True
        self.temperature.copy_(torch.tensor([[temperatures[i % wanted]] for i in range(self.sequences)]))
        self.min_p.fill_(min_p)
        for step in range(max_new):
            self._step(-(-(longest + step) // WIDTH) * WIDTH)
            tick(0)
            if step % LOOK == LOOK - 1 and float(self.done[:wanted].float().mean()) >= ENOUGH:
                break
        written = self.out[:wanted, longest : longest + step + 1].cpu().tolist()
        stops = set(self.stop_ids.tolist())
        return [_upto_stop(row, stops) for row in written]

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        if self.model.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _prefill(self, rows: list[list[int]], longest: int) -> None:
        """Read all but the last token of each prompt; the last is the first step's."""
        device = self.model.device
        ids = torch.zeros(self.sequences, longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
        ids = ids.to(device)
        self.first.copy_(torch.tensor([longest - len(row) for row in rows]))
        self.ids.copy_(ids[:, -1])
        self.column.fill_(longest - 1)
        length = longest - 1
        for start in range(0, self.sequences if length else 0, PREFILL_ROWS):
            part = slice(start, start + PREFILL_ROWS)
            first = self.first[part]
            positions = (torch.arange(length, device=device) - first[:, None]).clamp_min(0)
            self.model.forward(
                ids[part, :-1].reshape(-1),
                cast(Any, Places(positions.reshape(-1))),
                cast(Any, DenseAttention(len(first), length, first)),
                cast(Any, self.cache.rows(part)),
            )

    def _step(self, width: int) -> None:
        if self.model.device.type != "cuda":
            self._advance(width)
            return
        if width not in self._graphs:
            self._graphs[width] = self._capture(width)
        self._graphs[width].replay()

    def _capture(self, width: int) -> Any:
        state = (self.ids, self.column, self.done, self.out)
        kept, noise = [tensor.clone() for tensor in state], torch.cuda.get_rng_state(self.model.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance(width)  # anything that sets itself up does so now, outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        torch.cuda.set_rng_state(noise, self.model.device)  # the text must not depend on when a graph was captured
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with no_collection(), torch.cuda.graph(graph, pool=pool):
            self._advance(width)
        return graph

    def _advance(self, width: int) -> None:
        """One token more for every sequence; all that changes lives in tensors, so that a graph can replay it."""
        positions = (self.column - self.first).clamp_min(0)
        attention = StepAttention(self.column, width, self.first)
        hidden = self.model.forward(self.ids, cast(Any, Places(positions)), cast(Any, attention), cast(Any, self.cache))
        chosen = draw(self.model.logits(hidden), self.temperature, self.min_p)
        chosen = torch.where(self.done, self.ids, chosen)
        self.done |= (chosen[:, None] == self.stop_ids).any(1)
        self.ids.copy_(chosen)
        self.column += 1
        self.out.index_copy_(1, self.column.clamp_max(self.columns - 1), chosen[:, None])


def draw(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """One token per row [B] of logits [B, V] at temperature [B, 1], 0 greedy; tokens below min_p of the best are out.

    A sample of softmax(l / T) is the maximum of l + T × Gumbel noise, which at T = 0 is the maximum of l.
    """
    floor = logits.amax(-1, keepdim=True) + temperature * torch.log(min_p)
    noise = torch.empty_like(logits).exponential_().log_()
    scores = torch.where(logits >= floor.nan_to_num(-torch.inf), logits - temperature * noise, -torch.inf)
    return scores.argmax(-1)


def _upto_stop(row: list[int], stops: set[int]) -> list[int]:
    for i, token in enumerate(row):
        if token in stops:
            return row[: i + 1]
    return row
