"""Kernels that are compiled side by side before the first launch. Without a GPU: what would compile is a stand-in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import AsyncCompileMode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from saccade.kernels.launch import compile_ahead
from saccade.kernels.launch.compile_ahead import _CompileMode, _Compilers, compiling, is_compiling
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


def test_other_threads_launch_as_ever(compiled: list[tuple[object, ...]]) -> None:
    kernel = Kernel()
    with compiling(1), ThreadPoolExecutor(1) as other:
        assert not other.submit(is_compiling).result()
        other.submit(kernel[1,], 3).result()
        with pytest.raises(RuntimeError, match="another thread compiles"), compiling(1):
            pass
    assert compiled == [(3, False)]


def made_by(kept: Path) -> Callable[[], int]:
    """In the order of Triton: look on disk, else compile. Returns the process that compiled."""

    def compile_kernel() -> int:
        if not kept.exists():
            kept.write_text(str(os.getpid()))
        return int(kept.read_text())

    return compile_kernel


def test_a_kernel_is_compiled_in_a_process_of_its_own_and_then_found(tmp_path: Path) -> None:
    compile_kernel = made_by(tmp_path / "kernel")
    assert compile_ahead._in_a_process(compile_kernel, tmp_path / "lock") != os.getpid()


def test_a_compiler_that_dies_is_an_error_which_the_mode_ignores(tmp_path: Path) -> None:
    def compile_kernel() -> None:
        raise MemoryError

    with pytest.raises(RuntimeError, match="a process that compiled a kernel failed"):
        compile_ahead._in_a_process(compile_kernel, tmp_path / "lock")


@pytest.mark.parametrize("is_kept", [False, True], ids=["new", "on disk"])
def test_only_what_is_not_on_disk_is_compiled_in_a_process(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name and the key that Triton's own compiler looks for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    key = "of a kernel"
    if is_kept:
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        manager.put_group("_some_kernel.json", {"_some_kernel.json": manager.put("{}", "_some_kernel.json")})
    finished = []
    with _Compilers(1) as compilers:
        compilers.kernel = "_some_kernel"
        mode = _CompileMode(compilers, ignore_errors=True)
        rest = (finished.append, lambda _: None)[: len(signature(AsyncCompileMode.submit).parameters) - 3]
        made = mode.submit(key, made_by(tmp_path / "kernel"), *rest).result()
    assert finished == [made] and (made == os.getpid()) == is_kept


def test_a_mode_that_cannot_be_entered_leaves_launches_as_they_were(compiled: list[tuple[object, ...]]) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        AsyncCompileMode(pool),  # of another library
        pytest.raises(RuntimeError, match="already active"),
        compiling(1),
    ):
        pass
    assert not is_compiling()
    Kernel()[1,](3)
    assert compiled == [(3, False)]
