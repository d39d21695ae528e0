"""A digest of the tensors that encoding reads, as loaded: two fine-tunes of one shape have two."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from saccade.media.hashing import digest_of

_MAX_THREADS = 8


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over names, dtypes, shapes and bytes. In threads: hashing releases Python's lock."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        digests = pool.map(_digest, tensors.values())
        pairs = sorted(zip(tensors, digests, strict=True))
    return digest_of(*(field for name, digest in pairs for field in (name.encode(), digest)))


def _digest(tensor: Tensor) -> bytes:
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    host = tensor.detach().cpu().contiguous().flatten()
    return digest_of(about, host.view(torch.uint8).numpy().data)
