"""How the tokens of one step are shared out: decoding first, then prompts of text, then prompts with pictures.

Everyone draws in order of arrival, so the later purse is made smaller instead: each kind leaves what the kinds before
it want, and pictures keep a share whatever comes.

Prompts that do not end in a step may ride along with its decodes, and then it holds more of their tokens. Where one
ends, all go by themselves:

    may ride     | 384 of 1,500 |  384  |  384  | 332 | the last 16 |
    or not       | 128 of 1,500 |  128  |  128  | 128 | 128 | ...
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.options import SchedulerConfig
from saccade.scheduler.request import ScheduledRequest
from saccade.types import Admission, ScheduledWindow

_LAST_TOKENS = 16  # of a prompt that did not end where it might have ridden along: fewer take as long
_IMAGE_SHARE = 4  # pictures keep a quarter of a step's tokens, and a slice of encoding in every fourth step


class StepBudget:
    """Tokens that are left in a step, by the kind of window that asks."""

    def __init__(
        self,
        num_tokens: int,
        open_requests: Iterable[ScheduledRequest],
        *,
        is_text_first: bool,
        max_prefills: int | None = None,
    ) -> None:
        demand = _demand(open_requests)
        self.total = num_tokens
        self.num_windows = 0  # of prompts, so far
        self._max_windows = max_prefills if max_prefills is not None else num_tokens
        self.num_decoding = demand.decoding
        self.has_text_answers = demand.text_answers > 0
        self.num_prompts = demand.prompts
        self.work_wanted = demand.work
        self.has_text_prompts = demand.text_tokens > 0
        self._text_tokens = demand.text_tokens
        self._is_text_first = is_text_first
        self._ending = max(num_tokens - demand.decoding, 1)  # for prompts, in a step in which one of them ends
        self._going_on = self._ending  # where none does
        self._share_out(self._ending)

    def bound(self, prompt_tokens: int, mixed_tokens: int = 0) -> None:
        """No more than this for prompts, whatever the step could hold; the second, if any, where none of them ends.

        Whoever can end in this step does.
        """
        ends_text = 0 < self._text_tokens <= prompt_tokens
        going_on = mixed_tokens if mixed_tokens and not ends_text else prompt_tokens
        self._share_out(min(self._ending, max(prompt_tokens, going_on)))
        self._going_on = min(self._ending, going_on)
        self._ending = min(self._ending, prompt_tokens)
        self.total = min(self.total, self.num_decoding + self._prompts)

    def _share_out(self, prompt_tokens: int) -> None:
        self._prompts = self._images = prompt_tokens
        if self._is_text_first:
            self._images = max(prompt_tokens - self._text_tokens, prompt_tokens // _IMAGE_SHARE, 1)

    def left_for(self, seq: ScheduledRequest, start: int) -> int:
        """Tokens of a window that begins there."""
        if seq.is_decoding:
            return self.total if self._ending >= 0 else 0  # one token is an end too: not beside those that ride along
        if self.num_windows >= self._max_windows:
            return 0
        rest, left = seq.num_tokens - start, min(self.total, self._prompts)
        if seq.has_images_ahead:
            left = min(left, self._images)
        if rest <= min(left, self._ending):
            return rest
        left = min(left, self._going_on)
        if left <= self._ending:
            return left
        return min(left, max(rest - _LAST_TOKENS, 0))

    def take(self, seq: ScheduledRequest, start: int, end: int) -> None:
        self.total -= end - start
        if not seq.is_decoding:
            self.num_windows += 1
            self._prompts -= end - start
            self._ending -= end - start
            self._going_on -= end - start
            self._images -= end - start if seq.has_images_ahead else 0
        if end == seq.num_tokens:
            self._prompts = self._going_on = self._ending


def are_enough(requests: Many[ScheduledRequest], config: SchedulerConfig) -> bool:
    """Whether a step of these requests is full, unless much of them is found in the prefix cache."""
    maximum = config.latency.max_prefills if config.latency and config.latency.max_prefills else config.max_num_seqs
    tokens = sum(seq.num_tokens for seq in requests)
    return len(requests) >= min(maximum, config.max_num_seqs) or tokens >= config.max_num_batched_tokens


def encodes_now(step: int, budget: StepBudget, *, is_text_first: bool) -> bool:
    """Whether a sliced step advances the encoder: not while text waits for its first token, but never much later."""
    return not (is_text_first and budget.has_text_prompts) or step % _IMAGE_SHARE == 0


def layers_in_bounded_step(layers: int, step: int, budget: StepBudget) -> int:
    """Where prompts want their part of a bounded step: half of the layers, or one in every other step."""
    if not budget.num_prompts:
        return layers
    return layers // 2 or 1 - step % 2


def answers_rest(step: int, budget: StepBudget) -> bool:
    """Whether answers about pictures sit a bounded step out that only encodes beside them.

    A token for a few requests costs a CPU as much as one for many, and what these wait for is pictures. Answers to
    text never rest, and where the decoder runs anyway, nobody does.
    """
    return not (budget.num_prompts or budget.has_text_answers) and step % _IMAGE_SHARE != 0


class _Demand(NamedTuple):
    decoding: int  # requests
    text_answers: int  # of those, requests without pictures
    prompts: int  # requests that could compute prompt tokens now, as far as pictures are concerned
    text_tokens: int  # of requests that wait for no picture
    work: int  # embeddings that the tower would make of the first picture that others wait for


def _demand(requests: Iterable[ScheduledRequest]) -> _Demand:
    decoding = text_answers = prompts = text_tokens = work = 0
    for seq in requests:
        if seq.is_decoding:
            decoding += 1
            text_answers += not seq.spans
        elif not seq.has_images_ahead:
            prompts += 1
            text_tokens += seq.num_tokens - seq.num_computed
        elif seq.next_span in seq.held or seq.num_computed < seq.spans[seq.next_span].start:
            prompts += 1
        else:
            work = work or seq.spans[seq.next_span].work
    return _Demand(decoding, text_answers, prompts, text_tokens, work)


@dataclass(slots=True)
class StepBuilder:
    """What a step has so far, and what it may still take."""

    now: float
    budget: StepBudget
    windows: list[ScheduledWindow] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    has_preempted: bool = False
    answers_rest: bool = False  # requests that decode sit this step out
    ahead: frozenset[str] = frozenset()  # requests whose part of the step was planned ahead and runs already
    is_short: bool = False  # of blocks that only a preemption can give, and none may happen beside what runs
