"""Kernels over an FP8 KV cache give what dequantised keys and values would, and store what PyTorch stores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.models.layers.torch_attention import as_stored
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, SMALL, Paged, assert_close, ints, random

FP8 = torch.float8_e4m3fn
SCALES = (0.25, 0.02)
SEQ_LENS = [1, 37, 130]


def paged_fp8(dtype: torch.dtype, dim: int = 16, scales: tuple[float, float] = SCALES) -> Paged:
    return Paged.of(SEQ_LENS, kv_heads=2, dim=dim, dtype=dtype).in_fp8(scales)


def as_bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("splits", [1, 4, 8])
def test_decode_equals_attention_to_dequantised_keys_and_values(splits: int, dtype: torch.dtype) -> None:
    paged, q = paged_fp8(dtype), random(3, 4, 16, dtype=dtype)
    expected = paged.expected(q, [1, 1, 1])
    assert_close(paged.decode(q, splits), expected)


@pytest.mark.parametrize("dim", [80, 128, 256])
def test_decode_of_fp8_takes_every_head_size_with_its_own_launch(dim: int) -> None:
    paged, q = paged_fp8(HALF, dim), random(3, 4, dim, dtype=HALF)
    expected = paged.expected(q, [1, 1, 1])
    assert_close(paged.decode(q, launch=None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_prefill_equals_attention_to_dequantised_keys_and_values(splits: int, dtype: torch.dtype) -> None:
    lengths = [1, 20, 33]
    paged, q = paged_fp8(dtype), random(sum(lengths), 4, 16, dtype=dtype)
    assert_close(paged.prefill(q, lengths, splits=splits), paged.expected(q, lengths))


@pytest.mark.parametrize("rows", [64, 128])
def test_prefill_of_fp8_runs_with_its_own_launch(rows: int) -> None:
    lengths = [1, 20, 33]
    paged, q = paged_fp8(HALF, 128), random(sum(lengths), 4, 128, dtype=HALF)
    assert_close(paged.prefill(q, lengths, rows, launch=None), paged.expected(q, lengths))


@pytest.mark.parametrize("rotating", [16, 8])
@pytest.mark.parametrize("parts", [1, 2])
def test_prefill_stores_keys_and_values_as_pytorch_quantises_them(parts: int, rotating: int) -> None:
    """Some saturate."""
    dim, kv_heads, heads, tokens = 16, 2, 4, 5
    qkv = random(parts, tokens, heads + 2 * kv_heads, dim) * 60
    qkv = qkv if parts > 1 else qkv[0]
    cos, sin = random(2, tokens, rotating, seed=1)
    slots, plain = ints([3, -1, 0, 7, 5], torch.int64), torch.zeros(2, 8, kv_heads, dim, device=DEVICE)
    stored = torch.zeros_like(plain).to(FP8)
    for caches, scales in ((plain, (1.0, 1.0)), (stored, SCALES)):
        q, k, v = torch.split(qkv.clone(), [heads, kv_heads, kv_heads], dim=-2)
        rotary_and_store(q, k, v, cos, sin, *caches, slots, scales=scales)
    for found, given, scale in zip(stored, plain, SCALES, strict=True):
        assert torch.equal(as_bytes(found), as_bytes(as_stored(given, scale, FP8)))
    assert (stored.float().abs() == 448).any() and stored.float().abs().max() == 448


def test_decode_stores_the_new_token_as_pytorch_quantises_it_and_attends_to_what_it_stored() -> None:
    paged, q = paged_fp8(torch.float32), random(3, 4, 16)
    new = paged.new_tokens(q)
    new = new._replace(qkv=torch.cat((q, random(3, 4, 16, seed=5) * 40), dim=1))
    given = (paged.tables, ints(SEQ_LENS), BLOCK, 0.2, DecodeWorkspace.allocate(3, 4, 2, 16, DEVICE))
    found = paged_decode(new, paged.k, paged.v, *given, splits=2, launch=SMALL, scales=SCALES)
    slots = new.slots.long()
    for cache, part, scale in zip((paged.k, paged.v), new.qkv[:, 4:].split(2, dim=1), SCALES, strict=True):
        assert torch.equal(as_bytes(cache)[slots], as_bytes(as_stored(part, scale, FP8)))
    assert_close(found, paged.expected(q, [1, 1, 1]))


def test_queries_that_float16_cannot_hold_saturate() -> None:
    """bfloat16 has a larger range than float16, in which FP8 is multiplied."""
    paged = paged_fp8(torch.float32, scales=(1.0, 1.0))
    q = torch.full((3, 4, 16), 1e30, dtype=torch.bfloat16, device=DEVICE)
    new: NewTokens = paged.new_tokens(q)
    given = (paged.tables, ints(SEQ_LENS), BLOCK, 1e-6, DecodeWorkspace.allocate(3, 4, 2, 16, DEVICE))
    assert paged_decode(new, paged.k, paged.v, *given, launch=SMALL).float().isfinite().all()
