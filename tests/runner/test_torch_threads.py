"""How many threads PyTorch has while engines on a GPU are open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from saccade.runner.torch_threads import OneTorchThread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_whatever_order_two_engines_end_there_is_one_thread_until_the_last(order: tuple[int, int]) -> None:
    engines = [OneTorchThread(), OneTorchThread()]
    found = [torch.get_num_threads()]
    for which in order:
        engines[which].end()
        found.append(torch.get_num_threads())
    assert found == [1, 1, 2]


def test_who_ends_twice_takes_nothing_from_others() -> None:
    first, second = OneTorchThread(), OneTorchThread()
    first.end()
    first.end()
    assert torch.get_num_threads() == 1
    second.end()
    assert torch.get_num_threads() == 2
