"""The offline face: a processor and an engine core in one process, without a server."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

from saccade.engine.build import build_core
from saccade.engine.core import EngineCore, Profiles
from saccade.engine.process_tuning import collect, trim
from saccade.errors import RequestError, quoted
from saccade.options.engine import MediaPolicy, Options, SchedulerConfig, options
from saccade.options.vllm.keywords import checked_call
from saccade.outputs import BeamSearchOutput, RequestOutput
from saccade.processor.beam_search import best_sequences
from saccade.processor.call_arguments import ManyParams, PromptInput, priorities_of, spread, with_kwargs
from saccade.processor.chat_tokenizer import ChatTokenizer
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.generation_config import defaults_line, sampling_defaults
from saccade.processor.images import PrefetchMedia
from saccade.processor.input_processor import Processor
from saccade.processor.output import RequestOutputBuilder, completions
from saccade.processor.pooled_calls import Embeddings, Run, Scores, embeddings, scores
from saccade.processor.pooling import Side
from saccade.processor.request_builder import child_id, with_structure
from saccade.sampling_params import BeamSearchParams, SamplingParams
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent
from saccade.types.media import MediaItem
from saccade.types.prompt import Prompt

logger = logging.getLogger("saccade.engine")

Messages = Sequence[Mapping[str, Any]]

_CHAT_ARGUMENTS = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    "mm_processor_kwargs",
)


@dataclass(eq=False, slots=True)
class _Open:
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


class Engine:
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
        self._open: dict[str, _Open] = {}
        self._awaited: dict[str, tuple[_Open, RequestOutputBuilder]] = {}  # by the core's id of each output
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
            left = max(1, self.limits.max_model_len - len(prompt))
            if not has_params:  # a default length is no reason to refuse a prompt
                params = replace(params, max_tokens=min(params.max_tokens or left, left))
            max_tokens = params.max_tokens or left
            requests = self._requests.build(request_id, prompt, params, max_tokens, priority=priority)
            outputs = self.processor.output_builders(prompt, params)
            known = (request_id, prompt, list(prompt.token_ids), outputs, prepare_ms, self.bill(prompt))
            opened = _Open(*known, len(outputs), params.n)
            with self._in_step():
                core.add_all(requests)
        except BaseException:
            core.release_if_idle()  # its images may have been prefetched
            raise
        self._open[request_id] = opened
        self._awaited |= {child_id(request_id, output.index): (opened, output) for output in outputs}

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
        opened = self._open.get(request_id)
        if opened is not None:
            self._close(opened)
            with self._in_step():
                for output in opened.outputs:
                    self.core.abort(child_id(request_id, output.index))

    def _close(self, opened: _Open) -> None:
        del self._open[opened.request_id]
        for output in opened.outputs:
            del self._awaited[child_id(opened.request_id, output.index)]

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def step(self) -> list[RequestOutput]:
        """One scheduler step; the outputs so far of the requests it touched."""
        touched = self._advance(RequestOutputBuilder.push, latency_bounded=True)
        return [self._output(opened) for opened in touched]

    def finished_after_step(self) -> list[RequestOutput]:
        """One step, for callers that want whole outputs only: unfinished requests cost nothing to report."""
        touched = self._advance(RequestOutputBuilder.add, latency_bounded=False)
        return [self._output(opened) for opened in touched if opened.is_finished]

    def _advance(
        self, take: Callable[[RequestOutputBuilder, TokenEvent], object], *, latency_bounded: bool
    ) -> list[_Open]:
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
    ) -> list[_Open]:
        touched: dict[str, _Open] = {}
        ended: list[_Open] = []
        for event in events:
            if event.request_id not in self._awaited:
                continue
            opened, output = self._awaited[event.request_id]
            if output.finish_reason is not None:  # by a stop string in an earlier token of this step
                output.usage = output.usage or event.usage
                continue
            take(output, event)
            touched[opened.request_id] = opened
            if output.is_finished:
                self._end(opened, output, event)
                if opened.is_finished:
                    ended.append(opened)
        for opened in ended:
            self._close(opened)
        return list(touched.values())

    def _end(self, opened: _Open, output: RequestOutputBuilder, event: TokenEvent) -> None:
        opened.num_unfinished -= 1
        opened.error = event.error.located(opened.prompt.where) if event.error else opened.error
        if event.finish_reason is None:  # a stop string, which only text can see
            ended = self.core.abort(event.request_id)
            output.usage = ended.usage if ended else None

    def _output(self, opened: _Open) -> RequestOutput:
        """Made for every stream in every step, so what does not change is made once and shared."""
        bill = opened.bill
        usage = opened.outputs[0].usage
        return RequestOutput(
            request_id=opened.request_id,
            prompt=opened.prompt.text,
            prompt_token_ids=opened.prompt_token_ids,
            outputs=completions(opened.outputs, opened.n),
            finished=opened.is_finished,
            bill=bill.settled(usage, {"prepare": opened.prepare_ms}) if usage else bill,
            error=opened.error,
            num_cached_tokens=usage.cached_tokens if usage else 0,
            prompt_logprobs=opened.outputs[0].prompt_logprobs(opened.prompt_token_ids),
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


def _prefetching(engine: weakref.ref[Engine]) -> PrefetchMedia:
    """Weak: in a cycle the weights would outlive the engine until a collection, and on a GPU none comes."""

    def prefetch_media(items: Sequence[MediaItem]) -> None:
        if (there := engine()) is not None:
            there.core.prefetch_media(items)

    return prefetch_media


class LLM:
    """A vision-language model to call from Python.

    >>> llm = LLM(model="Qwen/Qwen2-VL-2B-Instruct")
    >>> outs = llm.chat([{"role": "user", "content": [
    ...     {"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is this?"}]}])
    >>> print(outs[0].outputs[0].text)

    Without a model it is the small one inside the package. Every option of the command line is a keyword:
    the fields of `saccade.options.engine.Options`. `close` frees the memory, as does the end of `with`.
    """

    def __init__(self, model: str | None = None, **given: Any) -> None:
        progress = given.pop("use_tqdm", True)
        self.engine = Engine(options(model=model, **given), progress=progress)
        self._count = 0

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: ManyParams = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in order. Without `sampling_params` the checkpoint's own values hold.

        A bad prompt given alone raises RequestError. In a list only its own output has `error` set.
        `priority` has a value for each prompt; lower ones are computed first. `mm_processor_kwargs` hold for
        all prompts that bring none.
        """
        checked_call(more, ())
        is_single = isinstance(prompts, (str, Mapping))
        many: Sequence[PromptInput] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        if mm_processor_kwargs:
            many = [with_kwargs(prompt, mm_processor_kwargs) for prompt in many]
        makers = [lambda p=p: self.engine.processor.from_prompt(p) for p in many]
        return self._run(makers, sampling_params, use_tqdm, priority, raise_errors=is_single)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **how: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (OpenAI-style messages) or many.

        `how`: tools, add_generation_prompt, chat_template_kwargs, mm_processor_kwargs.
        """
        how = checked_call(how, _CHAT_ARGUMENTS)
        is_single = not messages or isinstance(messages[0], Mapping)
        many: Sequence[Any] = [messages] if is_single else messages
        makers = [lambda m=m: self.engine.processor.from_chat(m, allow_paths=True, **how) for m in many]
        return self._run(makers, sampling_params, use_tqdm, priority, raise_errors=is_single)

    def bill(self, prompt: PromptInput | Messages, **how: Any) -> Bill:
        """What a prompt of `generate`, or messages of `chat` with its arguments, would cost. Runs nothing."""
        processor = self.engine.processor
        try:
            if isinstance(prompt, (str, Mapping)):
                return self.engine.bill(processor.from_prompt(prompt, **checked_call(how, ())))
            how = checked_call(how, _CHAT_ARGUMENTS)
            return self.engine.bill(processor.from_chat(prompt, allow_paths=True, **how))
        finally:
            self.engine.core.release_if_idle()  # its images may have been prefetched

    def get_tokenizer(self) -> ChatTokenizer:
        checkpoint = self.engine.processor.checkpoint
        tokenizer = self.engine.processor.tokenizer
        return ChatTokenizer(tokenizer, checkpoint.chat_template, checkpoint.config.text.vocab_size)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV blocks. False while requests that were added by hand are open."""
        return self.engine.core.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and caches back until `wake_up`; other calls raise meanwhile.

        Levels 1 and 2 do the same here: the weights come back from the checkpoint's files.
        """
        if level not in (1, 2):
            raise RequestError(f"level must be 1 or 2, not {quoted(level)}", param="level")
        self.engine.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """All comes back at once, whatever `tags` names."""
        self.engine.wake_up()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Until `stop_profile`, torch's profiler watches. Needs LLM(profile_dir=...)."""
        self.engine.profiler.start(profile_prefix)

    def stop_profile(self) -> Path:
        """Write the trace; its file is for chrome://tracing or ui.perfetto.dev."""
        return self.engine.profiler.stop()

    def beam_search(
        self, prompts: PromptInput | Sequence[PromptInput], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of each prompt, one step of `generate` a token."""
        many = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        generate = partial(self.generate, use_tqdm=False)
        return [best_sequences(prompt, params, self.engine.processor, generate) for prompt in many]

    def embed(
        self, prompts: PromptInput | Sequence[PromptInput], use_tqdm: bool = True, **how: Any
    ) -> Embeddings:
        """One vector of length 1 for each input: what `generate` takes, or {"messages": [...]}.

        Of late interaction one for each token. `how`: dimensions, input_type, truncate_prompt_tokens.
        """
        how = checked_call(how, ("dimensions", "input_type", "truncate_prompt_tokens"))
        run = self._pooling(use_tqdm, is_single=isinstance(prompts, (str, Mapping)))
        return embeddings(self.engine.processor, run, prompts, **how)

    def score(
        self, data_1: Side | Sequence[Side], data_2: Side | Sequence[Side], use_tqdm: bool = True, **how: Any
    ) -> Scores:
        """How well each pair fits: one with each of many, or as many with as many; text or content parts.

        `how`: instruction, truncate_prompt_tokens.
        """
        how = checked_call(how, ("instruction", "truncate_prompt_tokens"))
        run = self._pooling(use_tqdm, is_single=isinstance(data_2, (str, Mapping)))
        return scores(self.engine.processor, run, data_1, data_2, **how)

    def _pooling(self, use_tqdm: bool, *, is_single: bool) -> Run:
        return partial(self._run, use_tqdm=use_tqdm, priority=None, raise_errors=is_single)

    def get_default_sampling_params(self) -> SamplingParams:
        """For calls without `sampling_params`: generation_config.json's values, and ours for the rest."""
        return SamplingParams(**self.engine.defaults)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine: kv, prefix_cache, encoder_cache, encoder, steps, recent_steps."""
        return self.engine.core.stats()

    def close(self) -> None:
        """Free weights, KV blocks and threads. May be called again; other calls then raise RuntimeError."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        makers: Sequence[Callable[[], Prompt]],
        sampling_params: ManyParams,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        *,
        raise_errors: bool,
    ) -> list[RequestOutput]:
        if self.engine.has_unfinished_requests():
            advice = "step the engine until they are finished"
            raise RuntimeError(f"requests that were added by hand are still open; {advice}")
        results: dict[str, RequestOutput] = {}
        many = spread(sampling_params, len(makers))
        priorities = priorities_of(priority, len(makers))
        ids = [f"request-{self._count + i}" for i in range(len(makers))]
        self._count += len(makers)
        try:
            for request_id, make, params, value in zip(ids, makers, many, priorities, strict=True):
                try:
                    self.engine.add_with(request_id, make, params, value)
                except RequestError as error:
                    results[request_id] = RequestOutput(request_id, None, [], [], True, None, error)
                self.engine.launch_if_full()
            self._drain(ids, results, use_tqdm)
        except BaseException:  # the caller gave up (Ctrl-C): nothing of this call stays open
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise
        first_error = results[ids[0]].error if ids else None
        if raise_errors and first_error:
            raise first_error
        return [results[request_id] for request_id in ids]

    def _drain(self, ids: Sequence[str], results: dict[str, RequestOutput], use_tqdm: bool) -> None:
        """Step until every request of this call is finished."""
        tokens = 0
        start = time.perf_counter()
        progress = tqdm(total=len(ids), initial=len(results), desc="requests") if use_tqdm else nullcontext()
        with progress as bar:
            while len(results) < len(ids):
                for output in self.engine.finished_after_step():
                    results[output.request_id] = output
                    tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    if bar is not None:
                        speed = tokens / (time.perf_counter() - start)
                        bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                        bar.update()
