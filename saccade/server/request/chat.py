"""Bodies of requests as small frozen types, checked. Knows OpenAI's field names; builds no prompt, runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError
from saccade.processor.tools import ToolPlan, tools_for_template
from saccade.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from saccade.server.request import fields
from saccade.server.request.fields import FieldReader
from saccade.structured.check import check_schema, check_schema_text, structured_from


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How an answer is to be made and shown, whatever the prompt is."""

    model: str | None
    params: SamplingParams
    usual_max_tokens: int | None  # of the checkpoint, for an answer whose length nobody said
    stream: bool
    include_usage: bool  # one more chunk with the usage at the end of a stream
    continuous_usage: bool  # and the usage so far in every chunk
    skip_special_tokens: bool
    include_stop: bool  # show the stop string that ended the answer
    return_token_ids: bool
    shows_ids: bool  # in log probabilities, token_id:5 in the place of a token's text
    include_bill: bool
    cache_salt: str
    request_id: str | None  # for the answer's own id
    length_field: str = "max_tokens"  # under which the client said how long the answer may be


@dataclass(frozen=True, slots=True)
class ChatRequest:
    response_options: ResponseOptions
    messages: list[Mapping[str, Any]]
    tools: ToolPlan
    parallel_tool_calls: bool
    add_generation_prompt: bool
    chat_template_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    renamed: Mapping[str, str]  # fields as errors may call them, and as the client did

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Once. They hold pictures as text, and the request outlives the prompt that is made of them."""
        taken = list(self.messages)
        self.messages.clear()
        return taken


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    response_options: ResponseOptions
    prompts: Sequence[str | Sequence[int]]  # answered in order; each gets params.n answers


def read_chat(body: Mapping[str, Any], reader: FieldReader) -> ChatRequest:
    given = reader.read(body, fields.CHAT)
    if "messages" not in given:
        raise RequestError("messages is missing; send a list with at least one message", param="messages")
    tools = tools_for_template(given.get("tools"), given.get("tool_choice"), reader.scope)
    length_field = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    limit, logprobs = given.get(length_field), _chat_logprobs(given)
    form = _form(given, reader.scope)
    # The form of a required tool call goes before the form of the answer.
    response_options = _wanted(given, reader.defaults, limit, logprobs, tools.structured or form, length_field)
    kwargs, renamed = _media_kwargs(given)
    return ChatRequest(
        response_options=response_options,
        messages=given["messages"],
        tools=tools,
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        add_generation_prompt=given.get("add_generation_prompt", True),
        chat_template_kwargs=given.get("chat_template_kwargs"),
        mm_processor_kwargs=kwargs,
        renamed=renamed,
    )


def _media_kwargs(given: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, str]]:
    """mm_processor_kwargs with what some clients say about frames in a field of its own; and how that one is called."""
    own = given.get("mm_processor_kwargs") or {}
    other = given.get("media_io_kwargs") or {}
    frames = other.get("video") or {}
    if set(other) - {"video"} or not isinstance(frames, dict) or set(frames) - {"fps", "num_frames"}:
        raise RequestError(
            'media_io_kwargs takes fps or num_frames under video, such as {"video": {"num_frames": 8}}',
            code="unsupported",
            param="media_io_kwargs",
        )
    renamed = {f"mm_processor_kwargs.{name}": f"media_io_kwargs.video.{name}" for name in frames if name not in own}
    if frames and not own:
        renamed["mm_processor_kwargs"] = "media_io_kwargs"
    return {**frames, **own} or None, renamed


def read_completion(body: Mapping[str, Any], reader: FieldReader, max_prompts: int) -> CompletionRequest:
    given = reader.read(body, fields.COMPLETION)
    prompts = _prompts(given.get("prompt"))
    if len(prompts) > max_prompts:
        raise RequestError(f"{len(prompts)} prompts were given and at most {max_prompts} may be", param="prompt")
    if not given.get("add_special_tokens", True):
        raise _unsupported("add_special_tokens")
    # OpenAI's completions stop after 16 tokens unless they, or the checkpoint, say otherwise; chats go on.
    limit = given.get("max_tokens", None if "max_tokens" in reader.defaults else 16)
    form = _form(given, reader.scope)
    return CompletionRequest(_wanted(given, reader.defaults, limit, given.get("logprobs"), form), prompts)


def _prompts(given: Any) -> list[str | Sequence[int]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(_is_token(item) for item in given):
            return [given]
        if all(isinstance(item, str) for item in given):
            return list(given)
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in given):
            return list(given)
    raise RequestError("prompt must be a string, a list of strings, or token ids; it may not be empty", param="prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported by this server; leave it out", code="unsupported", param=name)


def _wanted(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    structured: str | None,
    length_field: str = "max_tokens",
) -> ResponseOptions:
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise _unsupported("best_of")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if options and not stream:
        raise RequestError("stream_options is only for streams; set stream to true", param="stream_options")
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            where = f"stream_options.{name[:64]}"
            raise RequestError(f"{where} must be true or false", param=where)
    continuous = bool(options.get("continuous_usage_stats"))
    return ResponseOptions(
        model=given.get("model"),
        params=_params({**defaults, **given}, max_tokens, logprobs, structured, length_field),
        usual_max_tokens=defaults.get("max_tokens"),
        stream=stream,
        include_usage=bool(options.get("include_usage")) or continuous,
        continuous_usage=continuous,
        skip_special_tokens=given.get("skip_special_tokens", True),
        include_stop=given.get("include_stop_str_in_output", False),
        return_token_ids=given.get("return_token_ids", False),
        shows_ids=given.get("return_tokens_as_token_ids", False),
        include_bill=given.get("include_bill", False),
        cache_salt=given.get("cache_salt", ""),
        request_id=given.get("request_id", "")[:128] or None,
        length_field=length_field,
    )


def _params(
    given: Mapping[str, Any], max_tokens: int | None, logprobs: int | None, structured: str | None, length_field: str
) -> SamplingParams:
    plain = {name: given[name] for name in fields.SAMPLING if name in given and name != "logit_bias"}
    bias = _bias(given.get("logit_bias"))
    with renaming({"max_tokens": length_field}):
        return SamplingParams(
            **{**plain, "max_tokens": max_tokens}, logprobs=logprobs, logit_bias=bias, structured=structured
        )


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors that leave this context name a field as the client did."""
    try:
        yield
    except RequestError as error:
        if error.param is None or error.param not in names:
            raise
        raise error.renamed(names[error.param]) from None


def _form(given: Mapping[str, Any], scope: str) -> str | None:
    """OpenAI's response_format, or vLLM's structured_outputs with a JSON schema in it, as an object or as text."""
    other = given.get("structured_outputs")
    if not other:
        return structured_from(given.get("response_format"), scope)
    if set(other) != {"json"} or "response_format" in given:
        raise RequestError(
            "structured_outputs takes a schema under json and nothing else, and not beside response_format",
            code="unsupported",
            param="structured_outputs",
        )
    schema, where = other["json"], "structured_outputs.json"
    if isinstance(schema, str):
        return check_schema_text(schema, param=where, scope=scope)
    return check_schema(schema, param=where, scope=scope)


def _bias(given: Mapping[str, Any] | None) -> dict[int, float] | None:
    """JSON has string keys only."""
    if not given:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias names {len(given)} tokens and at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    if not all(key.isascii() and key.isdigit() and len(key) < 19 for key in given):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs")
    if not given.get("logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs set to true", param="top_logprobs")
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, but {top} was given", param="top_logprobs")
    return top or 0
