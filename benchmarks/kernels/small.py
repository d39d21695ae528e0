"""Launches around attention and GEMMs: norms, RoPE, gates, and what makes patches of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.kernels.harness import DEVICE, DTYPE, Call, Case, random, read_us
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.launch.device import Heads
from saccade.kernels.ops import reference, vit_elementwise
from saccade.kernels.ops.norm import add_rms_norm, silu_and_mul
from saccade.kernels.ops.output_gate import sigmoid_gate
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.vision import FusedVision
from saccade.models.vision.backend import TorchVision
from saccade.models.vision.preprocess import PatchLayout, PixelPolicy, as_tensor
from saccade.types.media import Grid, Size

EPS = 1e-6
REPEATS = 50  # of a launch in a graph
TOKENS = (1, 32, 128, 1600, 8192)
PATCHES = (1564, 6256)
HEADS = ((Heads(12, 2, 128), 128), (Heads(16, 4, 256), 64))  # Qwen2-VL-2B, Qwen3.5, and how many dimensions rotate
IMAGES = (Size(644, 476), Size(1280, 960), Size(2560, 1440))
BICUBIC = int(Image.Resampling.BICUBIC)


def _case(work: str, call: Call, moved: int, expected: Tensor, read: Callable[[object], Tensor] | None = None) -> Case:
    """`moved`: elements that are read or written."""
    case = Case(work, {"triton": [call] * REPEATS}, read_us(moved * DTYPE.itemsize), expected, limit=4e-3)
    return case if read is None else case._replace(read=read)


def elementwise(tokens: Iterable[int] = TOKENS, hidden: int = 1536, wide: int = 8960) -> Iterator[Case]:
    for count in tokens:
        x = random(count, hidden)
        residual = random(count, hidden)
        weight = random(hidden)
        expected = torch.stack(reference.add_rms_norm(x, residual, weight, EPS))
        norm = partial(add_rms_norm, x, residual, weight, EPS)
        yield _case(f"add_rms_norm {count}", norm, 4 * x.numel(), expected, torch.stack)  # type: ignore[arg-type]
        gate_up = random(count, 2 * wide)
        expected = reference.silu_and_mul(gate_up)
        yield _case(f"silu_and_mul {count}", partial(silu_and_mul, gate_up), 3 * count * wide, expected)


def heads(tokens: Iterable[int] = TOKENS, shapes: Iterable[tuple[Heads, int]] = HEADS) -> Iterator[Case]:
    """In place on rows of q, k, v and an output gate."""
    for shape, rotary in shapes:
        for count in tokens:
            name = f"of {shape.num_heads}/{shape.num_kv_heads} heads, {count}"
            yield _qk_norm(name, shape, count)
            out, gates = random(2, count, shape.num_heads * shape.head_dim)
            expected = reference.sigmoid_gate(out.clone(), gates)
            yield _case(f"sigmoid_gate {name}", partial(sigmoid_gate, out, gates), 3 * out.numel(), expected)
            yield _rotary(name, shape, rotary, count)


def _qk_norm(name: str, shape: Heads, count: int) -> Case:
    width = shape.num_heads + 2 * shape.num_kv_heads
    rows = random(count, width + shape.num_heads, shape.head_dim)
    twin = rows.clone()
    weights = torch.rand(2, shape.head_dim, device=DEVICE) + 0.5
    reference.qk_rms_norm(twin[:, :width], *weights, shape.num_heads, EPS)
    norm = partial(qk_rms_norm, rows[:, :width], *weights, shape.num_heads, EPS)
    moved = 2 * count * shape.head_dim * (width - shape.num_kv_heads)
    return _case(f"qk_rms_norm {name}", norm, moved, twin, lambda _: rows)


def _rotary(name: str, shape: Heads, rotary: int, count: int) -> Case:
    """One slot is padding, which is stored nowhere."""
    parts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    rows = random(count, sum(parts), shape.head_dim)
    caches = random(2, 2 * count, parts[1], shape.head_dim)
    cos, sin = random(2, count, rotary)
    slots = torch.randperm(2 * count, device=DEVICE)[:count]
    slots[count // 2] = -1
    twin = rows.clone()
    twin_caches = caches.clone()
    reference.rotary_and_store(*twin.split(parts, dim=1), cos, sin, *twin_caches, slots)
    turn = partial(rotary_and_store, *rows.split(parts, dim=1), cos, sin, *caches, slots)
    moved = count * (shape.head_dim * 4 * parts[1] + 2 * rotary * (parts[0] + 1))
    expected = torch.cat((twin[:, : parts[0]].flatten(), twin_caches.flatten()))
    return _case(
        f"rotary_and_store {name}", turn, moved, expected,
        lambda _: torch.cat((rows[:, : parts[0]].flatten(), caches.flatten())),
    )  # fmt: skip


# --- the vision encoder -------------------------------------------------------------------------------------------


def vision(patches: Iterable[int] = PATCHES, hidden: int = 1280, wide: int = 5120, count: int = 16) -> Iterator[Case]:
    for rows in patches:
        x = random(rows, hidden)
        weight, bias, shift = random(3, hidden)
        expected = F.layer_norm(x.float(), (hidden,), weight.float(), bias.float(), EPS)
        norm = partial(vit_elementwise.norm_then_add, x, weight, bias, EPS, shift)
        yield _case(f"norm_then_add {rows}", norm, 3 * x.numel(), expected)
        up = random(rows, wide)
        expected = up.float() * torch.sigmoid(1.702 * up.float())
        yield _case(f"quick_gelu {rows}", partial(vit_elementwise.quick_gelu, up), 2 * up.numel(), expected)
        yield _rotate_half(random(rows, 3, count, hidden // count))


def _rotate_half(qkv: Tensor) -> Case:
    rows, _, _, dim = qkv.shape
    angles = 100 * torch.rand(rows, dim // 2, device=DEVICE)
    rotary = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    low, high = qkv[:, :2].float().chunk(2, dim=-1)
    cos = angles.cos()[:, None, None]
    sin = angles.sin()[:, None, None]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    expected = torch.cat((turned, qkv[:, 2:].float()), dim=1)
    moved = 4 * qkv.numel() // 3
    turn = partial(vit_elementwise.rotate_half, qkv, rotary)
    return _case(f"rotate_half {rows}", turn, moved, expected, lambda _: qkv)


def images(sizes: Iterable[Size] = IMAGES) -> Iterator[Case]:
    """Resizing must be Pillow's, byte for byte; patches are those of PyTorch."""
    generator = np.random.default_rng(0)
    ours = FusedVision()
    plain = TorchVision()
    for size in sizes:
        image = generator.integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
        there = as_tensor(image).to(DEVICE)
        fitted = Size(max(28, round(size.width / 28) * 28 - 28), max(28, round(size.height / 28) * 28 - 28))
        resize = partial(ours.resize, there, fitted, BICUBIC)
        expected = torch.tensor(np.asarray(Image.fromarray(image).resize(fitted, Image.Resampling.BICUBIC)))
        beside = {"torch": [partial(plain.resize, there, fitted, BICUBIC)] * 4}
        floor = read_us(image.nbytes + expected.nbytes)
        name = f"{size.width}x{size.height}"
        calls: list[Call] = [resize] * 4
        yield Case(f"resize {name}", {"triton": calls}, floor, expected.to(DEVICE), beside, limit=0, in_graph=False)
        yield _patches(name, resize(), ours, plain, fitted)


def _patches(name: str, image: Tensor, ours: FusedVision, plain: TorchVision, size: Size) -> Case:
    grid = Grid(1, size.height // 14, size.width // 14)
    layout = PatchLayout(14, 2, 2)
    arguments = (image, grid, layout, PixelPolicy(), DTYPE)
    cut: list[Call] = [partial(ours.cut, *arguments)] * 4
    expected = plain.cut(*arguments)
    return Case(
        f"cut {name}", {"triton": cut}, read_us(image.nbytes + expected.nbytes), expected, limit=4e-3, in_graph=False
    )
