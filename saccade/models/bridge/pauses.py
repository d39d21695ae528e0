"""Pauses between the layers of a tower that Transformers' code calls: it runs in a thread of its own.

    engine   next() ──► waits   decodes    next() ──► waits
    tower               layers  waits                 layers ──► embeddings     never both at a time

One thread for all passes, since libraries keep plans and handles for each thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")
_Inbox = SimpleQueue["_Run[Any] | None"]


class _DroppedError(BaseException):
    """Ends a run that was dropped; no code in between catches it."""


class Pauses:
    """Where towers stop, in the thread of `running` alone."""

    def __init__(self, device: torch.device) -> None:
        self.has_layers = False
        self._device = device
        self._local = threading.local()
        self._inbox: _Inbox | None = None  # of the thread, once there is one
        self._run: _Run[Any] | None = None  # the last

    def listen(self, layers: Iterable[nn.Module]) -> None:
        for layer in layers:
            self.has_layers = True
            layer.register_forward_hook(lambda *_: self.after_layers(1))

    def after_layers(self, count: int) -> None:
        run: _Run[Any] | None = getattr(self._local, "run", None)
        if run is not None:
            run.pause(count)

    def running(self, work: Callable[[], T], images: int) -> Generator[int, None, T]:
        """Yields layers over all images, where their layers run one image after the other."""
        if self._run is not None:
            self._run.drop()  # or the thread would wait for it
        run = _Run(work, images, self._device, self._local)
        self._run = run
        self._thread().put(run)
        try:
            while run.goes_on():
                yield run.take_layers()
        finally:
            run.drop()
        return run.result()

    def _thread(self) -> _Inbox:
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(self._inbox,), name="saccade-tower", daemon=True).start()
            weakref.finalize(self, self._inbox.put, None)
        return self._inbox


def _serve(inbox: _Inbox) -> None:
    """Knows nothing of the model, which may go while the thread waits."""
    while (run := inbox.get()) is not None:
        run.execute()
        del run


class _Run(Generic[T]):
    """One call in the thread, which goes on when it is told to."""

    def __init__(
        self, work: Callable[[], T], images: int, device: torch.device, local: threading.local
    ) -> None:
        self._work: Callable[[], T] | None = work
        self._images = images
        self._device = device
        self._local = local
        self._may_go = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._has_ended = threading.Event()
        self._stream: Any = None  # of the engine, which may change between pauses
        self._layers = 0  # of single images, since the last pause
        self._is_dropped = False
        self._values: list[T] = []
        self._error: BaseException | None = None

    # --- the engine's side ----------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """To the next pause; False: it has ended."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self._may_go.release()
        self._has_stopped.acquire()
        return not self._has_ended.is_set()

    def take_layers(self) -> int:
        layers, self._layers = divmod(self._layers, self._images)
        return layers

    def drop(self) -> None:
        self._is_dropped = True
        self._may_go.release()
        self._has_ended.wait()

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame
        return self._values.pop()

    # --- the tower's side -----------------------------------------------------------------------------------

    def execute(self) -> None:
        self._local.run = self  # hooks in this thread find it
        try:
            self._wait()
            assert self._work is not None
            with torch.inference_mode():
                self._values.append(self._work())
        except _DroppedError:
            pass
        except BaseException as error:  # the engine raises it
            self._error = error
        finally:
            self._local.run = self._work = None  # with what it holds
            self._has_ended.set()
            self._has_stopped.release()

    def pause(self, layers: int) -> None:
        self._layers += layers
        if self._layers >= self._images:
            self._has_stopped.release()
            self._wait()

    def _wait(self) -> None:
        self._may_go.acquire()
        if self._is_dropped:
            raise _DroppedError
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
