"""The engine for asyncio: in a process of its own, with a stream of outputs for each request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from saccade.engine.ipc.client import EngineClient, EngineInfo, RequestStream
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, SchedulerConfig, options
from saccade.options.vllm.keywords import checked_call
from saccade.outputs import RequestOutput
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.generation_config import sampling_defaults
from saccade.processor.input_processor import Processor
from saccade.processor.output import RequestOutputBuilder, completions
from saccade.processor.request_builder import with_structure
from saccade.sampling_params import SamplingParams
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent
from saccade.types.prompt import Prompt
from saccade.types.request import Request

_CHAT_ARGUMENTS = ("tools", "add_generation_prompt", "chat_template_kwargs", "mm_processor_kwargs")


class AsyncLLM:
    """As `LLM`, for asyncio.

    >>> async with AsyncLLM(model="Qwen/Qwen2-VL-2B-Instruct") as llm:
    ...     async for out in llm.generate("Hello", SamplingParams(max_tokens=16), request_id="a"):
    ...         print(out.outputs[0].text)  # all so far

    The engine starts with the first request. A generator that is left early aborts its request.
    """

    def __init__(self, model: str | None = None, **fields: Any) -> None:
        opts = options(model=model, **fields)
        checkpoint = open_checkpoint(opts.model, weights=opts.load_format != "dummy", options=opts)
        opts = replace(opts, tokenizer=str(checkpoint.tokenizer_path))
        self.processor = Processor(checkpoint, MediaPolicy.of(opts))
        self.defaults = sampling_defaults(opts, checkpoint.generation)  # of requests without parameters
        largest = self.processor.largest_item()
        self._client = EngineClient(opts, checkpoint=checkpoint, largest=largest, progress=False)
        self._requests = self.processor.request_builder(opts.seed)
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._streams: dict[str, list[RequestStream]] = {}  # by request id
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Wait until the engine is warm. May be called again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._client.start())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """End the engine's process; open requests are lost."""
        if self._starting is not None:
            self._starting.cancel()
        await self._client.stop()
        self.processor.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self,
        prompt: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """The output so far, each time that there is more of it. RequestError if the request is refused."""
        checked_call(more, ())
        return self._run(partial(self.processor.from_prompt, prompt), sampling_params, request_id, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **how: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """The same for OpenAI-style messages, with the arguments of `LLM.chat`."""
        how = checked_call(how, _CHAT_ARGUMENTS)
        make = partial(self.processor.from_chat, messages, allow_paths=True, **how)
        return self._run(make, sampling_params, request_id, priority)

    async def abort(self, request_id: str) -> None:
        """Its generator ends with what there is, and the finish reason abort."""
        for stream in self._streams.get(request_id, ()):
            stream.cancel()

    async def reset_prefix_cache(self) -> bool:
        """False while requests are open."""
        return bool(await self._client.control("reset_prefix_cache"))

    async def sleep(self, level: int = 1) -> None:
        """End the engine's process until `wake_up`; open requests are lost."""
        await self._client.sleep()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._client.wake_up()

    async def is_sleeping(self) -> bool:
        return self._client.status().state == "sleeping"

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        await self._client.control("start_profile", profile_prefix)

    async def stop_profile(self) -> str:
        """The trace's file."""
        return str(await self._client.control("stop_profile"))

    async def check_health(self) -> None:
        """EngineUnavailable unless the engine is ready."""
        await self.start()
        self._client.check_ready()

    async def _run(
        self,
        make: Callable[[], Prompt],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput]:
        number = next(self._numbers)
        if request_id is None:
            request_id = f"request-{number}"
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is already in use")
        self._streams[request_id] = []
        try:
            await self.start()
            running, requests = await self._prepare(make, params, request_id, priority, number)
            streams = self._streams[request_id] = await self._client.submit(requests)
            while not running.is_read:
                if running.take(streams) and running.is_shown:
                    yield running.output()
                if not running.is_read:
                    await streams[0].news.wait()
        finally:
            for stream in self._streams.pop(request_id):
                stream.cancel()

    async def _prepare(
        self,
        make: Callable[[], Prompt],
        params: SamplingParams | None,
        request_id: str,
        priority: int,
        number: int,
    ) -> tuple[_RunningCall, list[Request]]:
        start = time.perf_counter()
        filled = with_structure(params or SamplingParams(**self.defaults))
        self.processor.check_params(filled)
        length = self._limits.max_model_len
        prompt = self.processor.truncated(await asyncio.to_thread(make), filled, length)
        prepare_ms = (time.perf_counter() - start) * 1e3
        space = max(1, length - len(prompt))
        max_tokens = filled.max_tokens or space
        if params is None:  # a default length is no reason to refuse a prompt
            max_tokens = min(max_tokens, space)
        running = _RunningCall(request_id, prompt, self._bill(prompt), prepare_ms, self.processor, filled)
        unique = f"{request_id}-{number}"  # one that was aborted may still be ending in the engine
        return running, self._requests.build(unique, prompt, filled, max_tokens, priority=priority)

    @property
    def _limits(self) -> SchedulerConfig:
        assert self._client.info is not None, "requests wait for the start"
        return self._client.info.limits

    def _bill(self, prompt: Prompt) -> Bill:
        limits = self._limits
        return self.processor.bill(prompt, limits.block_size, limits.slot_bytes)


class _RunningCall:
    """The outputs of one request."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        bill: Bill,
        prepare_ms: float,
        processor: Processor,
        params: SamplingParams,
    ) -> None:
        self._request_id = request_id
        self._text = prompt.text
        self._where = prompt.where
        self._prompt_ids = list(prompt.token_ids)
        self._bill = bill
        self._prepare_ms = prepare_ms
        self._outputs = processor.output_builders(prompt, params)
        self._reading = set(range(len(self._outputs)))
        self._n = params.n

    @property
    def is_read(self) -> bool:
        return not self._reading

    @property
    def is_shown(self) -> bool:
        """Which outputs are the best is known at the end."""
        return self.is_read or self._n == len(self._outputs)

    def take(self, streams: Sequence[RequestStream]) -> bool:
        """What the streams have now. Whether an output has changed; the error of a request that failed."""
        is_new = False
        for index in sorted(self._reading):
            for event in streams[index].take():
                is_new |= self._push(self._outputs[index], event, streams[index])
            if streams[index].is_read:
                self._reading.remove(index)
        return is_new

    def _push(self, output: RequestOutputBuilder, event: TokenEvent, stream: RequestStream) -> bool:
        if event.error is not None:
            raise event.error.located(self._where)
        was_finished = output.is_finished
        if was_finished:  # by a stop string, which the engine does not know
            output.usage = event.usage  # comes with its last event
            return event.usage is not None
        output.push(event)
        if output.is_finished:
            stream.cancel()
        return True

    def output(self) -> RequestOutput:
        usage = self._outputs[0].usage
        bill = self._bill.settled(usage, {"prepare": self._prepare_ms}) if usage else self._bill
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._text,
            prompt_token_ids=self._prompt_ids,
            outputs=completions(self._outputs, self._n),
            finished=self.is_read,
            bill=bill,
            num_cached_tokens=bill.cached_tokens,
            prompt_logprobs=self._outputs[0].prompt_logprobs(self._prompt_ids),
        )
