"""Self-tests of attention kernels: whether one computes what the Triton kernel does, on the device that it will run on.

Each takes what the registry built, and the case it was built for; it raises if results differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.kernel_types import DecodeKernel, PrefillKernel
from saccade.kernels.attention.prefill_triton import paged_prefill
from saccade.kernels.attention.vit import PartedAttend, ScheduledVit, TiledVit, VisionHeads
from saccade.kernels.launch.device import Heads
from saccade.kernels.launch.kernel_choice import assert_agree
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.reference import parted_columns

_TRITON_ROWS = 64
_PROGRAMS = 7  # of a decode schedule
_VIT_PROGRAMS = (2, 15)  # one item after the other, and some of them cut


def check_decode(
    kernel: DecodeKernel,
    device: torch.device,
    heads: Heads,
    dtype: torch.dtype,
    block_size: int,
    norm_eps: float | None,
) -> None:
    """It must store the same keys and values, too."""
    seq_lens = torch.tensor([200, 1, 64, 65, 600, 0, 0], dtype=torch.int32, device=device)
    caches, tables, new = _decode_example(seq_lens, heads, dtype, block_size)
    if norm_eps is not None:
        q_norm, k_norm = torch.randn(2, heads.head_dim, device=device).to(dtype)
        new = new._replace(q_norm=q_norm, k_norm=k_norm)
    copies = caches.clone()
    scale = heads.head_dim**-0.5
    rest = (tables, seq_lens, block_size, scale, DecodeWorkspace.allocate(len(seq_lens), *heads, device))
    k, v = caches
    expected = paged_decode(new, k, v, *rest, norm_eps=norm_eps or 0.0)
    out = kernel.plan(seq_lens, _PROGRAMS)(new, *copies, *rest, norm_eps=norm_eps or 0.0)
    assert_agree(out[:-2], expected[:-2], 0.02)  # the last two rows are padding
    tolerance = 0 if new.k_norm is None else 0.05  # squares are summed in another order
    assert_agree(copies[0], caches[0], tolerance, equal_nan=True)
    assert_agree(copies[1], caches[1], 0, equal_nan=True)


def _decode_example(
    seq_lens: Tensor, heads: Heads, dtype: torch.dtype, block_size: int
) -> tuple[Tensor, Tensor, NewTokens]:
    """Keys and values [2, slots, kv_heads, d], NaN where the kernel must not read; block tables; the new tokens."""
    device = seq_lens.device
    requests = len(seq_lens)
    blocks = -(-int(seq_lens.max()) // block_size)
    tables = torch.randperm(requests * blocks, device=device).int().view(requests, -1)
    positions = torch.arange(blocks * block_size, device=device).view(1, blocks, block_size)
    caches = torch.randn(2, requests * blocks, block_size, heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    unwritten = positions >= seq_lens.view(-1, 1, 1) - 1
    caches[:, tables.long()] = torch.where(unwritten[..., None, None], float("nan"), caches[:, tables.long()])
    last = (seq_lens - 1).clamp(min=0)
    block = tables.gather(1, (last // block_size).long()[:, None])[:, 0]
    slots = torch.where(seq_lens > 0, block * block_size + last % block_size, -1).int()
    qkv = torch.randn(4, requests, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, device=device)
    cos, sin = torch.randn(2, requests, heads.head_dim, device=device).to(dtype)
    return caches.flatten(1, 2), tables, NewTokens(qkv, cos, sin, slots)


def check_prefill(
    kernel: PrefillKernel, device: torch.device, heads: Heads, dtype: torch.dtype, block_size: int
) -> None:
    """Also with splits, and where softmax weights overflow."""
    lengths = [70, 130]
    seq_len = 2300
    blocks = -(-seq_len // block_size)
    seq_lens = torch.full((2,), seq_len, dtype=torch.int32, device=device)
    tables = torch.randperm(2 * blocks, device=device).int().view(2, -1)
    k, v = torch.randn(2, 2 * blocks * block_size, heads.num_kv_heads, heads.head_dim, device=device).to(dtype)
    k[tables[0, blocks // 2] * block_size] *= 60  # a key with scores larger by hundreds of powers of two
    q = torch.randn(sum(lengths), heads.num_heads, heads.head_dim, device=device).to(dtype)

    def run(attend: Callable[..., Tensor], rows: int, splits: int) -> Tensor:
        tiles = Tiles.of(lengths, rows, device, seq_lens=[seq_len] * 2)
        return attend(q, k, v, tables, seq_lens, tiles, block_size, 0.5, splits=splits)

    expected = run(paged_prefill, _TRITON_ROWS, 1)
    for splits in (1, 3):
        assert_agree(run(kernel.attend, kernel.rows(sum(lengths)), splits), expected, 0.05)


def check_vit(kernel: ScheduledVit, device: torch.device) -> None:
    """Also where softmax weights overflow."""
    lengths = [1500, 257]
    qkv = torch.randn(sum(lengths), 3, 2, 80, device=device, dtype=torch.bfloat16)
    qkv[5, 1] *= 60  # a key of the second tile with scores larger by hundreds of powers of two
    heads = VisionHeads(2, 80, torch.bfloat16)
    expected = TiledVit().begin(lengths, heads, device)(qkv, 1.0)
    parted = qkv.flatten(1)[:, parted_columns(2, 80)].view_as(qkv)
    for programs in _VIT_PROGRAMS:
        attend = kernel.on(programs).begin(lengths, heads, device)
        for _ in range(2):  # the second layer is launched differently
            assert_agree(attend(qkv, 1.0), expected, 0.05)
            if isinstance(attend, PartedAttend):
                assert_agree(attend.parted(parted, 1.0), expected, 0.05)
