"""Copies between the blocks of a cache and a staging buffer: the kernel against PyTorch."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.ops.copy_kv_blocks import copy_blocks
from saccade.runner.cuda.kv_host_blocks import _torch_copy_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("to_cache", [False, True])
@pytest.mark.parametrize("width", [8, 1024, 1536])
def test_the_kernel_copies_what_pytorch_copies(width: int, to_cache: bool) -> None:
    cache = torch.randint(-(2**62), 2**62, (3, 7, width), device=DEVICE)
    staging = torch.randint(-(2**62), 2**62, (5, 3 * width + 16), device=DEVICE)  # the last columns are another's
    blocks = torch.tensor([6, 0, 3], device=DEVICE)
    found = [cache.clone(), staging.clone()]
    expected = [cache.clone(), staging.clone()]
    copy_blocks(found[0], found[1][:3, : 3 * width], blocks, to_cache=to_cache)
    _torch_copy_blocks(expected[0], expected[1][:3, : 3 * width], blocks, to_cache=to_cache)
    assert not torch.equal(expected[0 if to_cache else 1], [cache, staging][0 if to_cache else 1])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
