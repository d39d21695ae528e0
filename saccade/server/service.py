"""What the routes share: checked requests become prompts with a bill, prompts become running generations.

Owns the turns of clients, the admission gate and the cache of media uuids. Knows no JSON of any API.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from saccade.costs import max_chars
from saccade.engine.encoders.encoder_set import EncoderView
from saccade.engine.ipc.client import EngineInfo, EngineStatus, EngineUnavailable, ReplicaView
from saccade.engine.ipc.messages import ControlAction
from saccade.errors import ConfigError, RequestError, quoted
from saccade.helpers.free_memory import free_ram
from saccade.media.fetch import Fetcher
from saccade.media.hashing import salt_of
from saccade.options.engine import Options, SchedulerConfig
from saccade.options.server import ServerOptions
from saccade.processor.checkpoint_files import BUILTIN_NAME
from saccade.processor.dialects.parser import PLAIN, OutputFormat, OutputFormats, output_formats
from saccade.processor.generation_config import sampling_defaults
from saccade.processor.input_processor import Processor
from saccade.processor.output import RequestOutputBuilder
from saccade.sampling_params import SamplingParams
from saccade.server.accounts import Account
from saccade.server.batch_jobs import BatchJobs
from saccade.server.bodies import BodyReader
from saccade.server.generation import BilledPrompt, Generation, SubmitsRequests, Timing
from saccade.server.http.auth import Tenants
from saccade.server.http.body_check import check_chars
from saccade.server.http.connections import Connections, connection_limit
from saccade.server.http.limits import AdmissionGate
from saccade.server.http.request_context import Caller, Exchange
from saccade.server.metrics import Metrics
from saccade.server.request.chat import (
    ChatRequest,
    CompletionRequest,
    ResponseOptions,
    check_prompt_logprobs,
    renaming,
)
from saccade.server.request.fields import STRUCTURED, FieldReader
from saccade.server.request.media import ChatLimits, Link, MediaResolver, Messages, find_links
from saccade.server.request.media_files import StoredFiles
from saccade.server.request.media_uuids import UuidCache
from saccade.server.tracing import traces_to
from saccade.server.turns import Turns, Work
from saccade.structured.schema_validation import CHECKS
from saccade.types.bill import Bill
from saccade.types.prompt import Prompt
from saccade.types.request import Request, Tenant

logger = logging.getLogger("saccade.server")

DEFAULT_MAX_WAITING = 256
_RETRY_AFTER_START = 5.0
_USUAL_REQUESTS = 16  # without max_tokens, so many take a minute's tokens until they end
_SCHEMA_FIELDS = ("response_format", *STRUCTURED, "tools", "text", "output_config")

Result = TypeVar("Result")
Reader = Callable[..., Result]


class Engine(SubmitsRequests, Protocol):
    """What the server needs of an engine: a client of one, or a set of replicas."""

    async def start(self) -> EngineInfo: ...

    async def stop(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def control(self, action: ControlAction, prefix: str | None = None) -> str | bool | None: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def bytes_in_flight(self) -> int: ...

    def status(self) -> EngineStatus: ...

    def stats(self) -> dict[str, Any]: ...

    def replicas(self) -> Sequence[ReplicaView]: ...


class Service:
    def __init__(
        self,
        options: Options,
        server: ServerOptions,
        processor: Processor,
        engine: Engine,
        fetcher: Fetcher,
        encoders: Callable[[], Sequence[EncoderView]] = tuple,
    ) -> None:
        """`encoders` returns the state of each encoder worker."""
        self.options = options
        self.encoders = encoders
        self.server = server
        self.processor = processor
        self.engine = engine
        self.names = server.served_model_name or (_name_of(options.model),)
        self.tenants = Tenants(server)
        self.traces = traces_to(server.otlp_traces_endpoint, self.names[0])
        self.metrics = Metrics(
            self.names[0],
            engine.stats,
            replicas=engine.replicas,
            encoders=encoders,
            status=engine.status,
            bytes_in_flight=lambda: self.gate.total_bytes(),
        )
        self.gate = _admission_gate(options, server, engine, self.metrics)
        self.turns = Turns(server, self.gate.max_open, self.metrics)
        self.batches: BatchJobs | None = None
        if server.batch_dir is not None:
            self.batches = BatchJobs(
                server, self.tenants, self.gate, lambda: self.max_chars, self.turns.charge
            )
        maximum = connection_limit(server.max_connections)
        self.connections = Connections(maximum, server.max_client_share, on_refusal=self.metrics.refused)
        self.defaults = sampling_defaults(options, processor.checkpoint.generation)
        self._formats = _output_formats(server, processor)
        self.fields = FieldReader(strict=server.strict_params, defaults=self.defaults, formats=self._formats)
        self.created = int(time.time())
        self.began = time.monotonic()
        self._fetcher = fetcher
        files = StoredFiles(self.batches, processor.policy)
        uuids = UuidCache(server.uuid_cache_mb << 20)
        self._media = MediaResolver(fetcher, uuids, files, processor.policy, self.metrics)
        self._bodies = BodyReader(self.turns, server.max_body_mb)
        self._requests = processor.request_builder(options.seed)
        self._request_numbers = itertools.count()

    @property
    def limits(self) -> SchedulerConfig:
        """The engine's limits. EngineUnavailable before its first start."""
        self._check_started()
        assert self.engine.info is not None
        return self.engine.info.limits

    def _check_started(self) -> None:
        if self.engine.info is None:
            message = f"the engine is {self.engine.status().state}; try again later"
            raise EngineUnavailable(message, _RETRY_AFTER_START)

    @property
    def max_chars(self) -> int:
        return max_chars(self.limits.max_model_len)

    def check_ids(self, count: int, param: str) -> None:
        if count > self.limits.max_model_len:
            limit = f"the context has {self.limits.max_model_len}; send fewer or raise --max-model-len"
            message = f"{count} token ids were given, and {limit}"
            raise RequestError(message, code="context_length_exceeded", param=param)

    def check_open(self, caller: Caller) -> None:
        """Counts a new request. ApiError or EngineUnavailable if it is refused without reading its body."""
        self.gate.check(caller.client, caller.account.settings.weight)
        self._check_started()
        caller.account.check_open()
        caller.account.check_processor()
        caller.account.take(requests=1)
        self.metrics.tenants.arrived(caller.account.settings.label)

    async def decode(self, exchange: Exchange) -> dict[str, Any]:
        """The body as a JSON object. RequestError if its text cannot fit the context."""
        return await self._bodies.read(exchange)

    async def read(self, reader: Reader[Result], exchange: Exchange, *args: Any) -> Result:
        """The checked request in a body."""
        return await self.check(reader, await self.decode(exchange), exchange.caller, *args)

    async def check(self, reader: Reader[Result], body: dict[str, Any], caller: Caller, *args: Any) -> Result:
        """Check a body in a thread. One JSON schema may take seconds, so schemas have turns of their own.

        Results of schema checks are cached per tenant, so that timing reveals nothing of other tenants.
        """
        if not any(body.get(name) for name in _SCHEMA_FIELDS):
            return await self.in_thread(caller, reader, body, self.fields, *args)
        scoped = self.fields.for_scope(self._tenant(caller))
        return await self.turns.take(Work.SCHEMA, caller, partial(reader, body, scoped, *args))

    async def in_thread(self, caller: Caller, work: Callable[..., Result], *args: Any) -> Result:
        """For work of a millisecond or more: on the event loop it would delay the tokens of all streams."""
        return await self.turns.take(Work.PROMPT, caller, partial(work, *args))

    def serves(self, name: str) -> bool:
        """The path of a model folder is accepted too, but never shown."""
        return name in self.names or (name == self.options.model and not self.server.served_model_name)

    def check_model(self, name: str | None) -> None:
        if name is not None and not self.serves(name):
            names = ", ".join(self.names)
            message = f"the model {quoted(name, 200)} is not served here; this server has {names}"
            raise RequestError(message, code="model_not_found", param="model")

    async def close(self) -> None:
        if self.batches is not None:
            await self.batches.close()
            self.batches.disk.close()
        await self._fetcher.close()
        self.processor.close()
        self.turns.close()
        self._bodies.close()
        CHECKS.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    async def warm(self) -> None:
        """Starts a template process before the first chat. Logs what is wrong with the template."""
        if self.processor.checkpoint.chat_template is None:
            return
        try:
            await self.turns.take_own(self.processor.form)
        except (ConfigError, RequestError) as error:
            logger.warning("the chat template does not work: %s", error)

    async def prepare_chat(self, request: ChatRequest, exchange: Exchange) -> tuple[BilledPrompt, Timing]:
        """Fetch the media, then build the prompt in a thread. Nothing is decoded, nothing runs."""
        caller = exchange.caller
        images = self.processor.policy.limits.get("image", 0) if self.processor.takes_images else None
        videos = self.processor.videos.max_per_prompt if self.processor.videos else None
        messages: Messages = request.take_messages()
        links = find_links(messages, ChatLimits(self.server.max_parts, images, videos))
        start = time.perf_counter()
        fetched = await self._media.fetch(links, exchange.lease.add, caller.client, caller.tenant)
        fetch_ms = (time.perf_counter() - start) * 1e3
        caller.record.fetch_began = start
        caller.record.fetch_ended = time.perf_counter() if fetched else 0.0
        # Not `self.salt`: a uuid gives access to bytes, so it is never shared between tenants.
        owner = salt_of(caller.tenant, request.response_options.cache_salt)
        resolved = messages = await self.in_thread(
            caller, self._media.resolved, messages, links, fetched, owner
        )
        if any(link.kind == "file" for link in links):
            opened = partial(self.processor.open_documents, messages)
            messages = await self.turns.take(Work.DOCUMENT, caller, opened)
        render = partial(
            self.processor.render,
            messages,
            tools=request.tools.for_template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        rendered = await self.turns.take(Work.TEMPLATE, caller, render)
        build = partial(
            self.processor.from_rendered,
            rendered,
            mm_processor_kwargs=request.mm_processor_kwargs,
            salt=self.salt(caller, request.response_options),
        )
        with renaming(request.renamed.get):
            prompt = await self.in_thread(caller, lambda: self._truncated(build(), request.response_options))
        self._media.remember(links, resolved, owner)
        self._count_mistyped(links, prompt)
        timing = Timing(caller.arrived, (time.perf_counter() - caller.arrived) * 1e3, fetch_ms, caller.record)
        return self._with_bill(prompt), timing

    def salt(self, caller: Caller, response_options: ResponseOptions) -> bytes:
        """The salt of a request's content keys: other salts find nothing of it in the caches."""
        return salt_of(self._tenant(caller), response_options.cache_salt)

    def _tenant(self, caller: Caller) -> str:
        """The tenant in whose caches the caller's requests are."""
        return "" if self.server.share_caches else caller.tenant

    def _count_mistyped(self, links: Sequence[Link], prompt: Prompt) -> None:
        if len(links) != len(prompt.items):
            return  # links and items do not correspond
        for link, item in zip(links, prompt.items, strict=True):
            if link.claimed_format not in (None, item.header.format):
                self.metrics.media_mistyped(1)

    def _truncated(self, prompt: Prompt, response_options: ResponseOptions) -> Prompt:
        return self.processor.truncated(prompt, response_options.params, self.limits.max_model_len)

    async def prepare_prompts(
        self, request: CompletionRequest, caller: Caller
    ) -> tuple[list[BilledPrompt], Timing]:
        """Prompts of text or token ids, without a chat template."""
        salt = self.salt(caller, request.response_options)
        for prompt in request.prompts:
            if isinstance(prompt, str):
                check_chars(len(prompt), self.max_chars, "prompt")
            else:
                self.check_ids(len(prompt), "prompt")
        build = partial(self._build_prompt, request, salt)
        built = [await self.in_thread(caller, build, prompt) for prompt in request.prompts]
        timing = Timing(caller.arrived, (time.perf_counter() - caller.arrived) * 1e3, 0.0, caller.record)
        return [self._with_bill(prompt) for prompt in built], timing

    def _build_prompt(self, request: CompletionRequest, salt: bytes, prompt: str | Sequence[int]) -> Prompt:
        if isinstance(prompt, str) and not request.add_special_tokens:
            prompt = self.processor.tokenizer.encode_text(prompt)
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        try:
            built = self.processor.from_prompt({key: prompt}, salt=salt)
            return self._truncated(built, request.response_options)
        except RequestError as error:
            raise RequestError(error.message, code=error.code, param="prompt") from None

    def _with_bill(self, prompt: Prompt) -> BilledPrompt:
        bill = self.processor.bill(prompt, self.limits.block_size, self.limits.slot_bytes)
        return BilledPrompt(prompt, bill)

    @asynccontextmanager
    async def generating(self, request: ChatRequest, exchange: Exchange) -> AsyncIterator[Generation]:
        """Admits and submits a chat of any API. Leaving the context cancels what still runs."""
        response_options = request.response_options
        self.check_model(response_options.model)
        exchange.lease.enter(response_options.params.num_outputs)
        billed, timing = await self.prepare_chat(request, exchange)
        output_format = self._formats.after(billed.prompt.text or "")
        shown = output_format.shown_markers(finds_calls=request.tools.calls)
        with self.generation([billed], response_options, timing, output_format, shown) as generation:
            await self.start(generation, [billed], response_options, exchange)
            del billed  # the engine has the images now and counts their bytes
            exchange.lease.release()
            with renaming({"response_format": response_options.structure_field}.get):
                yield generation

    def generation(
        self,
        prompts: Sequence[BilledPrompt],
        response_options: ResponseOptions,
        timing: Timing,
        output_format: OutputFormat = PLAIN,
        shown_markers: Sequence[str] = (),
    ) -> Generation:
        params = response_options.params
        self.processor.check_params(params)
        check_prompt_logprobs(response_options, sum(len(billed.prompt) for billed in prompts))
        count = len(prompts) * params.num_outputs
        tokenizer = self.processor.tokenizer
        shown_ids = frozenset(i for marker in shown_markers if (i := tokenizer.token_id(marker)) is not None)
        outputs = [RequestOutputBuilder(index, tokenizer, params, shown_ids) for index in range(count)]
        return Generation(prompts, outputs, timing, self.metrics, output_format)

    async def start(
        self,
        generation: Generation,
        prompts: Sequence[BilledPrompt],
        response_options: ResponseOptions,
        exchange: Exchange,
    ) -> None:
        """Submit one request per output. RequestError with the bill if a prompt does not fit the context.

        Before that the tenant is charged; ApiError if its limits do not allow the request.
        """
        caller = exchange.caller
        unique = f"{caller.request_id}-{next(self._request_numbers)}"  # clients may send the same id twice
        params = response_options.params
        requests: list[Request] = []
        tenant = Tenant(caller.client, caller.account.settings.weight, caller.account.settings.label)
        lengths = [self.max_tokens(billed, response_options) for billed in prompts]
        generation.hold_pixels(exchange.lease)
        generation.charge(caller.account, _reserved_tokens(lengths, params, caller.account))
        for billed, max_tokens in zip(prompts, lengths, strict=True):
            requests += self._requests.build(
                unique,
                billed.prompt,
                params,
                max_tokens,
                first=len(requests),
                tenant=tenant,
                priority=response_options.priority,
                thinking=generation.output_format.thinking,
            )
        await generation.submit(self.engine, requests)

    def max_tokens(self, billed: BilledPrompt, response_options: ResponseOptions) -> int:
        """As asked; otherwise the checkpoint's default or all, within what is left of the context."""
        pools = response_options.params.pooling is not None
        left = self.limits.max_model_len - len(billed.prompt) + pools  # nothing is generated
        asked = response_options.params.max_tokens
        field = response_options.length_field
        if left < (asked or 1):
            param = "messages" if billed.bill.items else None
            prompt = f"the prompt has {len(billed.prompt)} tokens{_itemised(billed.bill)}"
            output = f" and {field} is {asked}" if asked and not pools else ""
            limited = "it" if pools else "prompt and answer together"
            limit = f"{limited} may have {self.limits.max_model_len}"
            message = f"{prompt}{output}, but {limit}; send less, smaller pictures, or raise --max-model-len"
            raise RequestError(message, code="context_length_exceeded", param=field if left > 0 else param)
        return asked or min(left, response_options.usual_max_tokens or left)


def _reserved_tokens(lengths: Sequence[int], params: SamplingParams, account: Account) -> int:
    """What the outputs are charged in advance. Without max_tokens a whole context would be far too much."""
    limit = account.limits.tokens_per_minute
    reserved = params.num_outputs * sum(lengths)
    if limit is not None and params.max_tokens is None:
        return min(reserved, max(1, limit // _USUAL_REQUESTS))
    return reserved


def _output_formats(server: ServerOptions, processor: Processor) -> OutputFormats:
    return output_formats(
        processor.checkpoint.chat_template,
        processor.tokenizer.token_id,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
    )


def _name_of(model: str | None) -> str:
    """A hub id as it is; of a folder only its name, because clients need not know its path."""
    if model is None:
        return BUILTIN_NAME
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    return folder.resolve().name or "model"


def _admission_gate(
    options: Options, server: ServerOptions, engine: Engine, metrics: Metrics
) -> AdmissionGate:
    max_bytes = server.max_inflight_bytes(free_ram())
    return AdmissionGate(
        _max_open(options) * server.replica_range[1],
        max_bytes,
        # One body of the maximum size must always fit.
        max(int(max_bytes * server.max_client_share), server.max_body_mb << 20),
        engine_bytes=lambda: engine.bytes_in_flight,
        on_refusal=metrics.refused,
        max_client_pixels=server.max_waiting_megapixels * 10**6,
    )


def _max_open(options: Options) -> int:
    """Requests that one engine runs or lets wait."""
    waiting = DEFAULT_MAX_WAITING if options.max_waiting is None else options.max_waiting
    return options.max_num_seqs + waiting


def _itemised(bill: Bill) -> str:
    if not bill.items:
        return ""
    shown = ", ".join(f"{item.width}x{item.height} = {item.tokens}" for item in bill.items[:8])
    more = f" and {len(bill.items) - 8} more" if len(bill.items) > 8 else ""
    videos = f", {bill.video_tokens} of videos" if bill.video_tokens else ""
    return f" ({bill.text_tokens} of text, {bill.image_tokens} of pictures{videos}: {shown}{more})"
