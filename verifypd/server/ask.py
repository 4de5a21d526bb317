"""From a body to what the engine is asked: prompts as token ids, sampling parameters, grammar. Knows no sockets.

A field that would change the answer and is not honoured is refused by name; one that says what happens anyway passes.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verifypd.errors import RequestError
from verifypd.request import SamplingParams, check_bad_words
from verifypd.server.calls import Ask, CallError, bad, context_exceeded
from verifypd.server.formats import grammar_of
from verifypd.server.messages import GrammarSpec
from verifypd.server.schema import (
    NEUTRAL,
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    NamedTool,
    TokenizeBody,
    Tool,
)
from verifypd.server.tools import ToolFormat
from verifypd.tokenizer import ChatText, Tokenizer

SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
    *("prompt_logprobs", "speculation", "max_draft", "draft_temperature", "acceptance", "priority"),
    *("slo_ttft", "slo_tpot", "deadline_ms"),
)
USUAL_OUTPUT = 16  # tokens of a completion that does not say, as OpenAI has it
SEEDS = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server holds requests to."""

    max_model_len: int
    vocab: int
    max_output_tokens: int | None
    max_choices: int
    max_scores: int
    special_in_content: bool = False  # special tokens written in messages act as such
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling where a body says nothing, by field


@dataclass(slots=True)
class Prepared:
    """A body made ready: for the engine, and what its answer must look like."""

    ask: Ask
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None  # alternatives shown; None: none at all
    echo: list[str] | None = None  # prompt texts to repeat
    score_only: bool = False  # the one output token is not shown
    return_token_ids: bool = False
    tools: ToolFormat | None = None
    tool_names: tuple[str, ...] = ()
    one_tool_call: bool = False
    given: dict[str, Any] | None = None  # what the answer repeats of the body, in an API where it does
    format_field: str = "response_format"  # where the constraint on the output is from

    @property
    def echo_scored(self) -> bool:
        """Whether the logprobs of an answer begin with those of its prompt."""
        return self.echo is not None and self.logprobs is not None


def check_neutral(body: GenerationBody) -> None:
    """Refuse a field that is not honoured, unless it says what happens anyway."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is None or (name == "best_of" and value == (body.n or 1)):
            continue
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise bad(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")


def sampling(body: GenerationBody, limits: Limits, max_tokens: int | None, **more: Any) -> dict[str, Any]:
    """Fields of SamplingParams: what the body says, where it is not what SamplingParams has anyway."""
    fields: dict[str, Any] = {}
    defaults = SamplingParams()
    for name in SAME_NAME:
        value = understood(body, name, limits)
        if value is not None and value != getattr(defaults, name):
            fields[name] = value
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    most = limits.max_output_tokens
    if most is not None:
        if max_tokens is not None and max_tokens > most:
            raise bad(f"max_tokens={max_tokens} is more than this server allows ({most})", "max_tokens")
        max_tokens = most if max_tokens is None else max_tokens
    fields["max_tokens"] = max_tokens
    if body.return_token_origins:
        fields["token_origins"] = True
    fields |= {name: value for name, value in more.items() if value is not None}
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        wrong = next((token for token in fields.get(name) or () if token >= limits.vocab), None)
        if wrong is not None:
            raise bad(f"{name}: token id {wrong} is outside the vocabulary of {limits.vocab}", name)
    return fields


def understood(body: GenerationBody, name: str, limits: Limits) -> Any:
    """What a field says, or where it says nothing the model's own default."""
    value = getattr(body, name)
    said = value is not None and name in body.model_fields_set
    return value if said else limits.defaults.get(name, value)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items() if _is_id(token)}
    except ValueError as error:
        raise bad(f"logit_bias: {error} is not a token id", "logit_bias") from None


def _is_id(token: str) -> bool:
    if not token.isascii() or not token.isdigit():
        raise ValueError(repr(token[:20]))
    return True


def make_ask(
    body: GenerationBody,
    prompts: list[list[int]],
    fields: dict[str, Any],
    grammar: GrammarSpec | None,
    limits: Limits,
    tokenizer: Tokenizer | None,
    key: int,
    *,
    asked: int | None = None,
    param: str = "prompt",
) -> Ask:
    """The engine's part of a call; raises CallError for what could never run.

    `asked`: output tokens the body asks for by number; None: what there is room for. `param`: the field of the prompt.
    """
    try:
        params = SamplingParams(**fields)
        if len(prompts) * params.n > limits.max_choices:
            raise bad(f"{len(prompts) * params.n} choices in one call; the limit is {limits.max_choices}", "n")
        most = most_scored(prompts, params, limits)
        if params.max_tokens is None and most < limits.max_model_len:
            fields = {**fields, "max_tokens": most}
            params = replace(params, max_tokens=most)
    except RequestError as error:
        raise bad(str(error), error.param) from None
    for prompt in prompts:
        if not prompt:
            raise bad("the prompt is empty: give at least one token", "prompt")
        if len(prompt) + (asked or 1) > limits.max_model_len:
            raise context_exceeded(limits.max_model_len, len(prompt), asked or 1, param)
        check_tokens(prompt, limits, param)
    if grammar is not None and params.min_tokens:
        raise bad("min_tokens cannot hold together with a fixed output format: leave it out", "min_tokens")
    if tokenizer is None and (params.stop_strings or params.bad_words):
        raise bad("this model has no tokenizer here: use stop_token_ids", "stop")
    seeds = [SEEDS.getrandbits(63) if params.seed is None else params.seed for _ in prompts]
    words = params.bad_words or ()
    forms = sorted({form for word in words for form in (word, " " + word.lstrip())})
    encoded = (tokenizer.encode(form, add_special_tokens=False) for form in forms) if tokenizer else ()
    bad_words = [word for word in encoded if word]
    try:
        check_bad_words(bad_words, limits.vocab)
    except RequestError as error:
        raise bad(str(error), error.param) from None
    return Ask(prompts, params, seeds, key, bad_words, grammar, fields)


def most_scored(prompts: list[list[int]], params: SamplingParams, limits: Limits) -> int:
    """Output tokens of a choice whose logprobs have room in an answer; 400 for one that asks for more than there is."""
    scored = sum(map(len, prompts)) * _scores(params.prompt_logprobs)  # of the prompts; every choice repeats them
    each = len(prompts) * _scores(params.logprobs)
    asked = params.n * (scored + each * (params.max_tokens or 1))
    if asked > limits.max_scores:
        raise bad(
            f"{asked} logprobs in one answer; the limit is {limits.max_scores}. Ask for fewer top logprobs, choices or"
            " tokens, or send fewer or shorter prompts in one call",
            "logprobs" if each else "prompt_logprobs",
        )
    return (limits.max_scores // params.n - scored) // each if each else limits.max_model_len


def _scores(top: int | None) -> int:
    """Logprobs of a token with so many alternatives."""
    return 0 if top is None else 1 + top


def check_tokens(tokens: list[int], limits: Limits, param: str) -> None:
    """400 for ids there are no tokens for."""
    if tokens and max(tokens) >= limits.vocab:
        raise bad(f"token id {max(tokens)} is outside the vocabulary of {limits.vocab}", param)


def check_length(text: str, tokenizer: Tokenizer, limits: Limits, param: str) -> None:
    """400 for a text whose length alone says that it has too many tokens: it is not worth encoding."""
    least = tokenizer.fewest_tokens(text) if len(text) > limits.max_model_len else 0
    if least >= limits.max_model_len:
        raise _surely_too_long(f"there are at least {least} tokens in your {param}", limits, param)


def check_count(count: int, limits: Limits, param: str) -> None:
    """400 for more messages and tool calls than there can be tokens: they are not worth rendering."""
    if count > limits.max_model_len:
        what = f"there are {count} messages and tool calls in your {param}, of a token at least each"
        raise _surely_too_long(what, limits, param)


def _surely_too_long(what: str, limits: Limits, param: str) -> CallError:
    return bad(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, {what}."
        f" Please reduce the length of the {param}.",
        param,
        "context_length_exceeded",
    )


def token_ids(body: TokenizeBody, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """What `/tokenize` asks for. A text too long for the model is tokenised all the same: people ask to know."""
    if body.messages:
        tools = [_template_tool(tool) for tool in body.tools or ()] or None
        return render(body.messages, tokenizer, body, limits, any_length=True, tools=tools)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    return tokenizer.encode(body.prompt or "", special)


# -- completions ------------------------------------------------------------------------------------------------------


def completion(body: CompletionBody, limits: Limits, tokenizer: Tokenizer | None, key: int) -> Prepared:
    """A call of `/v1/completions`."""
    check_neutral(body)
    prompts = [_truncated(ids, body.truncate_prompt_tokens) for ids in _prompt_ids(body, limits, tokenizer)]
    usual = min(USUAL_OUTPUT, limits.max_output_tokens or USUAL_OUTPUT)
    max_tokens = usual if body.max_tokens is None else body.max_tokens
    score_only = max_tokens == 0
    if score_only and not body.echo:
        raise bad("max_tokens=0 makes sense with echo only: give at least 1", "max_tokens")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs is not None:
            raise bad(
                "prompt_logprobs: with echo, logprobs scores the prompt: leave one of them out", "prompt_logprobs"
            )
        prompt_logprobs = body.logprobs
    fields = sampling(body, limits, max(1, max_tokens), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    grammar, field = grammar_of(body)
    ask = make_ask(body, prompts, fields, grammar, limits, tokenizer, key, asked=body.max_tokens)
    prepared = _prepared(body, ask, body.logprobs)
    prepared.format_field = field
    prepared.score_only = score_only
    if body.echo:
        prepared.echo = [_text(ids, tokenizer) for ids in prompts]
    return prepared


def _prompt_ids(body: CompletionBody, limits: Limits, tokenizer: Tokenizer | None) -> list[list[int]]:
    given: Any = body.prompt
    many: list[Any] = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)
    if len(many) > limits.max_choices:
        raise bad(f"{len(many)} prompts in one call; the limit is {limits.max_choices}", "prompt")
    special = True if body.add_special_tokens is None else body.add_special_tokens
    held_to = limits if body.truncate_prompt_tokens is None else None
    return [_encode(each, tokenizer, special, held_to) if isinstance(each, str) else list(each) for each in many]


def _encode(text: str, tokenizer: Tokenizer | None, special: bool, limits: Limits | None) -> list[int]:
    if tokenizer is None:
        raise bad("this model has no tokenizer here: send the prompt as token ids", "prompt")
    if limits is not None:
        check_length(text, tokenizer, limits, "prompt")
    return tokenizer.encode(text, add_special_tokens=special)


def _truncated(ids: list[int], most: int | None) -> list[int]:
    return ids if most is None else ids[-most:]


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else ""


def _prepared(body: GenerationBody, ask: Ask, logprobs: int | None) -> Prepared:
    options = body.stream_options
    stream = bool(body.stream)
    if options is not None and not stream and (options.include_usage or options.continuous_usage_stats):
        raise bad("stream_options needs stream=true", "stream_options")
    continuous = bool(options and options.continuous_usage_stats)
    return Prepared(
        ask=ask,
        stream=stream,
        include_usage=bool(options and options.include_usage) or continuous,
        continuous_usage=continuous,
        logprobs=logprobs,
        return_token_ids=bool(body.return_token_ids),
    )


# -- chat -------------------------------------------------------------------------------------------------------------


def chat(
    body: ChatBody,
    limits: Limits,
    tokenizer: Tokenizer | None,
    tool_format: ToolFormat | None,
    key: int,
    *,
    param: str = "messages",
) -> Prepared:
    """A call of `/v1/chat/completions`. `param`: what the client calls the field of the conversation."""
    check_neutral(body)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs=true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad("max_tokens and max_completion_tokens differ: give one", "max_tokens")
    if body.max_tokens == 0:
        raise bad("max_tokens=0: give at least 1", "max_tokens")
    if tokenizer is None:
        raise bad("this model has no tokenizer here: chat needs one", "messages")
    tools, names = _tools(body, tool_format)
    any_length = body.truncate_prompt_tokens is not None
    ids = render(body.messages, tokenizer, body, limits, any_length=any_length, tools=tools, param=param)
    if body.echo:
        raise bad("echo is not supported in chat: leave it out", "echo", "unsupported_parameter")
    ids = _truncated(ids, body.truncate_prompt_tokens)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fields = sampling(body, limits, max_tokens, logprobs=logprobs)
    given, field = grammar_of(body)
    grammar = _tool_grammar(body, tool_format, given)
    if tools and tool_format is not None and "skip_special_tokens" not in fields and tool_format.special:
        fields["skip_special_tokens"] = False
    ask = make_ask(body, [ids], fields, grammar, limits, tokenizer, key, asked=max_tokens, param=param)
    prepared = _prepared(body, ask, logprobs)
    prepared.format_field = field if grammar is given else "tools"
    if names and body.tool_choice != "none":
        if body.return_token_origins:
            raise bad("return_token_origins goes with text: leave tools out", "return_token_origins")
        prepared.tools, prepared.tool_names = tool_format, names
        prepared.one_tool_call = body.parallel_tool_calls is False
    return prepared


def _tools(body: ChatBody, tool_format: ToolFormat | None) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    if not body.tools:
        if isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required":
            raise bad("tool_choice needs tools", "tool_choice")
        return None, ()
    if tool_format is None:
        raise bad("this model's chat template has no tools: leave them out", "tools", "unsupported_parameter")
    if body.tool_choice == "none":
        return None, ()
    names = tuple(tool.function.name for tool in body.tools)
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise bad(f"tool_choice names {body.tool_choice.function.name!r}, which is not among tools", "tool_choice")
    return [_template_tool(tool) for tool in body.tools], names


def _template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates know it: how its arguments are checked is not the model's business."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _tool_grammar(body: ChatBody, form: ToolFormat | None, given: GrammarSpec | None) -> GrammarSpec | None:
    """The constraint of a call that must be made, or of calls of strict functions; else the one the body gives."""
    forced = _forced_tool(body)
    strict = any(tool.function.strict for tool in body.tools or ()) and body.tool_choice != "none"
    if form is None or (forced is None and not strict):
        return given
    if given is not None:
        raise bad("tools that must be followed and an output format cannot both fix the output", "tool_choice")
    try:
        made = form.strict_grammar(body.tools or []) if forced is None else form.grammar(body.tools or [], forced)
    except RequestError as error:
        raise bad(str(error), error.param) from None
    if made is None:
        raise bad(
            "function.strict: this model does not mark its calls, so they can be followed only where tool_choice is"
            " required or names a function",
            "tools",
            "unsupported_parameter",
        )
    return made


def _forced_tool(body: ChatBody) -> str | None:
    """Which tool must be called: a name, "" for any, None for no constraint."""
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    return "" if body.tool_choice == "required" and body.tools else None


def render(
    messages: list[Message],
    tokenizer: Tokenizer,
    body: Any,
    limits: Limits,
    *,
    any_length: bool = False,
    tools: list[dict[str, Any]] | None = None,
    param: str = "messages",
) -> list[int]:
    """Token ids of a conversation through the model's template. Unless `any_length`, one too long is not encoded."""
    if not any_length:
        check_count(sum(1 + len(message.tool_calls or ()) for message in messages), limits, param)
    plain = [_plain(message) for message in messages]
    extra = dict(body.chat_template_kwargs or {})
    if taken := set(extra) & {"self", "messages", "tools", "add_generation_prompt"}:
        raise bad(f"chat_template_kwargs cannot replace {', '.join(sorted(taken))}", "chat_template_kwargs")
    mark: str | None = None  # stands where the last message ends
    generate = True if body.add_generation_prompt is None else body.add_generation_prompt
    if body.continue_final_message:
        if messages[-1].role != "assistant":
            raise bad("continue_final_message needs an assistant message at the end", "continue_final_message")
        if messages[-1].tool_calls:
            raise bad("a message with tool calls is whole: it cannot be continued", "continue_final_message")
        mark = uuid.uuid4().hex
        plain[-1]["content"] = (plain[-1]["content"] or "") + mark
        generate = False
    try:
        chat = _chat_text(tokenizer, limits.special_in_content, plain, generate, tools=tools, **extra)
        if mark is not None:
            text, found, _ = chat.text.rpartition(mark)
            if not found:
                raise bad("this model's chat template changes the last message: it cannot be continued", "messages")
            chat = replace(chat, text=text)
        if not any_length:
            check_length(chat.text, tokenizer, limits, param)
        return tokenizer.encode_chat(chat, add_special_tokens=bool(body.add_special_tokens))
    except RequestError as error:
        raise bad(str(error), error.param) from None


def _chat_text(tokenizer: Tokenizer, special_in_content: bool, /, *args: Any, **values: Any) -> ChatText:
    """A rendered conversation, in which control tokens the client wrote are text or, where that is allowed, tokens."""
    if special_in_content:
        return ChatText(tokenizer.apply_chat_template(*args, **values))
    return tokenizer.chat_text(*args, **values)


def _words(part: ContentPart) -> str:
    """What a part of a message says."""
    field = "refusal" if part.type == "refusal" else "text"
    words: str | None = getattr(part, field)
    if words is None:
        raise bad(f"content of type {part.type!r} has no {field}: give it", "messages")
    return words


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: content is one string, arguments are objects."""
    for name in ("audio", "function_call", "annotations"):
        if getattr(message, name):
            raise bad(f"{name} in a message is not supported: leave it out", "messages", "unsupported_parameter")
    content = message.content
    if isinstance(content, list):
        other = next((part.type for part in content if part.type not in ("text", "input_text", "refusal")), None)
        if other is not None:
            raise bad(
                f"content of type {other!r} is not supported: this model reads text",
                "messages",
                "unsupported_parameter",
            )
        content = "".join(map(_words, content))
    if message.refusal:
        if content:
            raise bad("a message has content or a refusal, not both: leave one out", "messages")
        content = message.refusal  # it is what the assistant said
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content if content is not None or message.tool_calls else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content  # templates of models that reason show it, or do not
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        plain["content"] = plain["content"] or ""
    return plain


def _tool_call(call: Any) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise bad("arguments of a tool call must be JSON", "messages") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}
