"""Samples tokens on the device: by one kernel if it agrees with PyTorch, else by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch.kernel_choice import KernelChoice
from saccade.kernels.ops import sample as kernel
from saccade.kernels.ops.argmax import TokenSink
from saccade.runner.sampler import sample_rows

_CASES = (  # temperature, top_k, top_p, min_p, a uniform number
    (1.0, float("inf"), 1.0, 0.0, 0.7),
    (2.0, 5.0, 1.0, 0.0, 0.3),
    (1.5, float("inf"), 0.6, 0.0, 0.9),
    (0.7, 20.0, 0.9, 0.01, 0.5),
)
_LIKELY = 16  # tokens of the self-test that have nearly all probability: rounding then decides nothing


def sample_tokens(
    logits: Tensor, which: Tensor, params: Tensor, has_filters: bool, out: Tensor, sink: TokenSink
) -> None:
    """A token for each of the rows `which` [rows] of logits [T, N], into `out` [T] at that row and the sink.

    `params` and `has_filters` are those of a `SamplingInputs`, on the device.
    """
    if has_kernel(logits.device, logits.dtype, logits.shape[1]):
        kernel.sample_rows(logits, which, params, out, sink)
        return
    tokens = sample_rows(logits[which], params, has_filters)
    out.index_copy_(0, which, tokens)
    sink.last_tokens.index_copy_(0, sink.request_rows, tokens)


def self_test(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """It must compile and sample what the reference does."""
    logits = torch.randn(len(_CASES), vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, :: max(vocabulary // _LIKELY, 1)] += 25.0
    logits = logits.to(device, dtype)
    params = torch.tensor(_CASES, dtype=torch.float64, device=device).T
    which = torch.arange(len(_CASES), device=device)
    tokens, last_tokens = (torch.zeros(len(_CASES), dtype=torch.int64, device=device) for _ in range(2))
    kernel.sample_rows(logits, which, params, tokens, TokenSink(last_tokens, which))
    expected = sample_rows(logits, params, has_filters=True)
    if not torch.equal(tokens, expected) or not torch.equal(last_tokens, expected):
        raise ValueError(f"sampled {tokens.tolist()}, not {expected.tolist()}")


def _self_test_on_gpu(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    if device.type == "cuda":  # elsewhere Triton's interpreter runs, in tests that compare it
        self_test(device, dtype, vocabulary)


has_kernel = KernelChoice("the sampling kernel", lambda *_: True, _self_test_on_gpu, "PyTorch runs instead")
