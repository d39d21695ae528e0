"""The output processor of one completion: token events in; text, stop strings and finish reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from saccade.outputs import (
    CompletionOutput,
    PromptLogprobs,
    TokenLogprobs,
    prompt_logprobs,
    unpack_prompt_logprobs,
)
from saccade.processor.detokenize import Detokenizer
from saccade.processor.dialects.events import Content, OutputEvent, Reasoning
from saccade.processor.dialects.parser import PLAIN, OutputFormat
from saccade.processor.tokenizer import Tokenizer
from saccade.sampling_params import SamplingParams
from saccade.types.events import FinishReason, TokenEvent, Usage
from saccade.types.step import Logprobs


class RequestOutputBuilder:
    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        shown_ids: frozenset[int] = frozenset(),
        output_format: OutputFormat = PLAIN,
    ) -> None:
        """`shown_ids` are control tokens that stay in the text, because a parser looks for them.

        `output_format`: tells thinking from the rest, for callers of `output`.
        """
        self.index = index
        self.token_ids: list[int] = []
        self._shows_logprobs = params.logprobs is not None
        is_compared = params.picks_best
        self.logprobs: list[Logprobs] | None = [] if self._shows_logprobs or is_compared else None
        self._shown_logprobs: list[TokenLogprobs] = []  # the same for callers; each is made once
        self._token_text = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.usage: Usage | None = None
        self.pooled: bytes | None = None  # float32, of a request that pools
        self._packed_prompt: bytes | None = None  # its log probabilities
        self._num_prompt_logprobs = params.num_prompt_logprobs
        self._prompt_logprobs: PromptLogprobs | None = None
        self._caller_stops = frozenset(params.stop_token_ids)
        self._must_detokenize = bool(params.stop_strings)
        self._num_shown = 0  # tokens without the stop token, which is counted but not shown
        self._tokenizer = tokenizer
        self._parts: _Parts | None = None
        if output_format.thinking is not None:
            self._parts = _Parts(tokenizer, params, output_format)
        self._decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        self._reader = _TokenReader(tokenizer, params, shown_ids)
        self._detokenizer = self._reader.detokenizer

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        if self._reader.num_read < self._num_shown:
            if self.is_finished and not self._reader.num_read:
                return self._decode(self.token_ids[: self._num_shown])  # nothing was streamed
            self._reader.read(self.token_ids, self._num_shown)
        return self._detokenizer.text

    def push(self, event: TokenEvent) -> str:
        """Take one event and return the new text. After a stop string the caller can abort the request."""
        self._take(event)
        new = self._reader.read(self.token_ids, self._num_shown)
        if self._detokenizer.stopped is not None:
            self.finish_reason = "stop"
            self.stop_reason = self._detokenizer.stopped
        elif event.finish_reason is not None:
            new += self._detokenizer.finish()
            self._end(event)
        self.usage = event.usage
        return new

    def add(self, event: TokenEvent) -> None:
        """Take one event without detokenizing it, unless there are stop strings to look for."""
        if self._must_detokenize:
            self.push(event)
            return
        self._take(event)
        if event.finish_reason is not None:
            self._end(event)
            self.usage = event.usage

    def _end(self, event: TokenEvent) -> None:
        self.finish_reason = event.finish_reason
        self.pooled = event.pooled
        if self._detokenizer.stopped is not None:  # found in the text that `finish` released
            self.finish_reason = "stop"
            self.stop_reason = self._detokenizer.stopped
        elif event.stop_token_id in self._caller_stops:
            self.stop_reason = event.stop_token_id

    def _take(self, event: TokenEvent) -> None:
        if event.token_id is None:
            return
        self.token_ids.append(event.token_id)
        if event.prompt_logprobs is not None:
            self._packed_prompt = event.prompt_logprobs
        if event.stop_token_id is None:
            self._num_shown += 1
        if self.logprobs is not None and event.logprobs is not None:
            self.logprobs.append(event.logprobs)

    def tokens_through(self, marker: str, start: int) -> int:
        """How many tokens end with the first `marker`, which is complete after `start`."""
        for end in range(start + 1, len(self.token_ids) + 1):
            recent = self.token_ids[max(0, end - len(marker)) : end]  # no token is shorter than a byte
            if marker in self._tokenizer.decode(recent, skip_special_tokens=False):
                return end
        return len(self.token_ids)

    def output(self) -> CompletionOutput:
        text = self.text
        if self._parts is not None:
            self._parts.read(self.token_ids, self._num_shown, is_finished=self.is_finished)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self._token_logprobs(),
            pooled=self.pooled,
            reasoning=self._parts.reasoning if self._parts else None,
            content=self._parts.content if self._parts else text,
        )

    @property
    def mean_logprob(self) -> float:
        """The mean over its tokens, by which the best outputs are chosen."""
        return sum(entry.logprob for entry in self.logprobs or ()) / max(1, len(self.token_ids))

    def prompt_entries(self) -> list[Logprobs] | None:
        """Entries of the prompt's tokens from the second on; None: not asked for, or not there yet."""
        if self._packed_prompt is None:
            return None
        return unpack_prompt_logprobs(self._packed_prompt, self._num_prompt_logprobs)

    def prompt_logprobs(self, prompt_ids: Sequence[int]) -> PromptLogprobs | None:
        """The same for callers, made once."""
        if self._prompt_logprobs is None and (entries := self.prompt_entries()) is not None:
            self._prompt_logprobs = prompt_logprobs(prompt_ids, entries, self._token_text)
        return self._prompt_logprobs

    def _token_logprobs(self) -> list[TokenLogprobs] | None:
        if self.logprobs is None or not self._shows_logprobs:
            return None
        start = len(self._shown_logprobs)
        for token_id, entry in zip(self.token_ids[start:], self.logprobs[start:], strict=False):
            self._shown_logprobs.append(TokenLogprobs(token_id, entry, self._token_text))
        return list(self._shown_logprobs)


class _TokenReader:
    """The text of an output's tokens, each of which is taken once."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, shown_ids: frozenset[int]) -> None:
        self.detokenizer = Detokenizer(
            tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=shown_ids,
        )
        self.num_read = 0
        self._min_tokens = params.min_tokens  # stop strings are ignored before

    def read(self, token_ids: Sequence[int], end: int) -> str:
        """What is new, up to the token at `end`."""
        text = ""
        for index in range(self.num_read, end):
            text += self.detokenizer.push(token_ids[index], may_stop=index + 1 >= self._min_tokens)
        self.num_read = end
        return text


class _Parts:
    """The thinking of an output and the rest of it, so far. It sees markers that the text may hide."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, output_format: OutputFormat) -> None:
        markers = output_format.shown_markers(finds_calls=False)
        shown_ids = frozenset(i for marker in markers if (i := tokenizer.token_id(marker)) is not None)
        self._reader = _TokenReader(tokenizer, params, shown_ids)
        self._parser = output_format.parser(None, finds_calls=False)
        self._reasoning = ""
        self.content = ""

    @property
    def reasoning(self) -> str | None:
        return self._reasoning if self._parser.has_thought else None

    def read(self, token_ids: Sequence[int], end: int, *, is_finished: bool) -> None:
        """The tokens up to `end`, of which some were read before."""
        self._take(self._parser.push(self._reader.read(token_ids, end)))
        if is_finished:
            self._take(self._parser.push(self._reader.detokenizer.finish()) + self._parser.finish())

    def _take(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self._reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text


def best_outputs(outputs: Sequence[RequestOutputBuilder], n: int) -> list[RequestOutputBuilder]:
    """The `n` of one prompt with the highest mean log probability, best first; all of them as they are."""
    if n == len(outputs):
        return list(outputs)
    return sorted(outputs, key=lambda output: -output.mean_logprob)[:n]


def completions(outputs: Sequence[RequestOutputBuilder], n: int) -> list[CompletionOutput]:
    """The same for callers, numbered anew where some were not chosen."""
    if n == len(outputs):
        return [output.output() for output in outputs]
    best = enumerate(best_outputs(outputs, n))
    return [replace(output.output(), index=index) for index, output in best]
