"""Processes that draw batches ahead of the trainer.

Batches lie in one anonymous shared mapping, cut into slots; only slot numbers and layouts travel through queues:

    worker:  free slot -> draw -> ready (slot, layout)        trainer:  ready -> copy to the device -> free slot
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing as mp
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.batches import Array, Arrays, BatchSizes, Encoder, Mix, held_out_batch, train_batch
from training.samples import SKILLS
from training.scenes import Plans

Batch = dict[str, Tensor]
_ALIGN = 64
_FAILURES = 20  # batches that may fail before training gives up


class Spot(NamedTuple):
    """Where an array lies in its slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes


class Ready(NamedTuple):
    slot: int
    spots: list[Spot]
    held_out: int  # number of the evaluation batch, or -1 for a training batch


class Pool:
    """Draws training batches on `workers` processes until closed. Fork it before the first use of a GPU."""

    def __init__(
        self, encoder: Encoder, sizes: BatchSizes, workers: int, first_seed: int, held_out: int, plans: Plans
    ) -> None:
        context = mp.get_context("fork")
        self._plans = plans
        self.failures = 0
        slots = 3 * workers
        self._slot_bytes = sizes.patches * 64 * 3 + sizes.patches * 80 + (1 << 22)
        self._memory = mmap.mmap(-1, slots * self._slot_bytes)
        self._level: Synchronized[float] = context.Value("d", 0.0)
        self._weights: SynchronizedArray[float] = context.Array("d", [1.0] * len(SKILLS))
        self._free: mp.SimpleQueue[int] = context.SimpleQueue()
        self._ready: mp.SimpleQueue[Ready | str] = context.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        jobs = [range(i, held_out, workers) for i in range(workers)]
        seeds = [first_seed * 10**6 + i for i in range(workers)]
        self._processes = [
            context.Process(target=self._work, args=(encoder, sizes, seed, workers, job), daemon=True)
            for seed, job in zip(seeds, jobs, strict=True)
        ]
        for process in self._processes:
            process.start()

    def steer(self, level: float, weights: list[float]) -> None:
        """Sets what the next batches are made of."""
        self._level.value = level
        self._weights[:] = weights

    def take(self) -> tuple[Ready, Arrays]:
        """The next batch, as views of its slot: copy them, then `release` it."""
        while isinstance(ready := self._ready.get(), str):
            self.failures += 1
            print(f"a batch could not be drawn (failure {self.failures} of {_FAILURES}):\n{ready}", flush=True)
            if self.failures >= _FAILURES:
                raise RuntimeError(f"{self.failures} batches could not be drawn; the last one:\n{ready}")
        return ready, {spot.name: self._view(ready.slot, spot) for spot in ready.spots}

    def release(self, ready: Ready) -> None:
        self._free.put(ready.slot)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()

    def _work(self, encoder: Encoder, sizes: BatchSizes, seed: int, stride: int, held_out: range) -> None:
        torch.set_num_threads(1)
        for number in held_out:
            self._try(partial(held_out_batch, encoder, number, sizes, self._plans.held_out), number)
        while True:
            mix = Mix(tuple(self._weights[:]), self._plans.training._replace(level=self._level.value))
            self._try(partial(train_batch, encoder, seed, sizes, mix), -1)
            seed += stride

    def _try(self, make: Callable[[], Arrays], held_out: int) -> None:
        """A run must not end over one batch: a failure is reported and the next seed gets its turn."""
        try:
            self._put(make(), held_out)
        except Exception:
            self._ready.put(traceback.format_exc())

    def _put(self, arrays: Arrays, held_out: int) -> None:
        slot, spots, offset = self._free.get(), [], 0
        for name, array in arrays.items():
            spots.append(Spot(name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // _ALIGN) * _ALIGN
        assert offset <= self._slot_bytes, f"a batch of {offset} bytes does not fit a slot of {self._slot_bytes}"
        for spot, array in zip(spots, arrays.values(), strict=True):
            self._view(slot, spot)[...] = array
        self._ready.put(Ready(slot, spots, held_out))

    def _view(self, slot: int, spot: Spot) -> Array:
        count = int(np.prod(spot.shape))
        flat = np.frombuffer(self._memory, spot.dtype, count, slot * self._slot_bytes + spot.offset)
        return flat.reshape(spot.shape)


class Feeder:
    """A thread that brings batches to the device while the trainer computes. Evaluation batches are kept aside."""

    def __init__(self, pool: Pool, device: torch.device, held_out: int) -> None:
        self._pool, self._device = pool, device
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=3)
        stream: Any = torch.cuda.Stream  # untyped in PyTorch
        self._stream = stream(device) if device.type == "cuda" else None
        self._stop = threading.Event()
        self.held_out: dict[int, Batch] = {}
        self.wanted = held_out
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        if self._stream is not None:
            for tensor in item.values():
                tensor.record_stream(torch.cuda.current_stream())
        return item

    def close(self) -> None:
        self._stop.set()
        self._pool.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                ready, arrays = self._pool.take()
                batch = self._moved(arrays)
                self._pool.release(ready)
                if ready.held_out >= 0:
                    self.held_out[ready.held_out] = batch
                else:
                    self._offer(batch)
        except Exception as error:
            self._offer(error)

    def _offer(self, item: Batch | Exception) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.5)
                return

    def _moved(self, arrays: Arrays) -> Batch:
        if self._stream is None:
            return {name: torch.from_numpy(array.copy()).to(self._device) for name, array in arrays.items()}
        with torch.cuda.stream(self._stream):
            moved = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        self._stream.synchronize()
        return moved
