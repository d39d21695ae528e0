"""One of several engines on this machine: which GPU it takes, or which part of the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from saccade.errors import ConfigError
from saccade.options import Options, Replica
from saccade.runner.memory import device_of

_MAX_DECODE_THREADS = 8


class Placement(NamedTuple):
    options: Options
    memory_parts: int = 1  # engines between which the automatic cache memory is divided
    reasons: tuple[str, ...] = ()


def place(options: Options, replica: Replica) -> Placement:
    """Sets the number of PyTorch threads of this process where several engines share a CPU."""
    if replica.is_alone:
        return Placement(options)
    options = replace(options, image_decode_threads=options.image_decode_threads or decode_threads(replica))
    if device_of(options.device).type == "cuda":
        return Placement(replace(options, device=_gpu(options.device, replica)))
    threads = max(1, torch.get_num_threads() // replica.count)
    torch.set_num_threads(threads)
    reason = (
        f"{replica.count} engines share this CPU: each has {threads} of its threads and "
        f"1/{replica.count} of the automatic memory for KV blocks and embeddings"
    )
    return Placement(options, replica.count, (reason,))


def decode_threads(replica: Replica = Replica()) -> int:  # noqa: B008 (immutable)
    """Threads that decode images, where no option says how many."""
    return max(1, min((os.cpu_count() or 1) // replica.count, _MAX_DECODE_THREADS))


def _gpu(wanted: str, replica: Replica) -> str:
    if ":" in wanted:
        problem = f"device={wanted} names one GPU, but replicas={replica.count} need one each"
        raise ConfigError(f"{problem}; use --device cuda, and CUDA_VISIBLE_DEVICES to choose which")
    found = torch.cuda.device_count()
    if replica.count > found:
        problem = f"replicas={replica.count} need a GPU each, but PyTorch sees {found} here"
        raise ConfigError(f"{problem}; use --replicas {found}, or --device cpu")
    return f"cuda:{replica.index}"
