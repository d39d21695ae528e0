"""Draws tokens where their logits lie: in one launch where that has shown to agree with plain PyTorch.

Knows logits and numbers, not whose they are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from saccade.kernels.launch.self_test import self_test_passes
from saccade.kernels.ops import sample as kernel
from saccade.kernels.ops.argmax import TokenSink
from saccade.runner.sampler import sample_rows

_TRIALS = (  # temperature, top_k, top_p, min_p, a number in [0, 1)
    (1.0, float("inf"), 1.0, 0.0, 0.7),
    (2.0, 5.0, 1.0, 0.0, 0.3),
    (1.5, float("inf"), 0.6, 0.0, 0.9),
    (0.7, 20.0, 0.9, 0.01, 0.5),
)
_LIKELY = 16  # tokens of a trial that have nearly all probability: rounding then decides nothing


def sample_tokens(logits: Tensor, which: Tensor, numbers: Tensor, is_cut: bool, out: Tensor, sink: TokenSink) -> None:
    """A token for each of the rows `which` [rows] of the logits [T, N], into `out` [T] there and on the board.

    `numbers` and `is_cut` are those of a `SamplingInputs`, on the device.
    """
    if has_kernel(logits.device, logits.dtype, logits.shape[1]):
        kernel.sample_rows(logits, which, numbers, out, sink)
        return
    tokens = sample_rows(logits[which], numbers, is_cut)
    out.index_copy_(0, which, tokens)
    sink.last_tokens.index_copy_(0, sink.request_rows, tokens)


@lru_cache
def has_kernel(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """Tried out when it is asked for the first time, which also compiles it; that must not be recorded."""
    if device.type != "cuda":  # kernels in Triton's interpreter: those are tested
        return True
    return self_test_passes(lambda: try_out(device, dtype, vocabulary), "tokens are drawn by plain PyTorch")


def try_out(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """It must compile and draw what the reference draws."""
    logits = torch.randn(len(_TRIALS), vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, :: max(vocabulary // _LIKELY, 1)] += 25.0
    logits = logits.to(device, dtype)
    numbers = torch.tensor(_TRIALS, dtype=torch.float64, device=device).T
    which = torch.arange(len(_TRIALS), device=device)
    found, last_tokens = (torch.zeros(len(_TRIALS), dtype=torch.int64, device=device) for _ in range(2))
    kernel.sample_rows(logits, which, numbers, found, TokenSink(last_tokens, which))
    expected = sample_rows(logits, numbers, is_cut=True)
    if not torch.equal(found, expected) or not torch.equal(last_tokens, expected):
        raise ValueError(f"drew {found.tolist()}, not {expected.tolist()}")
