"""Answers of `/v1/completions`: texts, which may repeat their prompts, and their logprobs. Knows calls; no sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from verifypd.request import Logprob
from verifypd.server.calls import Choice, table
from verifypd.server.offsets import Offsets
from verifypd.server.render import TURN, Renderer, batched, spelt
from verifypd.tokenizer import Tokenizer

Rows = Sequence[tuple[int, dict[int, Logprob] | None]]
Columns = tuple[list[str], list[float | None], list[Any], list[int]]  # of logprobs: tokens, their own, the top, offsets


class CompletionRenderer(Renderer):
    """`/v1/completions`."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        text = "" if self.prepared.score_only else choice.text.visible()
        return {
            "index": choice.index,
            "text": self._echo(choice) + text,
            "logprobs": self._logprobs(choice, 0, with_prompt=self.prepared.echo is not None),
            **self._end(choice),
            **self._prompt_logprobs(choice),
            **self._token_ids(choice, 0),
            **self._token_origins(choice, 0),
        }

    def deltas(self, choice: Choice, finish: str | None) -> list[dict[str, Any]]:
        """What is new of a choice."""
        start, choice.shown_tokens = choice.shown_tokens, choice.tokens
        text = choice.new_text()
        if self.prepared.score_only:
            text = ""
        first = start == 0
        if first:
            text = self._echo(choice) + text
        logprobs = self._logprobs(choice, start, with_prompt=first and self.prepared.echo is not None)
        quiet = not (self.prepared.continuous_usage or self.prepared.return_token_ids or choice.request.origins)
        if not text and finish is None and logprobs is None and quiet and not first:
            return []
        delta = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            **self._end(choice),
            **self._token_ids(choice, start),
            **self._token_origins(choice, start),
        }
        if first:
            delta |= self._prompt_logprobs(choice)
        return [delta]

    def _quick(self, index: int, text: str) -> bytes:
        return b"".join(
            (
                self._open,
                b'[{"index":%d,"text":' % index,
                orjson.dumps(text),
                b',"logprobs":null,"finish_reason":null}]' + self._shut,
            )
        )

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Why a choice ended, if it has; a prompt that is only scored ends with no token, whichever was drawn."""
        if self.prepared.score_only:
            return {"finish_reason": "length" if choice.finish == "stop" else choice.finish, "stop_reason": None}
        return {"finish_reason": choice.finish, "stop_reason": choice.request.stop_reason}

    def text_start(self, choice: Choice) -> int:
        """The prompt may stand before it."""
        return len(self._echo(choice))

    def _echo(self, choice: Choice) -> str:
        return self.prepared.echo[choice.index // self.call.ask.params.n] if self.prepared.echo is not None else ""

    def _logprobs(self, choice: Choice, start: int, *, with_prompt: bool) -> dict[str, Any] | None:
        if self.prepared.logprobs is None:
            return None
        columns: Columns = self._prompt_scores(choice) if with_prompt else ([], [], [], [])
        if not self.prepared.score_only:
            new = choice.request.output_ids[start:]
            rows = list(zip(new, (choice.request.logprobs or [])[start:], strict=False))
            own = *self._columns(rows), self._offsets(choice, new)[: len(rows)]
            columns = (columns[0] + own[0], columns[1] + own[1], columns[2] + own[2], columns[3] + own[3])
        return dict(zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), columns, strict=True))

    def scores(self, choice: Choice) -> Iterator[Any]:
        """Where the prompt is repeated with its logprobs, these."""
        if not self.prepared.echo_scored:
            yield from super().scores(choice)
            return
        columns: Columns = ([], [], [], [])
        tokens, values, tops, offsets = columns
        begins = Offsets(self.tokenizer, (), False, 0)
        scored = list(zip(choice.prompt, [None, *self._prompt_rows(choice)], strict=False))
        for part in batched(scored, TURN):
            rows = [(token, None if row is None else table(row)) for token, row in part]
            own = self._columns(rows)
            tokens += own[0]
            values += own[1]
            tops += [orjson.Fragment(orjson.dumps(top)) for top in own[2]]
            offsets += [begins.take(token) for token, _ in rows]
            yield None
        yield columns

    def _columns(self, rows: Rows) -> tuple[list[str], list[float | None], list[Any]]:
        """Tokens, their logprobs, and the most likely in each one's place."""
        wanted = self.prepared.logprobs or 0
        tokens = [spelt(token, self.tokenizer) for token, _ in rows]
        values = [None if row is None else row[token].logprob for token, row in rows]
        tops = [None if row is None else _top(row, token, wanted, self.tokenizer) for token, row in rows]
        return tokens, values, tops


def _top(row: dict[int, Logprob], token: int, wanted: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    """The most likely tokens by text; the chosen one is among them, as vLLM has it."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank)[: max(1, wanted)] if wanted else []
    chosen = dict(ranked) | ({token: row[token]} if wanted else {})
    return {spelt(other, tokenizer): entry.logprob for other, entry in chosen.items()}
