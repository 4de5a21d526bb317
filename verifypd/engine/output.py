"""Turns token ids into text as they arrive, and finds stop strings. Knows tokenizers; nothing of scheduling."""

from __future__ import annotations

from verifypd.request import CompletionOutput, Request
from verifypd.tokenizer import Tokenizer


class TextOutput:
    """The text of one request, token by token, so that a stop string cuts where plain decoding would have stopped."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.text = ""
        self.stopped_by: str | None = None
        self._read = 0  # output tokens taken in
        self._stops = params.stop_strings
        self._stream = None
        if tokenizer is not None and params.detokenize:
            prompt = request.tokens[: request.prompt_len]
            self._stream = tokenizer.stream(prompt, skip_special_tokens=params.skip_special_tokens)

    def update(self) -> bool:
        """Take in newly confirmed tokens. True when a stop string was found: the request must end, its rest is cut."""
        request = self.request
        if not self._stops and self._stream is not None and not request.finished:  # nothing to look for
            new = request.tokens[request.prompt_len + self._read :]
            self._read += len(new)
            self.text += self._stream.push(new)
            return False
        for index in range(self._read, request.output_len):
            self._read = index + 1
            if self._stream is None:
                continue
            ends_here = request.finish_reason == "stop" and self._read == request.output_len
            if ends_here and not request.params.include_stop_str_in_output:
                break  # the stop token is not text
            before = len(self.text)
            self.text += self._stream.push([request.tokens[request.prompt_len + index]])
            if self._read > request.params.min_tokens and self._find_stop(before):
                self._cut()
                return True
        if request.finished and self._stream is not None:
            self.text += self._stream.finish()  # bytes of a character that never became whole
            self._stream = None
        return False

    def _find_stop(self, before: int) -> bool:
        """Look for the earliest stop string that the newest text completes."""
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return False
        at, self.stopped_by = found
        self.text = (
            self.text[: at + len(self.stopped_by)] if self.request.params.include_stop_str_in_output else self.text[:at]
        )
        return True

    def _cut(self) -> None:
        """Drop what speculation produced past the stop string. Nothing is text that comes behind it."""
        request, self._stream = self.request, None
        del request.tokens[request.prompt_len + self._read :]
        if request.logprobs is not None:
            del request.logprobs[self._read :]
        if request.origins is not None:
            del request.origins[self._read :]

    def visible(self) -> str:
        """Text that can be shown now: what might be the start of a stop string is held back until it is decided."""
        if self.request.finished or not self._stops:
            return self.text
        hold = max(self._begun(stop) for stop in self._stops)
        return self.text[: len(self.text) - hold] if hold else self.text

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the text are the beginning of this stop string."""
        at = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(self.text[at:]):
            at = self.text.find(stop[0], at + 1)
        return len(self.text) - at if at >= 0 else 0

    def completion(self) -> CompletionOutput:
        """The choice so far."""
        request = self.request
        logprobs = request.logprobs
        chosen = request.output_ids
        total = None
        if logprobs is not None:
            total = sum(entry[token].logprob for token, entry in zip(chosen, logprobs, strict=True))
        return CompletionOutput(
            index=request.choice,
            text=self.visible(),
            token_ids=chosen,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=total,
            logprobs=list(logprobs) if logprobs is not None else None,
            token_origins=list(request.origins) if request.origins is not None else None,
        )
