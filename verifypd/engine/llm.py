"""The offline API: prompts in, texts out, in the names and shapes of vLLM's `LLM`. Knows text; nothing of tensors."""

from __future__ import annotations

import heapq
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from verifypd.config import EngineConfig
from verifypd.engine.build import build
from verifypd.engine.output import TextOutput
from verifypd.errors import ConfigError, RequestError
from verifypd.request import Logprob, Request, RequestMetrics, RequestOutput, SamplingParams, check_bad_words
from verifypd.tokenizer import ChatText, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

MESSAGES = "messages are a list of mappings with role and content"
PURGE = 64  # deadlines kept before those of requests that have ended are thrown out


class LLM:
    """A model and an engine in this process. Threads may share it; a process that is forked from this one may not.

    >>> with LLM("smollm2", draft="ngram") as llm:
    ...     [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
    """

    def __init__(self, model: str = "smollm2", draft: str | None = "auto", **settings: Any) -> None:
        """`settings` are those of EngineConfig; a name that is not one is refused."""
        self.config = EngineConfig.from_kwargs(model=model, draft=draft, **settings)
        built = build(self.config)
        self.engine = built.engine
        self.tokenizer = built.tokenizer
        self.budget = built.budget
        self._seeds = random.Random(self.config.seed) if self.config.seed is not None else random.SystemRandom()
        self._count = 0  # requests made so far
        self._jobs: dict[int, _Job] = {}  # request order -> its job
        self._ended = 0  # requests that have ended
        self._deadlines: list[tuple[float, int]] = []  # heap of (s of the engine's clock, request order)
        self._closed = False
        self._lock = threading.RLock()  # of all that follows requests
        self._process = os.getpid()

    # -- prompts ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tick: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text, token ids, or {"prompt_token_ids": …}); outputs keep the order of the prompts.

        tick: called after each step with how many prompts ended in it, e.g. the `update` of a progress bar.
        """
        many = _as_list(prompts)
        jobs = self._submit(many, _per_prompt(sampling_params, len(many)))
        self.engine.offline = True
        try:
            before = left = len(jobs)
            known = self._ended
            while left:
                self._step()
                if self._ended != known or not self.engine.busy:  # not in each step: they may be thousands
                    known, left = self._ended, sum(not job.finished for job in jobs)
                if tick is not None:
                    tick(before - left)
                before = left
        except BaseException:
            self._drop(jobs)
            raise
        finally:
            self.engine.offline = False
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output so far, each time it has grown; closing the iterator aborts the request."""
        [job] = self._submit([prompt], [sampling_params or SamplingParams()])
        shown = job.progress()
        try:
            while not job.finished or job.progress() != shown:
                if job.progress() == shown:
                    self._step()
                if job.progress() != shown:
                    shown = job.progress()
                    yield job.output()
        finally:
            self._drop([job])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        special_tokens_in_content: bool = False,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Special tokens spelt out in messages, tools and template variables are text: who is quoted there cannot end a
        turn. special_tokens_in_content: they act as such.
        """
        conversations = _listed(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts = [
            self._chat_ids(c, add_generation_prompt, special_tokens_in_content, **template_arguments)
            for c in conversations
        ]
        return self.generate(prompts, sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        special_tokens_in_content: bool = False,
        **template_arguments: Any,
    ) -> Iterator[RequestOutput]:
        """As `stream`, for a conversation; its special tokens are text, as for `chat`."""
        ids = self._chat_ids(messages, True, special_tokens_in_content, **template_arguments)
        yield from self.stream(ids, sampling_params)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        special_tokens_in_content: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation, of any length. The template writes its own special tokens, so none are added.

        Special tokens spelt out in messages, tools and template variables are text, unless special_tokens_in_content.
        """
        chat = self._chat_text(messages, add_generation_prompt, special_tokens_in_content, **arguments)
        return self.get_tokenizer().encode_chat(chat)

    def get_tokenizer(self) -> Tokenizer:
        """The verifier's tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.config.model} has no tokenizer here: give prompts as token ids")
        return self.tokenizer

    def switch_architecture(self, name: str) -> None:
        """Run under another architecture from the next step on. Texts stay what they are; `config` says what is set."""
        self.engine.switch(name)
        self.config = self.config.switched(name)

    # -- life ---------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Abort what runs and free everything. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        """Make and queue the requests of all prompts, or of none when one is invalid."""
        if self._process != os.getpid():
            raise ConfigError("this LLM was made before the process was forked; make one in the new process")
        with self._lock:
            return self._queue(prompts, params)

    def _queue(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        if self._closed:
            raise ConfigError("this LLM was shut down; make a new one")
        jobs = [self._job(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        if len(self._deadlines) > max(PURGE, 2 * len(self._jobs)):
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._jobs)
        for job in jobs:
            for text in job.texts:
                request = text.request
                self.engine.add(request)
                self._jobs[request.order] = job
                if request.params.deadline_ms is not None:
                    due = request.metrics.arrival_time + request.params.deadline_ms / 1e3
                    heapq.heappush(self._deadlines, (due, request.order))
        return jobs

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, ids = self._encode(prompt)
        self.engine.validate(ids)
        self._check(params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        limit = self.engine.max_model_len
        longest = limit if params.max_tokens is None else min(limit, len(ids) + params.max_tokens)
        arrival = self.engine.clock()
        name = str(self._count)
        bad_words = self._bad_words(params.bad_words or ())
        texts = []
        for choice in range(params.n):
            request = Request(
                name,
                ids,
                params,
                seed=seed,
                choice=choice,
                max_length=longest,
                arrival=arrival,
                order=self._count,
                bad_words_ids=bad_words,
            )
            self._count += 1
            texts.append(TextOutput(request, self.tokenizer))
        return _Job(name, text, ids, texts, self.tokenizer)

    def _check(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters are SamplingParams, not {type(params).__name__}")
        vocab = self.engine.sampling.vocab
        given = {
            "logit_bias": params.logit_bias or {},
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids or (),
        }
        for name, ids in given.items():
            bad = next((token for token in ids if not 0 <= token < vocab), None)
            if bad is not None:
                raise RequestError(f"{name}: token id {bad} is outside the vocabulary of {vocab}", param=name)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")

    def _chat_ids(self, messages: Sequence[Message], generate: bool, special: bool, **arguments: Any) -> list[int]:
        """A conversation as a prompt; RequestError before it is encoded where it cannot fit."""
        chat = self._chat_text(messages, generate, special, **arguments)
        self._check_length(chat.text, "messages")
        return self.get_tokenizer().encode_chat(chat)

    def _chat_text(self, messages: Sequence[Message], generate: bool, special: bool, **arguments: Any) -> ChatText:
        given = _listed(messages)
        if not all(isinstance(message, Mapping) for message in given):
            raise RequestError(MESSAGES, param="messages")
        tokenizer, plain = self.get_tokenizer(), [dict(message) for message in given]
        if special:
            return ChatText(tokenizer.apply_chat_template(plain, generate, **arguments))
        return tokenizer.chat_text(plain, generate, **arguments)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text whose length alone says that it has too many tokens: it is not worth encoding."""
        limit = self.engine.max_model_len
        least = self.get_tokenizer().fewest_tokens(text) if len(text) > limit else 0
        if least >= limit:
            raise RequestError(
                f"the prompt has at least {least} tokens; with at least one output token the limit is {limit}"
                " (--max-model-len)",
                param=param,
            )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            return prompt, self.get_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError("a prompt mapping holds 'prompt' or 'prompt_token_ids'", param="prompt")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            return self._encode(prompt["prompt"])
        return None, _token_ids(prompt)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and after a space."""
        if not words:
            return ()
        tokenizer = self.get_tokenizer()
        forms = {form for word in words for form in (word, " " + word.lstrip())}
        found = {tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms} - {()}
        check_bad_words(list(found), self.engine.sampling.vocab)
        return tuple(sorted(found))

    def _step(self) -> None:
        """One engine step, and the text that came of it."""
        with self._lock:
            if self.engine.busy:  # another thread's step may have ended all
                self._advance()

    def _advance(self) -> None:
        self._stop_overdue()
        for request in self.engine.step():
            job = self._jobs.get(request.order)
            if job is None:
                continue
            text = job.texts[request.choice]
            if text.update():
                self.engine.finish(request, "stop", text.stopped_by)
                request.finish_reason, request.stop_reason = "stop", text.stopped_by  # also if the verdict ended it
            if request.finished:
                self._jobs.pop(request.order, None)
                self._ended += 1

    def _stop_overdue(self) -> None:
        """End who is past its deadline, with what it has."""
        while self._deadlines and self._deadlines[0][0] <= self.engine.clock():
            order = heapq.heappop(self._deadlines)[1]
            job = self._jobs.pop(order, None)
            if job is not None:
                text = next(text for text in job.texts if text.request.order == order)
                self.engine.finish(text.request, "deadline")
                text.update()
                self._ended += 1

    def _drop(self, jobs: Sequence[_Job]) -> None:
        """Abort what is left of these jobs and free their slots."""
        with self._lock:
            for job in jobs:
                for text in job.texts:
                    self.engine.finish(text.request)
                    self._jobs.pop(text.request.order, None)
            if not self._jobs:
                self.engine.drain()


class _Job:
    """One prompt and its choices."""

    def __init__(
        self, name: str, prompt: str | None, ids: list[int], texts: list[TextOutput], tokenizer: Tokenizer | None
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.ids = ids
        self.texts = texts
        self.tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        return all(text.request.finished for text in self.texts)

    def progress(self) -> tuple[tuple[int, bool], ...]:
        """Changes whenever there is something new to show."""
        return tuple((text.request.output_len, text.request.finished) for text in self.texts)

    def output(self) -> RequestOutput:
        first = self.texts[0].request
        outputs = [text.completion() for text in self.texts]
        if self.tokenizer is not None:
            for output in outputs:
                output.logprobs = _named(output.logprobs, self.tokenizer)
        prompt_logprobs = first.prompt_logprobs
        if self.tokenizer is not None and prompt_logprobs is not None:
            prompt_logprobs = [None, *(_named(prompt_logprobs[1:], self.tokenizer) or [])]
        return RequestOutput(
            request_id=self.name,
            prompt=self.prompt,
            prompt_token_ids=list(self.ids),
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            metrics=_merged([text.request.metrics for text in self.texts]),
        )


def _named(entries: Any, tokenizer: Tokenizer) -> list[dict[int, Logprob]] | None:
    """The same logprobs with each token's text."""
    if entries is None:
        return None
    return [
        {
            token: Logprob(e.logprob, e.rank, tokenizer.decode([token], skip_special_tokens=False))
            for token, e in row.items()
        }
        for row in entries
    ]


def _merged(parts: list[RequestMetrics]) -> RequestMetrics:
    """Metrics of a prompt over all its choices."""
    if len(parts) == 1:
        return parts[0]
    merged = RequestMetrics(arrival_time=parts[0].arrival_time, time_in_queue=parts[0].time_in_queue)
    firsts = [p.first_token_time for p in parts if p.first_token_time is not None]
    merged.first_token_time = min(firsts, default=None)
    ends = [p.finished_time for p in parts]
    merged.finished_time = None if None in ends else max(e for e in ends if e is not None)
    for part in parts:
        merged.spans += part.spans
        merged.span_emitted += part.span_emitted
        merged.passes += part.passes
        merged.drafted += part.drafted
        merged.accepted += part.accepted
        merged.emitted += part.emitted
        merged.preemptions += part.preemptions
        merged.cached_tokens += part.cached_tokens
        merged.drafted_per_position = _added(merged.drafted_per_position, part.drafted_per_position)
        merged.accepted_per_position = _added(merged.accepted_per_position, part.accepted_per_position)
    return merged


def _added(a: list[int], b: list[int]) -> list[int]:
    width = max(len(a), len(b))
    return [sum(pair) for pair in zip(a + [0] * (width - len(a)), b + [0] * (width - len(b)), strict=True)]


def _listed(messages: Any) -> list[Any]:
    """Messages, or conversations, that may come from an iterator."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(MESSAGES, param="messages")
    return list(messages)


def _token_ids(value: Any) -> list[int]:
    """A prompt given as ids."""
    whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not whole or not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise RequestError("a prompt is a string or a list of token ids", param="prompt")
    return list(value)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, a mapping or a list of ints is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError("prompts are a string, a list of token ids, or a list of either", param="prompt")
    many: Any = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]
    return many  # type: ignore[no-any-return]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if not isinstance(params, Sequence):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each")
    return list(params)
