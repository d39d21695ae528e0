"""A kernel is used where it is supported and passes its self-test; the log says why it is not."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.launch.kernel_choice import KernelChoice


class Watched:
    def __init__(self, *, supported: bool = True, error: Exception | None = None) -> None:
        self.tested: list[object] = []
        self.error = error
        self.choice = KernelChoice("the fast kernel", lambda *_: supported, self.test, "the slow one runs instead")

    def test(self, *case: object) -> None:
        self.tested.append(case)
        if self.error is not None:
            raise self.error


def test_each_case_is_tested_once() -> None:
    watched = Watched()
    assert [watched.choice("cuda", size) for size in (1, 1, 2)] == [True] * 3
    assert watched.tested == [("cuda", 1), ("cuda", 2)]


def test_what_is_not_supported_is_not_tested() -> None:
    watched = Watched(supported=False)
    assert not watched.choice("cpu")
    assert watched.tested == []


def test_a_kernel_that_fails_is_not_used_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(error=RuntimeError("no such instruction"))
    assert not watched.choice("cuda") and not watched.choice("cuda")
    expected = "the fast kernel cannot be used: the slow one runs instead (RuntimeError: no such instruction)"
    assert caplog.messages == [expected]


def test_a_self_test_has_the_same_numbers_at_every_start_and_leaves_others_theirs() -> None:
    drawn: list[float] = []
    choice = KernelChoice("a kernel", lambda _: True, lambda _: drawn.append(torch.rand(()).item()), "another runs")
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()
    torch.manual_seed(7)
    found = [torch.rand(()).item()]
    assert choice("first") and choice("second")
    found.append(torch.rand(()).item())
    assert drawn[0] == drawn[1] and found == expected
