"""The offline interface: calls that take prompts and return whole outputs, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from saccade.errors import RequestError, quoted
from saccade.offline_engine import Messages, OfflineEngine
from saccade.options.engine import options
from saccade.options.vllm.keywords import checked_call
from saccade.outputs import BeamSearchOutput, RequestOutput
from saccade.processor.beam_search import best_sequences
from saccade.processor.call_arguments import (
    ManyParams,
    PromptInput,
    as_many,
    priorities_of,
    spread,
    with_kwargs,
)
from saccade.processor.chat_tokenizer import ChatTokenizer
from saccade.processor.pooled_calls import Embeddings, Run, Scores, embeddings, scores
from saccade.processor.pooling import Side
from saccade.sampling_params import BeamSearchParams, SamplingParams
from saccade.types.bill import Bill
from saccade.types.prompt import Prompt

__all__ = ["LLM", "OfflineEngine"]

_CHAT_ARGUMENTS = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    "mm_processor_kwargs",
)


class LLM:
    """A vision-language model to call from Python.

    >>> llm = LLM(model="Qwen/Qwen2-VL-2B-Instruct")
    >>> outs = llm.chat([{"role": "user", "content": [
    ...     {"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is this?"}]}])
    >>> print(outs[0].outputs[0].text)

    Without a model it is the small one inside the package. Every option of the command line is a keyword:
    the fields of `saccade.options.engine.Options`. `close` frees the memory, as does the end of `with`.
    """

    def __init__(self, model: str | None = None, **fields: Any) -> None:
        progress = fields.pop("use_tqdm", True)
        self.engine = OfflineEngine(options(model=model, **fields), progress=progress)
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
        inputs: Sequence[PromptInput] = as_many(prompts)
        if mm_processor_kwargs:
            inputs = [with_kwargs(prompt, mm_processor_kwargs) for prompt in inputs]
        makers = [lambda p=p: self.engine.processor.from_prompt(p) for p in inputs]
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
        chats: Sequence[Any] = [messages] if is_single else messages
        makers = [lambda m=m: self.engine.processor.from_chat(m, allow_paths=True, **how) for m in chats]
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
        generate = partial(self.generate, use_tqdm=False)
        processor = self.engine.processor
        return [best_sequences(prompt, params, processor, generate) for prompt in as_many(prompts)]

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
