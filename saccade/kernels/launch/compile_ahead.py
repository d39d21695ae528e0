"""Compiles kernels side by side: host code runs once without launching, and processes compile what it would launch.

    with compiling(processes):    launches of Triton kernels are noted, not made
        capture_all_graphs()
                                  on leaving: self-tests of kernels that were chosen, the same way; then waits for all

What PyTorch launches meanwhile must not run, since no kernel wrote what it reads: `record` puts it into a CUDA graph
that is never replayed. All this saves time only. Whatever fails here happens again where it is handled.
Threads other than the one that entered `compiling` launch as ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from triton import AsyncCompileMode
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

_MAX_SECONDS = 120  # of a kernel
_log = logging.getLogger(__name__)


class _Ahead:
    """What was noted since `compiling` was entered."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.launches: set[object] = set()
        self.self_tests: dict[Hashable, Callable[[], object]] = {}
        self.pool: Any = None  # of the graphs that `record` makes
        self.graphs: list[Any] = []  # until the end: a pool without graphs cannot be captured into again


_now: _Ahead | None = None
_lock = threading.Lock()


def is_compiling() -> bool:
    """Whether this thread's launches are only noted."""
    return _now is not None and _now.thread == threading.get_ident()


def add_self_test(key: Hashable, test: Callable[[], object]) -> None:
    """Its kernels are compiled, too, once for each key."""
    assert _now is not None
    _now.self_tests[key] = test


def record(run: Callable[[], object]) -> None:
    """Run host code; what PyTorch launches in it goes into a CUDA graph that is thrown away."""
    assert _now is not None
    if _now.pool is None:
        _now.pool = torch.cuda.graph_pool_handle()
        _load_blas()
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # not instantiated
    _now.graphs.append(graph)
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=_now.pool, capture_error_mode="relaxed"):
            run()
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails may leave its own


def _load_blas() -> None:
    """Its handle and workspace are kept, so they must not be made inside a graph that is thrown away."""
    graph = torch.cuda.graph
    graph.default_capture_stream = graph.default_capture_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(graph.default_capture_stream):
        square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.addmm(square[0], square, square)
        square @ square
    torch.cuda.synchronize()


@contextmanager
def compiling(processes: int) -> Iterator[None]:
    """In one thread at a time: others compile as they launch."""
    global _now
    with _lock:
        if _now is not None:
            raise RuntimeError("another thread compiles ahead")
        _now = now = _Ahead()
    launch = JITFunction.run
    try:
        with _Compilers(processes) as compilers, _CompileMode(compilers, ignore_errors=True):
            JITFunction.run = _noting(launch, now, compilers)
            try:
                yield
                for test in now.self_tests.values():
                    _attempt(test)
            finally:
                JITFunction.run = launch
                _now = None
    finally:
        _now = None  # also where the mode could not be entered: launches would be dropped


def _attempt(test: Callable[[], object]) -> None:
    try:
        test()
    except Exception as error:  # it runs again where its kernel is chosen, and disables it there
        _log.debug("a self-test ended early: %s", error)


def _noting(launch: Callable[..., Any], now: _Ahead, compilers: _Compilers) -> Callable[..., Any]:
    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not is_compiling():
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        key = (kernel, *map(_kind, args), *map(_kind, options.values()))
        if key not in now.launches:
            now.launches.add(key)
            compilers.kernel = kernel.__name__
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    return note


def _kind(argument: Any) -> object:
    """At least what a kernel is specialized on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, tuple(argument.block_shape)
    return argument


class _CompileMode(AsyncCompileMode):  # type: ignore[misc]
    """Compiles in processes what is not on disk yet."""

    def submit(self, key: str, compile_fn: Callable[[], Any], *args: Any) -> Any:
        assert isinstance(self.executor, _Compilers)
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        if cache.get_group(f"{self.executor.kernel}.json") is None:
            compile_fn = partial(_in_a_process, compile_fn, Path(cache.cache_dir) / "compiling")
        return super().submit(key, compile_fn, *args)


def _in_a_process(compile_kernel: Callable[[], Any], lock: Path) -> Any:
    """A copy of this process compiles into Triton's cache on disk, where this one then finds it.

    The copy must not touch the GPU, and does not: the compiler is told which one it is for. Where
    it fails, the kernel is compiled when it is launched: not here, where copies are made at the same time. Engines that
    start together compile each kernel once: others wait for the lock, and find it.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(_MAX_SECONDS)  # ends it
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                compile_kernel()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a process that compiled a kernel failed")
    return compile_kernel()


class _Compilers(ThreadPoolExecutor):
    """A process for each kernel: the compiler holds Python's lock for a third of its time. Shows progress by name."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes, "compile")
        self.kernel = ""  # that is submitted next
        self._bar = tqdm(desc="Compiling kernels", disable=None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        name = self.kernel
        future = super().submit(fn, *args, **kwargs)
        self._bar.total = (self._bar.total or 0) + 1
        future.add_done_callback(lambda _: self._advance(name))
        return future

    def _advance(self, name: str) -> None:
        self._bar.set_postfix_str(name.strip("_").removesuffix("_kernel"), refresh=False)
        self._bar.update()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._bar.close()
