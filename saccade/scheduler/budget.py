"""How the tokens of one step are shared out: decoding first, then prompts of text, then prompts with pictures.

Everyone draws in order of arrival, so the later purse is made smaller instead: each kind leaves what the kinds before
it want, and pictures keep a share whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from saccade.scheduler.sequence import Sequence

_PICTURE_SHARE = 4  # pictures keep a quarter of a step's tokens, and a slice of encoding in every fourth step


class StepBudget:
    """Tokens that are left in a step, by the kind of window that asks."""

    def __init__(self, num_tokens: int, open_requests: Iterable[Sequence], *, is_text_first: bool) -> None:
        num_decoding, num_text = _demand(open_requests)
        self.total = num_tokens
        self.has_text_prompts = num_text > 0
        self._prompts = max(num_tokens - num_decoding, 1)
        share = max(self._prompts // _PICTURE_SHARE, 1)
        self._pictures = max(self._prompts - num_text, share) if is_text_first else self._prompts

    def left_for(self, seq: Sequence) -> int:
        if seq.is_decoding:
            return self.total
        if seq.has_pictures_ahead:
            return min(self.total, self._prompts, self._pictures)
        return min(self.total, self._prompts)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.total -= num_tokens
        if not seq.is_decoding:
            self._prompts -= num_tokens
            self._pictures -= num_tokens if seq.has_pictures_ahead else 0


def encodes_now(step: int, budget: StepBudget, *, is_text_first: bool) -> bool:
    """Whether a sliced step advances the encoder: not while text waits for its first token, but never much later."""
    return not (is_text_first and budget.has_text_prompts) or step % _PICTURE_SHARE == 0


def _demand(requests: Iterable[Sequence]) -> tuple[int, int]:
    """How many requests decode, and how many prompt tokens are open of requests that wait for no picture."""
    num_decoding = num_text = 0
    for seq in requests:
        if seq.is_decoding:
            num_decoding += 1
        elif not seq.has_pictures_ahead:
            num_text += seq.num_tokens - seq.num_computed
    return num_decoding, num_text
