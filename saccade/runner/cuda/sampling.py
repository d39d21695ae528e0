"""Samples tokens on the device: by one kernel if it agrees with PyTorch, else by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch.kernel_choice import KernelChoice
from saccade.kernels.ops import sample as kernel
from saccade.kernels.ops.argmax import TokenSink
from saccade.runner.sampler import FILTER_CASES, SamplingInputs, sample_rows

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
    count = len(FILTER_CASES)
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, :: max(vocabulary // _LIKELY, 1)] += 25.0
    logits = logits.to(device, dtype)
    inputs = SamplingInputs.of([(params, 0, position) for position, params in enumerate(FILTER_CASES)])
    numbers = torch.from_numpy(inputs.values).to(device)
    which = torch.arange(count, device=device)
    tokens, last_tokens = torch.zeros(2, count, dtype=torch.int64, device=device)
    kernel.sample_rows(logits, which, numbers, tokens, TokenSink(last_tokens, which))
    expected = sample_rows(logits, numbers, has_filters=True)
    if not all(torch.equal(one, expected) for one in (tokens, last_tokens)):
        raise ValueError(f"sampled {tokens.tolist()}, not {expected.tolist()}")


def _self_test_on_gpu(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    if device.type == "cuda":  # elsewhere Triton's interpreter runs, in tests that compare it
        self_test(device, dtype, vocabulary)


has_kernel = KernelChoice("the sampling kernel", lambda *_: True, _self_test_on_gpu, "PyTorch runs instead")
