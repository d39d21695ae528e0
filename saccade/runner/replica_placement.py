"""One of several workers of a server: which GPU it takes, or which part of a CPU.

Engines take a GPU each, from the first on. Encoder workers take the GPUs after them in turn; where there are
none, those of the engines.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.runner.device_memory import device_of
from saccade.types.replica import Replica

_MAX_DECODE_THREADS = 8


class WorkerPlacement(NamedTuple):
    options: Options
    memory_parts: int = 1  # workers between which the automatic cache memory is divided
    reasons: tuple[str, ...] = ()
    encoders_beside: int = 0  # encoder workers on the same GPU


def place(options: Options, replica: Replica) -> WorkerPlacement:
    """Sets the number of PyTorch threads of this process where several workers share a CPU."""
    if replica.num_workers == 1:
        return WorkerPlacement(options)
    options = replace(options, image_decode_threads=decode_threads(options, replica))
    if replica.has_own_device:
        return _place_on_own(options, _num_local(replica))
    if device_of(options.device).type == "cuda":
        return _place_on_gpu(options, replica)
    threads = max(1, torch.get_num_threads() // replica.num_workers)
    torch.set_num_threads(threads)
    encoders = f" and {_some(len(replica.encoders), 'encoder worker')}" if replica.encoders else ""
    reason = (
        f"{_some(replica.count, 'engine')}{encoders} share this CPU: each has {threads} of its threads and "
        f"1/{replica.num_workers} of the automatic memory for KV blocks and embeddings"
    )
    return WorkerPlacement(options, replica.num_workers, (reason,))


def _place_on_own(options: Options, num_local: int) -> WorkerPlacement:
    """A GPU, or threads of a CPU, that are reserved for this worker alone."""
    if device_of(options.device).type == "cuda" or num_local == 1:
        return WorkerPlacement(options)
    threads = _some(torch.get_num_threads(), "thread")
    reason = (
        f"{num_local} workers may share this machine: each has {threads} and "
        f"1/{num_local} of the automatic memory for KV blocks and embeddings"
    )
    return WorkerPlacement(options, num_local, (reason,))


def device_label(device: torch.device) -> str:
    """A name for people: "cpu", or the GPU as the machine counts it, whatever this process sees of them."""
    if device.type != "cuda":
        return device.type
    index = _gpu_index(device)
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    number = visible[index] if index < len(visible) else str(index)
    return f"GPU {number}, {torch.cuda.get_device_name(device)}"


def _num_local(replica: Replica) -> int:
    """Workers that share its machine, or may."""
    return replica.num_workers if replica.num_local is None else replica.num_local


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def decode_threads(options: Options, replica: Replica = Replica()) -> int:  # noqa: B008 (immutable)
    """Threads that decode images: as many as the option says, or one for each core."""
    if options.image_decode_threads:
        return options.image_decode_threads
    return max(1, min((os.cpu_count() or 1) // _num_local(replica), _MAX_DECODE_THREADS))


def _place_on_gpu(options: Options, replica: Replica) -> WorkerPlacement:
    devices = [_encoder_gpu(options.device, replica, index) for index in range(len(replica.encoders))]
    if replica.encoder is not None:
        return WorkerPlacement(replace(options, device=devices[replica.encoder]))
    name = options.device if replica.is_alone else _gpu(options.device, replica)
    index = _gpu_index(device_of(name))
    beside = sum(_gpu_index(device_of(encoder)) == index for encoder in devices)
    reasons = (f"encoder workers on {', '.join(devices)}",) if replica.encoders else ()
    return WorkerPlacement(replace(options, device=name), reasons=reasons, encoders_beside=beside)


def _gpu_index(device: torch.device) -> int:
    return device.index or 0


def _encoder_gpu(name: str, replica: Replica, index: int) -> str:
    if ":" in name:
        return name
    spare = torch.cuda.device_count() - replica.count
    gpu = replica.count + index % spare if spare > 0 else index % replica.count
    return f"cuda:{gpu}"


def _gpu(name: str, replica: Replica) -> str:
    if ":" in name:
        problem = f"device={name} names one GPU, but replicas={replica.count} need one each"
        raise ConfigError(f"{problem}; use --device cuda, and CUDA_VISIBLE_DEVICES to choose which")
    count = torch.cuda.device_count()
    if replica.count > count:
        problem = f"replicas={replica.count} need a GPU each, but PyTorch sees {count} here"
        raise ConfigError(f"{problem}; use --replicas {count}, or --device cpu")
    return f"cuda:{replica.index}"
