"""Kernels that are compiled side by side before the first launch. Without a GPU: what would compile is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from saccade.kernels.launch import compile_ahead
from saccade.kernels.launch.compile_ahead import compiling, is_compiling
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.launch.launch_cache import launch, launch_for_any_size


class Kernel:
    """As a Triton kernel is launched, by `JITFunction.run`."""

    __name__ = "_some_kernel"

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: JITFunction.run(self, *args, grid=grid, warmup=False, **options)  # type: ignore[arg-type]

    def warmup(self, *args: Any, grid: object, **options: Any) -> Any:
        return JITFunction.run(self, *args, grid=grid, warmup=True, **options)  # type: ignore[arg-type]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What Triton was asked for: the arguments, and whether only to compile."""
    asked: list[tuple[object, ...]] = []

    def run(kernel: object, *args: object, grid: object, warmup: bool, **options: object) -> None:
        asked.append((*args, warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    return asked


def test_launches_are_compiled_once_for_each_kind_of_arguments_and_not_made(compiled: list[tuple[Any, ...]]) -> None:
    kernel, some, other = Kernel(), torch.zeros(4), torch.zeros(8)
    with compiling(1):
        assert is_compiling()
        for x in (some, other, some.int()):
            kernel[1,](x, 3)
        kernel[1,](some, 4)
    assert [(x.dtype, *rest) for x, *rest in compiled] == [
        (torch.float32, 3, True), (torch.int32, 3, True), (torch.float32, 4, True),
    ]  # fmt: skip
    assert not is_compiling()
    kernel[1,](some, 3)
    assert compiled[-1][1:] == (3, False), "afterwards kernels are launched"


def test_caches_of_launches_keep_nothing_that_was_only_compiled(compiled: list[tuple[object, ...]]) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    with compiling(1):
        launch(kernel, (1, 1, 1), (x,), (16,))
        launch_for_any_size(kernel, (1, 1, 1), (x,), lambda: (x[:1],), (x.dtype,), (32,))
    assert [rest for _, *rest in compiled] == [[16, True], [32, True]]
    launch(kernel, (1, 1, 1), (x,), (16,))
    assert compiled[-1][1:] == (16, False)


def test_a_kernel_is_expected_to_work_and_its_self_test_compiles_what_it_launches(
    compiled: list[tuple[object, ...]],
) -> None:
    kernel = Kernel()

    def self_test(size: int) -> None:
        assert_agree(torch.zeros(1), torch.ones(1), 0.0)  # no kernel wrote what is compared
        kernel[1,](size)

    choice = KernelChoice("a kernel", lambda size: size < 8, self_test, "another runs")
    with compiling(1):
        assert choice(4) and not choice(8)
        assert compiled == [], "self-tests wait, since graphs may be captured where a kernel is chosen"
    assert compiled == [(4, True)] and choice.decided == {}
    assert not choice(4), "now the self-test runs for real, and finds a difference"


def test_what_fails_ahead_raises_nothing(compiled: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def self_test() -> None:
        raise ValueError("no such instruction")

    choice = KernelChoice("a kernel", lambda: True, self_test, "another runs")
    with compiling(1):
        assert choice()
    run = JITFunction.run
    with pytest.raises(RuntimeError, match="of a pass"), compiling(1):
        raise RuntimeError("of a pass")
    assert JITFunction.run is run and not is_compiling()


def test_a_kernel_is_compiled_in_a_process_of_its_own_and_then_found(tmp_path: Path) -> None:
    """In the order of Triton: look on disk, else compile."""
    kept = tmp_path / "kernel"
    here = []

    def compile_kernel() -> str:
        if not kept.exists():
            kept.write_text("compiled")
            here.append("compiled")
        return kept.read_text()

    assert compile_ahead._in_a_process(compile_kernel) == "compiled"
    assert here == [], "this process found it"


def test_a_compiler_that_dies_is_tried_again_here(capfd: pytest.CaptureFixture[str]) -> None:
    tries = []

    def compile_kernel() -> str:
        tries.append(len(tries))
        if compile_ahead.os.getpid() != parent:
            raise MemoryError
        return "compiled"

    parent = compile_ahead.os.getpid()
    assert compile_ahead._in_a_process(compile_kernel) == "compiled" and tries == [0]
