"""A processor and an engine core in one process, stepped by hand. `LLM` runs it to the end of a call."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from saccade.engine.build import build_core
from saccade.engine.core import EngineCore, Profiles
from saccade.engine.process_tuning import collect, trim
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options, SchedulerConfig
from saccade.outputs import RequestOutput
from saccade.processor.call_arguments import PromptInput
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.generation_config import defaults_line, sampling_defaults
from saccade.processor.images import PrefetchMedia
from saccade.processor.input_processor import Processor
from saccade.processor.output import RequestOutputBuilder, completions
from saccade.processor.request_builder import child_id, with_structure
from saccade.sampling_params import SamplingParams
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent
from saccade.types.media import MediaItem
from saccade.types.prompt import Prompt

logger = logging.getLogger("saccade.engine")

Messages = Sequence[Mapping[str, Any]]


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request on its way: all outputs of one prompt."""

    request_id: str
    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[RequestOutputBuilder]
    prepare_ms: float  # what the processor took
    bill: Bill  # before it has run
    num_unfinished: int  # outputs
    n: int  # outputs that are returned
    error: RequestError | None = None

    @property
    def is_finished(self) -> bool:
        return not self.num_unfinished


class OfflineEngine:
    """Steps by hand: add requests, call `step` until none is unfinished."""

    def __init__(self, opts: Options, *, progress: bool = True) -> None:
        checkpoint = open_checkpoint(opts.model, weights=opts.load_format != "dummy", options=opts)
        opts = replace(opts, tokenizer=str(checkpoint.tokenizer_path))
        self.defaults = sampling_defaults(opts, checkpoint.generation)  # of requests without parameters
        logger.info("%s", defaults_line(self.defaults))
        self.processor = Processor(checkpoint, MediaPolicy.of(opts), _prefetching(weakref.ref(self)))
        self._build = partial(
            build_core,
            checkpoint.path,
            checkpoint.config,
            checkpoint.image_processor,
            opts,
            self.processor.largest_item(),
            progress=progress,
        )
        self._core: EngineCore | None = self._build()
        self.is_sleeping = False
        self._open: dict[str, _OpenRequest] = {}
        self._awaited: dict[
            str, tuple[_OpenRequest, RequestOutputBuilder]
        ] = {}  # by the core's id of each output
        self._requests = self.processor.request_builder(opts.seed)

    @property
    def core(self) -> EngineCore:
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps, and its memory is given back; wake it up first")
        if self._core is None:
            raise RuntimeError("the engine was closed and its memory given back; make a new one")
        return self._core

    @property
    def limits(self) -> SchedulerConfig:
        return self.core.limits

    def add_request(self, request_id: str, prompt: PromptInput, params: SamplingParams | None = None) -> None:
        """Refuses with a RequestError when the request can never run; nothing is kept of it then.

        Without parameters, the checkpoint's own hold, and the output is as long as the context allows.
        """
        self.add_with(request_id, lambda: self.processor.from_prompt(prompt), params)

    def add_chat(self, request_id: str, messages: Messages, params: SamplingParams, **how: Any) -> None:
        """The same for OpenAI-style messages, through the checkpoint's chat template."""
        self.add_with(request_id, lambda: self.processor.from_chat(messages, allow_paths=True, **how), params)

    def add_with(
        self, request_id: str, make: Callable[[], Prompt], params: SamplingParams | None, priority: int = 0
    ) -> None:
        core = self.core  # a closed engine says so before a prompt is made
        has_params = params is not None
        params = params or SamplingParams(**self.defaults)
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is already in use")
        self.processor.check_params(params)
        params = with_structure(params)
        try:
            start = time.perf_counter()
            prompt = self.processor.truncated(make(), params, self.limits.max_model_len)
            prepare_ms = (time.perf_counter() - start) * 1e3
            space = max(1, self.limits.max_model_len - len(prompt))
            max_tokens = params.max_tokens or space
            if not has_params:  # a default length is no reason to refuse a prompt
                max_tokens = min(max_tokens, space)
                params = replace(params, max_tokens=max_tokens)
            requests = self._requests.build(request_id, prompt, params, max_tokens, priority=priority)
            outputs = self.processor.output_builders(prompt, params)
            request = _OpenRequest(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=list(prompt.token_ids),
                outputs=outputs,
                prepare_ms=prepare_ms,
                bill=self.bill(prompt),
                num_unfinished=len(outputs),
                n=params.n,
            )
            with self._in_step():
                core.add_all(requests)
        except BaseException:
            core.release_if_idle()  # its images may have been prefetched
            raise
        self._open[request_id] = request
        self._awaited |= {child_id(request_id, output.index): (request, output) for output in outputs}

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A core that is interrupted ends every request: then none is open here either."""
        try:
            yield
        except BaseException:
            if not self.core.has_unfinished():
                self._open.clear()
                self._awaited.clear()
            raise

    @property
    def profiler(self) -> Profiles:
        assert self.core.profiler is not None
        return self.core.profiler

    def launch_if_full(self) -> None:
        """Start on what was added if that fills a step. For callers that want whole outputs only."""
        with self._in_step():
            self.core.launch_if_full(latency_bounded=False)

    def abort_request(self, request_id: str) -> None:
        request = self._open.get(request_id)
        if request is not None:
            self._close(request)
            with self._in_step():
                for output in request.outputs:
                    self.core.abort(child_id(request_id, output.index))

    def _close(self, request: _OpenRequest) -> None:
        del self._open[request.request_id]
        for output in request.outputs:
            del self._awaited[child_id(request.request_id, output.index)]

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def step(self) -> list[RequestOutput]:
        """One scheduler step; the outputs so far of the requests it touched."""
        touched = self._advance(RequestOutputBuilder.push, latency_bounded=True)
        return [self._output(request) for request in touched]

    def finished_after_step(self) -> list[RequestOutput]:
        """One step, for callers that want whole outputs only: unfinished requests cost nothing to report."""
        touched = self._advance(RequestOutputBuilder.add, latency_bounded=False)
        return [self._output(request) for request in touched if request.is_finished]

    def _advance(
        self, take: Callable[[RequestOutputBuilder, TokenEvent], object], *, latency_bounded: bool
    ) -> list[_OpenRequest]:
        with self._in_step():
            events = self.core.step(latency_bounded=latency_bounded)
            try:
                return self._hand_out(events, take)
            except BaseException:  # their outputs would lack tokens, or never hear of their end
                for event in events:
                    if event.request_id in self._awaited:
                        self.abort_request(self._awaited[event.request_id][0].request_id)
                raise

    def _hand_out(
        self, events: Sequence[TokenEvent], take: Callable[[RequestOutputBuilder, TokenEvent], object]
    ) -> list[_OpenRequest]:
        touched: dict[str, _OpenRequest] = {}
        finished: list[_OpenRequest] = []
        for event in events:
            if event.request_id not in self._awaited:
                continue
            request, output = self._awaited[event.request_id]
            if output.finish_reason is not None:  # by a stop string in an earlier token of this step
                output.usage = event.usage  # comes with its last event
                continue
            take(output, event)
            touched[request.request_id] = request
            if output.is_finished:
                self._end(request, output, event)
                if request.is_finished:
                    finished.append(request)
        for request in finished:
            self._close(request)
        return list(touched.values())

    def _end(self, request: _OpenRequest, output: RequestOutputBuilder, event: TokenEvent) -> None:
        request.num_unfinished -= 1
        if event.error:
            request.error = event.error.located(request.prompt.where)
        if event.finish_reason is None:  # a stop string, which only text can see
            last_event = self.core.abort(event.request_id)
            output.usage = last_event.usage if last_event else None

    def _output(self, request: _OpenRequest) -> RequestOutput:
        """Made for every stream in every step, so what does not change is made once and shared."""
        bill = request.bill
        usage = request.outputs[0].usage
        if usage is not None:
            bill = bill.settled(usage, {"prepare": request.prepare_ms})
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt.text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions(request.outputs, request.n),
            finished=request.is_finished,
            bill=bill,
            error=request.error,
            num_cached_tokens=bill.cached_tokens,
            prompt_logprobs=request.outputs[0].prompt_logprobs(request.prompt_token_ids),
        )

    def bill(self, prompt: Prompt) -> Bill:
        return self.processor.bill(prompt, self.limits.block_size, self.limits.slot_bytes)

    def sleep(self) -> None:
        """Free all memory of the device and the weights. RuntimeError while requests are open."""
        if self.has_unfinished_requests():
            raise RuntimeError(f"{len(self._open)} requests are open; let them finish or abort them first")
        self.core.close()
        self._core = None
        self.is_sleeping = True
        collect()
        trim()
        torch.cuda.empty_cache()  # nothing where there is no GPU

    def wake_up(self) -> None:
        """Build the engine again, from the checkpoint's files, with empty caches."""
        if self.is_sleeping:
            self.is_sleeping = False
            self._core = self._build()

    def close(self) -> None:
        """End what is open and free all memory. Other calls then raise; this one may be repeated."""
        self.is_sleeping = False
        core = self._core
        self._core = None
        self._open.clear()
        self._awaited.clear()
        self.processor.close()
        if core is not None:
            core.close()


def _prefetching(engine: weakref.ref[OfflineEngine]) -> PrefetchMedia:
    """Weak: in a cycle the weights would outlive the engine until a collection, and on a GPU none comes."""

    def prefetch_media(items: Sequence[MediaItem]) -> None:
        if (there := engine()) is not None:
            there.core.prefetch_media(items)

    return prefetch_media
