"""Pauses between the layers of a tower that Transformers' code calls: it runs in a thread of its own.

engine   next() ──► waits   decodes    next() ──► waits
tower               layers  waits                 layers ──► embeddings     never both at a time
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class _DroppedError(BaseException):
    """Ends a run that was dropped; no code in between catches it."""


class Pauses:
    """Where towers stop, in threads of `running` alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current = threading.local()
        self.has_layers = False

    def listen(self, layers: Iterable[nn.Module]) -> None:
        for layer in layers:
            self.has_layers = True
            layer.register_forward_hook(lambda *_: self.after_layers(1))

    def after_layers(self, count: int) -> None:
        run: _Run[Any] | None = getattr(self._current, "run", None)
        if run is not None:
            run.pause(count)

    def running(self, work: Callable[[], T], images: int) -> Generator[int, None, T]:
        """Yields layers over all images, where their layers run one image after the other."""

        def body(run: _Run[T]) -> T:
            self._current.run = run  # hooks in this thread find it
            with torch.inference_mode():
                return work()

        run = _Run(body, images, self._device)
        try:
            while run.goes_on():
                yield run.take_layers()
        finally:
            run.drop()
        return run.result()


class _Run(Generic[T]):
    """One call in a thread, which goes on when it is told to."""

    def __init__(self, body: Callable[[_Run[T]], T], images: int, device: torch.device) -> None:
        self._body = body
        self._images = images
        self._device = device
        self._may_go = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._stream: Any = None  # of the engine, which may change between pauses
        self._layers = 0  # of single images, since the last pause
        self._is_dropped = False
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saccade-tower", daemon=True)
        self._thread.start()

    # --- the engine's side ----------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """To the next pause; False: it has ended."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self._may_go.release()
        self._has_stopped.acquire()
        return not self._values and self._error is None

    def take_layers(self) -> int:
        layers, self._layers = divmod(self._layers, self._images)
        return layers

    def drop(self) -> None:
        if self._thread.is_alive():
            self._is_dropped = True
            self._may_go.release()
            self._thread.join()

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame
        return self._values[0]

    # --- the tower's side -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._wait()
            self._values.append(self._body(self))
        except _DroppedError:
            pass
        except BaseException as error:  # the engine raises it
            self._error = error
        finally:
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
