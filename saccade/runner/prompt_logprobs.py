"""Log probabilities of prompts, from the rows of their windows. A prompt's logits never exist all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.runner.batch import RequestState
from saccade.runner.sampler import top_logprobs
from saccade.types.step import ScheduledWindow
from saccade.util.torch_utils import to_device

_ROWS = 64  # that pass through the LM head together: 40 MB of logits where 150,000 tokens are known

Head = Callable[[Tensor], Tensor]
"""Normed rows [rows, H] -> logits [rows, vocabulary]"""


def prompt_rows(window: ScheduledWindow, state: RequestState, hidden: Tensor, head: Head) -> list[Tensor]:
    """Packed log probabilities of the prompt's tokens that follow those of a window. `hidden`: its rows."""
    count = min(window.end, state.num_prompt - 1) - window.start
    tokens = state.tokens(window.start + 1, window.start + 1 + count)
    targets = to_device(torch.from_numpy(tokens), hidden.device)
    num_top = state.request.params.num_prompt_logprobs
    parts = []
    for first in range(0, count, _ROWS):
        end = min(count, first + _ROWS)
        parts.append(_packed(head(hidden[first:end]).float(), targets[first:end], num_top))
    return parts


def take_prompt_logprobs(state: RequestState) -> bytes:
    """All of them, once, when the device has computed the prompt."""
    assert sum(map(len, state.rows)) == state.num_prompt - 1, "a row of the prompt was not computed"
    packed = b"".join(part.numpy().tobytes() for part in state.rows)
    state.needs_rows = False
    state.rows = []
    return packed


def _packed(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """int32 [rows, 2 + 2 * count] on the host, complete when the device has done what it was given.

    A placeholder's id may be above the vocabulary: such a token is never predicted.
    """
    vocabulary = logits.shape[-1]
    top = top_logprobs(logits.log_softmax(-1), tokens.clamp(max=vocabulary - 1), count)
    is_known = tokens < vocabulary
    of_token = top.of_token.where(is_known, -torch.inf)
    ranks = top.ranks.where(is_known, vocabulary)
    columns = (of_token[:, None].view(torch.int32), ranks[:, None], top.ids, top.values.view(torch.int32))
    return torch.cat([column.int() for column in columns], dim=1).to("cpu", non_blocking=True)
