"""Checked chat and completion requests. Knows OpenAI's field names; builds no prompt, runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import RequestError
from saccade.processor.tools import ToolUse, tools_for_template
from saccade.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, Pooling, SamplingParams
from saccade.server.request import fields
from saccade.server.request.fields import FieldReader
from saccade.structured.structured_outputs import structured_as, structured_from, structured_of

_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_FRAME_OPTIONS = frozenset({"fps", "num_frames"})
MAX_PROMPT_LOGPROBS = 1 << 18  # values in a response: about 20 MB


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How outputs are sampled and shown, independent of the prompt."""

    model: str | None
    params: SamplingParams
    usual_max_tokens: int | None  # the checkpoint's default, when the client sets no maximum
    stream: bool
    include_usage: bool  # a last chunk with the usage at the end of a stream
    continuous_usage: bool  # also the usage so far in every chunk
    return_token_ids: bool
    shows_ids: bool  # log probabilities name tokens as token_id:5
    include_bill: bool
    cache_salt: str
    request_id: str  # becomes part of the response's id; empty: our own does
    priority: int  # among the requests of its tenant: lower values go first
    length_field: str = "max_tokens"  # the field with the maximum length, for errors
    structure_field: str = "response_format"  # the field that outputs are held to, for errors
    prompt_logprobs: int | None = None  # as asked for; to echo the prompt's, the engine may be asked for more

    def reply_id(self, own: str) -> str:
        return self.request_id or own


@dataclass(frozen=True, slots=True)
class ChatRequest:
    response_options: ResponseOptions
    messages: list[Mapping[str, Any]]
    tools: ToolUse
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool  # the last one, an assistant's, is the beginning of the answer
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any] | None
    renamed: Mapping[str, str]  # fields as errors name them: as the client named them

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Can be called once: messages hold images as text, and the request outlives its prompt."""
        messages = list(self.messages)
        self.messages.clear()
        return messages


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    response_options: ResponseOptions
    prompts: Sequence[str | Sequence[int]]  # each gets params.n outputs
    echo: bool = False  # outputs begin with their prompt
    is_prompt_only: bool = False  # and end with it: max_tokens is 0
    add_special_tokens: bool = True  # the tokenizer's own, around a prompt of text


def read_chat(body: Mapping[str, Any], reader: FieldReader) -> ChatRequest:
    values = reader.read(body, fields.CHAT)
    if "messages" not in values:
        raise RequestError("messages is missing; send a list with at least one message", param="messages")
    parallel = values.get("parallel_tool_calls", True)
    choice = values.get("tool_choice")
    tools = tools_for_template(
        values.get("tools"), choice, reader.scope, formats=reader.formats, parallel=parallel
    )
    length_field = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    structured, structure_field = _structure(values, reader.scope)
    if tools.structured:  # the schema of a required tool call has precedence
        structured = tools.structured
        structure_field = "tools"
    options = _response_options(
        values,
        reader.defaults,
        max_tokens=values.get(length_field),
        logprobs=_chat_logprobs(values),
        structured=structured,
        length_field=length_field,
        structure_field=structure_field,
    )
    kwargs, renamed = _media_kwargs(values)
    continues = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt"):
        message = (
            "continue_final_message goes on with the last message, and add_generation_prompt begins another"
        )
        raise RequestError(f"{message}; send one of them", param="continue_final_message")
    return ChatRequest(
        response_options=options,
        messages=values["messages"],
        tools=tools,
        parallel_tool_calls=parallel,
        add_generation_prompt=values.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        chat_template_kwargs=_template_kwargs(values),
        mm_processor_kwargs=kwargs,
        renamed=renamed,
    )


def _template_kwargs(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """chat_template_kwargs with what else a client says of thinking. Templates ignore unknown names."""
    kwargs = dict(values.get("chat_template_kwargs", {}))
    effort = values.get("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if "enable_thinking" in kwargs:
        kwargs.setdefault("thinking", kwargs["enable_thinking"])  # as DeepSeek calls it
    return kwargs


def _media_kwargs(values: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, str]]:
    """mm_processor_kwargs with vLLM's media_io_kwargs merged in, and which fields came from there."""
    kwargs = values.get("mm_processor_kwargs", {})
    media_io = dict(values.get("media_io_kwargs", {}))
    frames = media_io.pop("video", None) or {}
    if media_io or not isinstance(frames, dict) or not _FRAME_OPTIONS.issuperset(frames):
        message = 'media_io_kwargs takes fps or num_frames under video, such as {"video": {"num_frames": 8}}'
        raise RequestError(message, code="unsupported", param="media_io_kwargs")
    merged = [name for name in frames if name not in kwargs]
    renamed = {f"mm_processor_kwargs.{name}": f"media_io_kwargs.video.{name}" for name in merged}
    if frames and not kwargs:
        renamed["mm_processor_kwargs"] = "media_io_kwargs"
    return {**frames, **kwargs} or None, renamed


def read_completion(body: Mapping[str, Any], reader: FieldReader, max_prompts: int) -> CompletionRequest:
    values = reader.read(body, fields.COMPLETION)
    prompts = prompts_of(values.get("prompt"))
    if len(prompts) > max_prompts:
        message = f"{len(prompts)} prompts were given and at most {max_prompts} may be"
        raise RequestError(message, param="prompt")
    echo = values.get("echo", False)
    # OpenAI's default for completions is 16 tokens; chats have none.
    max_tokens = values.get("max_tokens", None if "max_tokens" in reader.defaults else 16)
    is_prompt_only = echo and max_tokens == 0
    structured, structure_field = _structure(values, reader.scope)
    options = _response_options(
        values,
        reader.defaults,
        max_tokens=1 if is_prompt_only else max_tokens,
        logprobs=values.get("logprobs"),
        structured=structured,
        length_field="max_tokens",
        structure_field=structure_field,
    )
    if echo:
        options = _echoing(options, is_prompt_only)
    add_special_tokens = values.get("add_special_tokens", True)
    return CompletionRequest(options, prompts, echo, is_prompt_only, add_special_tokens)


def _echoing(options: ResponseOptions, is_prompt_only: bool) -> ResponseOptions:
    """Outputs begin with their prompt: log probabilities are then the prompt's, too."""
    params = options.params
    if options.stream and is_prompt_only:
        raise RequestError("max_tokens 0 generates nothing to stream; set stream to false", param="stream")
    if params.logprobs is None:
        return options
    if options.stream and params.n > 1:
        message = f"a stream that echoes prompts with logprobs has one output for each, but n is {params.n}"
        raise RequestError(f"{message}; set stream to false", code="unsupported", param="n")
    count = max(params.logprobs, params.num_prompt_logprobs)
    return replace(options, params=replace(params, prompt_logprobs=count))


def pooling_options(values: Mapping[str, Any], pooling: Pooling) -> ResponseOptions:
    """The options of a request that ends with its prompt."""
    options = _response_options(
        values, {}, max_tokens=1, logprobs=None, structured=None, length_field="max_tokens"
    )
    return replace(options, params=replace(options.params, temperature=0, pooling=pooling))


def prompts_of(prompt: Any, param: str = "prompt") -> list[str | Sequence[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if _are_tokens(prompt):
        return [prompt]
    entries = prompt if isinstance(prompt, list) else []
    for fits in (_is_text, _are_tokens):
        if entries and all(map(fits, entries)):
            return list(entries)
    message = f"{param} must be a string, a list of strings, or token ids; it may not be empty"
    raise RequestError(message, param=param)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_tokens(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 2**63 for token in value)


def _response_options(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: str | None,
    length_field: str,
    structure_field: str = "response_format",
) -> ResponseOptions:
    stream = values.get("stream", False)
    options = values.get("stream_options", {})
    if options and not stream:
        raise RequestError("stream_options is only for streams; set stream to true", param="stream_options")
    for name, value in options.items():
        if not isinstance(value, bool | None):
            path = f"stream_options.{name[:64]}"
            raise RequestError(f"{path} must be true or false", param=path)
    continuous = options.get("continuous_usage_stats") is True
    settings = {**defaults, **values}
    sampling = {name: settings[name] for name in fields.SAMPLING if name in settings}
    sampling["logit_bias"] = _logit_bias(settings.get("logit_bias"))
    sampling["max_tokens"] = max_tokens
    with renaming({"max_tokens": length_field}.get):
        params = SamplingParams(**sampling, logprobs=logprobs, structured=structured)
    if stream:
        _refuse_in_stream(params)
    return ResponseOptions(
        model=values.get("model"),
        params=params,
        usual_max_tokens=defaults.get("max_tokens"),
        stream=stream,
        include_usage=continuous or options.get("include_usage") is True,
        continuous_usage=continuous,
        return_token_ids=values.get("return_token_ids", False),
        shows_ids=values.get("return_tokens_as_token_ids", False),
        include_bill=values.get("include_bill", False),
        cache_salt=values.get("cache_salt", ""),
        request_id=values.get("request_id", "")[:128],
        priority=values.get("priority", 0),
        length_field=length_field,
        structure_field=structure_field,
        prompt_logprobs=params.prompt_logprobs,
    )


def _refuse_in_stream(params: SamplingParams) -> None:
    if params.picks_best:
        message = f"the best of {params.best_of} outputs are known when all have ended, and not in a stream"
        raise RequestError(f"{message}; set stream to false", code="unsupported", param="best_of")
    if params.prompt_logprobs is not None:
        message = "prompt_logprobs come with a whole answer, and not in a stream"
        raise RequestError(f"{message}; set stream to false", code="unsupported", param="prompt_logprobs")


def check_prompt_logprobs(options: ResponseOptions, prompt_tokens: int) -> None:
    """Refuse what would make a response too large. `prompt_tokens`: of all prompts."""
    params = options.params
    if params.prompt_logprobs is None:
        return
    total = prompt_tokens * params.n * (params.prompt_logprobs + 1)
    if total > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"log probabilities of {prompt_tokens} prompt tokens, {params.prompt_logprobs} alternatives to "
            f"each, in {params.n} answers are {total} values, and at most {MAX_PROMPT_LOGPROBS} are sent; "
            "ask for fewer alternatives, or send less",
            param="logprobs" if options.prompt_logprobs is None else "prompt_logprobs",
        )


@contextmanager
def renaming(client_name: Callable[[str], str | None]) -> Iterator[None]:
    """RequestErrors that leave this context name fields as the client did. None keeps a name."""
    try:
        yield
    except RequestError as error:
        if error.param is None or (name := client_name(error.param)) is None:
            raise
        raise error.renamed(name) from None


def _structure(values: Mapping[str, Any], scope: str) -> tuple[str | None, str]:
    """What outputs follow, if anything, and the field that says so.

    It is OpenAI's response_format, vLLM's structured_outputs, or one of its older guided_ fields.
    """
    names = [name for name in ("response_format", *fields.STRUCTURED) if name in values]
    if not names:
        return None, "response_format"
    if len(names) > 1 and values.get("response_format", {}).get("type") == "text":
        names.remove("response_format")
    if len(names) > 1:
        message = f"an answer follows one structure, but {' and '.join(names)} were given; send one of them"
        raise RequestError(message, code="unsupported", param=names[1])
    name = names[0]
    if name == "response_format":
        return structured_from(values[name], scope), name
    if name == "structured_outputs":
        return structured_of(values[name], scope=scope), name
    return structured_as(name.removeprefix("guided_"), values[name], name, scope), name


def _logit_bias(biases: Mapping[str, Any] | None) -> dict[int, float] | None:
    """JSON has only string keys."""
    if not biases:
        return None
    if len(biases) > MAX_LOGIT_BIAS:
        message = f"logit_bias names {len(biases)} tokens and at most {MAX_LOGIT_BIAS} are allowed"
        raise RequestError(message, param="logit_bias")
    if not all(map(_TOKEN_ID.fullmatch, biases)):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return {int(key): value for key, value in biases.items()}


def _chat_logprobs(values: Mapping[str, Any]) -> int | None:
    top = values.get("top_logprobs", 0)
    if not values.get("logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs set to true", param="top_logprobs")
        return None
    if not 0 <= top <= MAX_LOGPROBS:
        message = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, but {top} was given"
        raise RequestError(message, param="top_logprobs")
    return int(top)
