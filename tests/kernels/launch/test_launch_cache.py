"""Launches without a search: a kernel is looked for once for all arguments that compile to the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels.launch.launch_cache import launch

ONE = (1, 1, 1)


class Kernel:
    """Counts how often it is looked for, and what was launched."""

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.searches = 0
        self.launches: list[tuple[Any, ...]] = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look(*args: Any, **options: Any) -> Any:
            self.searches += 1
            self.launches.append((grid, *args))
            return None if self.is_interpreted else Found(self)

        return look


class Found:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.kernel.launches.append((grid, *args))


def test_the_second_launch_does_not_look_for_the_kernel() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch(kernel, ONE, (x, 0.5), (4,), num_warps=1)
    launch(kernel, (2, 1, 1), (x, 0.25), (4,), num_warps=1)
    assert kernel.searches == 1
    assert kernel.launches == [(ONE, x, 0.5, 4), ((2, 1, 1), x, 0.25, 4)]


@pytest.mark.parametrize(
    ("args", "sizes", "warps"),
    [
        ((torch.zeros(4).half(), 8), (4,), 1),  # another type
        ((torch.zeros(5)[1:], 8), (4,), 1),  # another alignment
        ((torch.zeros(4), 9), (4,), 1),  # another number
        ((torch.zeros(4), 8), (5,), 1),
        ((torch.zeros(4), 8), (4,), 2),
    ],
)
def test_what_compiles_to_something_else_is_looked_for(args: tuple[Tensor, int], sizes: tuple[int], warps: int) -> None:
    kernel = Kernel()
    launch(kernel, ONE, (torch.zeros(4), 8), (4,), num_warps=1)
    launch(kernel, ONE, args, sizes, num_warps=warps)
    assert kernel.searches == 2


def test_kernels_do_not_get_each_other_s_launches() -> None:
    one, other, x = Kernel(), Kernel(), torch.zeros(4)
    launch(one, ONE, (x,), (4,))
    launch(other, ONE, (x,), (4,))
    assert (one.searches, other.searches) == (1, 1)


def test_an_interpreted_kernel_is_asked_every_time() -> None:
    kernel = Kernel(is_interpreted=True)
    for _ in range(2):
        launch(kernel, ONE, (torch.zeros(4),), (4,))
    assert kernel.searches == 2
