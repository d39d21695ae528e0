"""The way of a request, from its body to its answer. Knows no JSON of any API.

    body ─► fields ─► media ─► prompt ─► admission ─► submission ─► events ─► answer
    read_request      prepare_chat       running_chat               send_answer
                      prepare_prompts    running

`endpoint` admits the request before its body is read. Every stage waits in the turns of its client.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from saccade.errors import RequestError
from saccade.media.hashing import salt_of
from saccade.processor.dialects.parser import PLAIN, OutputFormat
from saccade.processor.input_processor import Rendered
from saccade.processor.output import RequestOutputBuilder
from saccade.sampling_params import SamplingParams
from saccade.server.accounts import Account
from saccade.server.api.events import EventShape, send_events
from saccade.server.generation import BilledPrompt, Generation
from saccade.server.http.body_check import check_chars
from saccade.server.http.request_context import Caller, Exchange
from saccade.server.request.chat import (
    ChatRequest,
    CompletionRequest,
    ResponseOptions,
    check_prompt_logprobs,
    renaming,
)
from saccade.server.request.fields import STRUCTURED
from saccade.server.request.media import ChatLimits, Link, Messages, find_links
from saccade.server.service import Service
from saccade.server.turns import Work
from saccade.types.bill import Bill
from saccade.types.prompt import Prompt
from saccade.types.request import Request, Tenant

Result = TypeVar("Result")
Reader = Callable[..., Result]

_USUAL_REQUESTS = 16  # without max_tokens, so many take a minute's tokens until they end
_SCHEMA_FIELDS = ("response_format", *STRUCTURED, "tools", "text", "output_config")


# --- body and fields ----------------------------------------------------------------------------------------


async def read_request(service: Service, reader: Reader[Result], exchange: Exchange, *args: Any) -> Result:
    """The checked request in a body."""
    return await check_request(service, reader, await service.bodies.read(exchange), exchange.caller, *args)


async def check_request(
    service: Service, reader: Reader[Result], body: dict[str, Any], caller: Caller, *args: Any
) -> Result:
    """Check a body in a thread. One JSON schema may take seconds, so schemas have turns of their own.

    Results of schema checks are cached per tenant, so that timing reveals nothing of other tenants.
    """
    if not any(body.get(name) for name in _SCHEMA_FIELDS):
        return await service.turns.in_thread(caller, reader, body, service.fields, *args)
    fields = service.fields.for_scope(_cache_tenant(service, caller))
    return await service.turns.take(Work.SCHEMA, caller, partial(reader, body, fields, *args))


# --- media and prompt ---------------------------------------------------------------------------------------


async def prepare_chat(service: Service, request: ChatRequest, exchange: Exchange) -> BilledPrompt:
    """Fetch the media, then build the prompt in a thread. Nothing is decoded, nothing runs."""
    caller = exchange.caller
    turns = service.turns
    options = request.response_options
    messages: Messages = request.take_messages()
    links = find_links(messages, _chat_limits(service))
    # Not `_salt`: a uuid gives access to bytes, so it is never shared between tenants.
    owner = salt_of(caller.tenant, options.cache_salt)
    began = time.perf_counter()
    files = await service.media.fetch(links, exchange.lease.add, caller.client, caller.tenant)
    caller.record.mark_fetch(began, is_empty=not files)
    messages = await turns.in_thread(caller, service.media.resolved, messages, links, files, owner)
    rendered = await _render(service, request, messages, links, caller)
    build = partial(
        service.processor.from_rendered,
        rendered,
        mm_processor_kwargs=request.mm_processor_kwargs,
        salt=_salt(service, caller, options),
    )
    with renaming(request.renamed.get):
        prompt = await turns.in_thread(caller, lambda: _truncated(service, build(), options))
    service.media.remember(links, messages, owner)
    _count_mistyped(service, links, prompt)
    caller.record.mark("prepared")
    return _with_bill(service, prompt)


def _chat_limits(service: Service) -> ChatLimits:
    processor = service.processor
    images = processor.policy.limits.get("image", 0) if processor.takes_images else None
    videos = processor.videos.max_per_prompt if processor.videos else None
    return ChatLimits(service.server.max_parts, images, videos)


async def _render(
    service: Service, request: ChatRequest, messages: Messages, links: Sequence[Link], caller: Caller
) -> Rendered:
    """The chat through its template, with pages in place of documents."""
    processor = service.processor
    if any(link.kind == "file" for link in links):
        open_documents = partial(processor.open_documents, messages)
        messages = await service.turns.take(Work.DOCUMENT, caller, open_documents)
    render = partial(
        processor.render,
        messages,
        tools=request.tools.for_template,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return await service.turns.take(Work.TEMPLATE, caller, render)


def _count_mistyped(service: Service, links: Sequence[Link], prompt: Prompt) -> None:
    if len(links) != len(prompt.items):
        return  # links and items do not correspond
    for link, item in zip(links, prompt.items, strict=True):
        if link.claimed_format not in (None, item.header.format):
            service.metrics.media_mistyped(1)


async def prepare_prompts(service: Service, request: CompletionRequest, caller: Caller) -> list[BilledPrompt]:
    """Prompts of text or token ids, without a chat template."""
    salt = _salt(service, caller, request.response_options)
    for text in request.prompts:
        if isinstance(text, str):
            check_chars(len(text), service.max_chars, "prompt")
        else:
            check_ids(service, len(text), "prompt")
    build = partial(_build_prompt, service, request, salt)
    prompts = [await service.turns.in_thread(caller, build, text) for text in request.prompts]
    caller.record.mark("prepared")
    return [_with_bill(service, prompt) for prompt in prompts]


def check_ids(service: Service, count: int, param: str) -> None:
    if count > service.limits.max_model_len:
        limit = f"the context has {service.limits.max_model_len}; send fewer or raise --max-model-len"
        message = f"{count} token ids were given, and {limit}"
        raise RequestError(message, code="context_length_exceeded", param=param)


def _build_prompt(
    service: Service, request: CompletionRequest, salt: bytes, text: str | Sequence[int]
) -> Prompt:
    if isinstance(text, str) and not request.add_special_tokens:
        text = service.processor.tokenizer.encode_text(text)
    key = "prompt" if isinstance(text, str) else "prompt_token_ids"
    try:
        prompt = service.processor.from_prompt({key: text}, salt=salt)
        return _truncated(service, prompt, request.response_options)
    except RequestError as error:
        raise RequestError(error.message, code=error.code, param="prompt") from None


def _truncated(service: Service, prompt: Prompt, options: ResponseOptions) -> Prompt:
    return service.processor.truncated(prompt, options.params, service.limits.max_model_len)


def _with_bill(service: Service, prompt: Prompt) -> BilledPrompt:
    limits = service.limits
    return BilledPrompt(prompt, service.processor.bill(prompt, limits.block_size, limits.slot_bytes))


def _salt(service: Service, caller: Caller, options: ResponseOptions) -> bytes:
    """The salt of a request's content keys: other salts find nothing of it in the caches."""
    return salt_of(_cache_tenant(service, caller), options.cache_salt)


def _cache_tenant(service: Service, caller: Caller) -> str:
    """The tenant in whose caches the caller's requests are."""
    return "" if service.server.share_caches else caller.tenant


# --- admission and submission -------------------------------------------------------------------------------


@asynccontextmanager
async def running_chat(
    service: Service, request: ChatRequest, exchange: Exchange
) -> AsyncIterator[Generation]:
    """The running outputs of a chat of any API."""
    options = request.response_options
    service.check_model(options.model)
    exchange.lease.enter(options.params.num_outputs)
    prompts = [await prepare_chat(service, request, exchange)]
    output_format = service.formats.after(prompts[0].prompt.text or "")
    markers = output_format.shown_markers(finds_calls=request.tools.calls)
    async with running(service, prompts, options, exchange, output_format, markers) as generation:
        exchange.lease.release()
        yield generation


@asynccontextmanager
async def running(
    service: Service,
    prompts: list[BilledPrompt],
    options: ResponseOptions,
    exchange: Exchange,
    output_format: OutputFormat = PLAIN,
    shown_markers: Sequence[str] = (),
) -> AsyncIterator[Generation]:
    """The running outputs of prompts. Leaving the context cancels what still runs.

    Empties `prompts`: the engine has their images by then and counts their bytes.
    """
    params = options.params
    service.processor.check_params(params)
    check_prompt_logprobs(options, sum(len(prompt) for prompt, _ in prompts))
    tokenizer = service.processor.tokenizer
    marker_ids = (tokenizer.token_id(marker) for marker in shown_markers)
    shown_ids = frozenset(token_id for token_id in marker_ids if token_id is not None)
    count = len(prompts) * params.num_outputs
    outputs = [RequestOutputBuilder(index, tokenizer, params, shown_ids) for index in range(count)]
    record = exchange.caller.record
    with Generation(prompts, outputs, record, service.metrics, output_format) as generation:
        await _submit(service, generation, prompts, options, exchange)
        prompts.clear()
        with renaming({"response_format": options.structure_field}.get):
            yield generation


async def _submit(
    service: Service,
    generation: Generation,
    prompts: Sequence[BilledPrompt],
    options: ResponseOptions,
    exchange: Exchange,
) -> None:
    """Submit one request per output. RequestError with the bill if a prompt does not fit the context.

    Before that the tenant is charged; ApiError if its limits do not allow the request.
    """
    caller = exchange.caller
    account = caller.account
    unique = f"{caller.request_id}-{next(service.request_numbers)}"  # clients may send the same id twice
    requests: list[Request] = []
    tenant = Tenant(caller.client, account.settings.weight, account.settings.label)
    lengths = [_max_tokens(service, prompt, bill, options) for prompt, bill in prompts]
    generation.hold_pixels(exchange.lease)
    generation.charge(account, _reserved_tokens(lengths, options.params, account))
    for (prompt, _), max_tokens in zip(prompts, lengths, strict=True):
        requests += service.requests.build(
            unique,
            prompt,
            options.params,
            max_tokens,
            first=len(requests),
            tenant=tenant,
            priority=options.priority,
            thinking=generation.output_format.thinking,
        )
    await generation.submit(service.engine, requests)


def _max_tokens(service: Service, prompt: Prompt, bill: Bill, options: ResponseOptions) -> int:
    """The client's; otherwise the checkpoint's default or all, within what is left of the context."""
    context = service.limits.max_model_len
    pools = options.params.pooling is not None
    room = context - len(prompt) + pools  # nothing is generated
    max_tokens = options.params.max_tokens
    if room < (max_tokens or 1):
        field = options.length_field
        param = "messages" if bill.items else None
        size = f"the prompt has {len(prompt)} tokens{_itemised(bill)}"
        output = f" and {field} is {max_tokens}" if max_tokens and not pools else ""
        limited = "it" if pools else "prompt and answer together"
        advice = "send less, smaller pictures, or raise --max-model-len"
        message = f"{size}{output}, but {limited} may have {context}; {advice}"
        raise RequestError(message, code="context_length_exceeded", param=field if room > 0 else param)
    return max_tokens or min(filter(None, (room, options.usual_max_tokens)))


def _itemised(bill: Bill) -> str:
    if not bill.items:
        return ""
    items = ", ".join(f"{item.width}x{item.height} = {item.tokens}" for item in bill.items[:8])
    more = f" and {len(bill.items) - 8} more" if len(bill.items) > 8 else ""
    videos = f", {bill.video_tokens} of videos" if bill.video_tokens else ""
    return f" ({bill.text_tokens} of text, {bill.image_tokens} of pictures{videos}: {items}{more})"


def _reserved_tokens(lengths: Sequence[int], params: SamplingParams, account: Account) -> int:
    """What the outputs are charged in advance. Without max_tokens a whole context would be far too much."""
    limit = account.limits.tokens_per_minute
    tokens = params.num_outputs * sum(lengths)
    if limit is None or params.max_tokens is not None:
        return tokens
    return min(tokens, max(1, limit // _USUAL_REQUESTS))


# --- events and answer --------------------------------------------------------------------------------------


async def send_answer(
    service: Service, exchange: Exchange, generation: Generation, shape: EventShape, *, stream: bool
) -> None:
    in_thread = partial(service.turns.in_thread, exchange.caller)
    await send_events(exchange.writer, generation, shape, in_thread, stream=stream)
