"""Who draws tokens on a device: the kernel if it agrees with plain PyTorch, otherwise that, and a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels.ops.argmax import TokenSink
from saccade.runner.cuda import sampling
from saccade.runner.sampler import sample_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.has_kernel, "decided", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_passes_its_self_test(dtype: torch.dtype) -> None:
    sampling.self_test(DEVICE, dtype, vocabulary=9001)


def test_a_kernel_that_samples_other_tokens_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.kernel, "sample_rows", lambda *_: None)
    with pytest.raises(ValueError, match="sampled"):
        sampling.self_test(DEVICE, torch.float32, vocabulary=40)


def test_a_kernel_that_fails_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(sampling.has_kernel, "self_test", fail)
    assert not sampling.has_kernel(torch.device("cuda:0"), torch.float32, 40)
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("with_kernel", [True, False])
def test_tokens_go_where_the_next_step_takes_them_from(with_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "has_kernel", lambda *_: with_kernel)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    which, request_rows = torch.tensor([[2, 0], [1, 3]], device=DEVICE)
    asked = torch.tensor([[1.0, 9.0, 0.9, 0.0, 0.4], [1.2, 50.0, 1.0, 0.0, 0.8]], dtype=torch.float64, device=DEVICE).T
    out, last_tokens = nothing(3), nothing(4)
    sampling.sample_tokens(logits, which, asked, True, out, TokenSink(last_tokens, request_rows))
    first, second = sample_rows(logits[which], asked, has_filters=True).tolist()
    assert out.tolist() == [second, -1, first]
    assert last_tokens.tolist() == [-1, first, -1, second]


def nothing(size: int) -> Tensor:
    return torch.full((size,), -1, dtype=torch.int64, device=DEVICE)
