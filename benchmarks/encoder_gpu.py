"""The encoder on a GPU: is it right to bfloat16's rounding, how far from the floor? `python -m benchmarks.encoder_gpu`

Random weights of Qwen2-VL-2B's tower; its decoder is left out but for its width. A part that fails prints the end of
its traceback, and the next one runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.encoder_inputs import (
    CPU,
    CUDA,
    FLOPS,
    Call,
    config,
    device_ms,
    finish,
    floor_ms,
    geometry_of,
    item_of,
    model_of,
    patches_for,
    photo,
    pixels_of,
    reference_of,
    relative,
    wall_ms,
)
from saccade import costs
from saccade.kernels.attention.registry import VIT
from saccade.kernels.attention.vit import Attend, PackedAttention, TiledVit, VisionHeads, VitKernel
from saccade.kernels.ops import vit_elementwise
from saccade.models.cuda.vision import FusedVision
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.layers.rotary_embedding import rotate
from saccade.models.layers.torch_attention import packed_attention
from saccade.models.vision.backend import RunBlocks, TorchVision, VisionOps
from saccade.models.vision.blocks import RotaryCosSin, VisionBlock, angles_of, grid_positions
from saccade.models.vision.preprocess import as_tensor
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.upload import Upload
from saccade.types.media import Grid, MediaItem, Size

BICUBIC = int(Image.Resampling.BICUBIC)
SIZES = {"1288x952": [Grid(1, 68, 92)], "644x476": [Grid(1, 34, 46)], "8 of 644x476": [Grid(1, 34, 46)] * 8,
         "16 of 336x336": [Grid(1, 24, 24)] * 16, "2548x1428": [Grid(1, 102, 182)]}  # fmt: skip
IMAGES = [Size(644, 476), Size(1280, 960), Size(2560, 1440)]


class Row(NamedTuple):
    work: str
    variant: str
    value: float
    unit: str
    floor: float = 0.0  # in the same unit; 0: there is none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes longest")
    skips_compile = parser.parse_args().no_compile
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "Pillow", PIL.__version__, file=sys.stderr)
    started = time.perf_counter()
    rows: list[Row] = []
    for part in PARTS:
        if skips_compile and part is compiled_layers:
            continue
        for row in attempt(part):
            rows.append(row)
            ratio = f"floor {row.floor:8.3f}  x{row.value / row.floor:.2f}" if row.floor else ""
            print(f"{row.work:30} {row.variant:34} {row.value:10.4g} {row.unit:14} {ratio}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s")
    print(json.dumps([list(row) for row in rows]))


def attempt(part: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """What a part yields until it fails, if it does."""
    try:
        with torch.inference_mode():
            yield from part()
    except Exception:
        name = f"{getattr(part, 'func', part).__name__} {getattr(part, 'args', '')}"
        print("FAILED", name, "\n".join(traceback.format_exc().splitlines()[-12:]), flush=True)


# --- is it right? -------------------------------------------------------------------------------------------------


def resize_equals_pillow() -> Iterator[Row]:
    random = np.random.default_rng(0)
    wrong, worst, total = 0, 0, 0
    for _ in range(20):
        width, height, to_width, to_height = (int(n) for n in random.integers(20, 1500, 4))
        image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = np.asarray(Image.fromarray(image).resize((to_width, to_height), Image.Resampling.BICUBIC))
        found = FusedVision().resize(as_tensor(image).to(CUDA), Size(to_width, to_height), BICUBIC).cpu().numpy()
        wrong += int((found != expected).sum())
        worst = max(worst, int(np.abs(found.astype(int) - expected).max()))
        total += found.size
    yield Row("resize against Pillow", "20 sizes", wrong / total, "unequal share")
    yield Row("resize against Pillow", "largest difference", worst, "levels")


def patches_equal_the_cpu() -> Iterator[Row]:
    image = pixels_of(photo(Size(1000, 700)))
    made = model_of(config(layers=1))
    geometry = geometry_of(Size(1000, 700))
    expected = reference_of(made).prepare(image, geometry)
    found = made.prepare(as_tensor(image).to(CUDA), geometry)
    yield Row("patches", "bf16, against float32 on the CPU", relative(found, expected), "relative")


def embeddings_equal_the_cpu() -> Iterator[Row]:
    shapes = {"small tower, 4 layers": config(4, 256, 4), "2 layers of full width": config(2)}
    grids = [Grid(1, 12, 16), Grid(1, 8, 8)]
    for name, shape in shapes.items():
        made = model_of(shape)
        patches = patches_for(grids)
        expected = torch.cat(finish(reference_of(made).encode(patches.float().cpu(), grids)))
        ways: dict[str, VisionOps] = {variant: FusedVision(ATTENTION[variant]) for variant in TOWERS}
        for variant, made.ops in {**ways, "plain PyTorch": TorchVision()}.items():
            found = torch.cat(finish(made.encode(patches, grids)))
            yield Row(f"embeddings, {name}", variant, relative(found, expected), "relative")


def jpeg_to_embeddings_equals_the_cpu() -> Iterator[Row]:
    made = model_of(config(layers=2))
    items = [item_of(Size(333, 250), 1), item_of(Size(200, 480), 2)]
    twin = reference_of(made)
    found, expected = (_encoded(m, items, d) for m, d in ((made, CUDA), (twin, CPU)))
    error = max(relative(found[item.key], expected[item.key]) for item in items)
    yield Row("JPEG to embeddings", "2 pictures in a pass", error, "relative")


def _encoded(made: Qwen2VL, items: Sequence[MediaItem], device: torch.device) -> dict[bytes, Tensor]:
    stage = LocalEncoder(made, 10**5, 4, device)
    stage.submit(items)
    stage.advance(None)
    done = stage.poll()
    stage.close()
    assert not done.errors, done.errors
    return done.embeddings


# --- before the tower ---------------------------------------------------------------------------------------------


def before_the_tower() -> Iterator[Row]:
    made = model_of(config(layers=1))
    upload, plain = Upload(made, CUDA), TorchVision()
    for size in IMAGES:
        name, data, geometry = f"{size.width}x{size.height}", photo(size), geometry_of(size)
        image = pixels_of(data)
        pinned = as_tensor(image).pin_memory()
        there = pinned.to(CUDA)
        small = made.ops.resize(there, geometry.resized, BICUBIC)
        cut = (small, geometry.grid, made.layout, made.pixels, torch.bfloat16)
        yield Row(name, "decode JPEG", wall_ms(partial(pixels_of, data)), "ms")
        yield Row(name, "decoded to patches, with waits", wall_ms(partial(upload, image, geometry)), "ms")
        calls: dict[str, Call] = {
            "copy to the device": partial(pinned.to, CUDA, non_blocking=True),
            "resize": partial(made.ops.resize, there, geometry.resized, BICUBIC),
            "resize, plain PyTorch": partial(plain.resize, there, geometry.resized, BICUBIC),
            "normalise and cut": partial(made.ops.cut, *cut),
            "normalise and cut, plain PyTorch": partial(plain.cut, *cut),
        }
        for variant, call in calls.items():
            yield Row(name, variant, device_ms(call, 0.2), "ms")


# --- the tower ----------------------------------------------------------------------------------------------------


def whole_tower(variant: str) -> Iterator[Row]:
    made = model_of(config())
    made.ops = FusedVision(ATTENTION[variant])
    for name, grids in SIZES.items():
        patches = patches_for(grids)
        ms = device_ms(lambda: finish(made.encode(patches, grids)))  # noqa: B023
        yield Row(f"encode {name}", variant, ms, "ms", floor_ms(grids))


def plain_tower() -> Iterator[Row]:
    made = model_of(config())
    made.ops = TorchVision()
    for name in ("1288x952", "644x476"):
        patches, grids = patches_for(SIZES[name]), SIZES[name]
        ms = device_ms(lambda: finish(made.encode(patches, grids)))  # noqa: B023
        yield Row(f"encode {name}", "plain PyTorch", ms, "ms", floor_ms(grids))


def host_and_graph() -> Iterator[Row]:
    """What the host needs to launch a layer, and what a recorded tower would save."""
    made = model_of(config())
    for name in ("644x476", "1288x952"):
        grids = SIZES[name]
        patches, run = patches_for(grids), begin(made, grids)
        call = partial(tower_pass, made, run, patches)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        yield Row(f"encode {name}", "host, a layer", (time.perf_counter() - start) / 32 * 1e6, "us")
        begun = wall_ms(partial(begin, made, grids))
        yield Row(f"encode {name}", "angles and tiles", begun, "ms")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        yield Row(f"encode {name}", "triton, CUDA graph", device_ms(graph.replay), "ms", floor_ms(grids))


def begin(made: Qwen2VL, grids: Sequence[Grid]) -> RunBlocks:
    tower = made.tower
    places = grid_positions(grids, tower.head_dim, tower.theta, tower.merge, CUDA)
    return made.ops.begin([grid.patches for grid in grids], places, CUDA)


def tower_pass(made: Qwen2VL, run: RunBlocks, patches: Tensor) -> Tensor:
    blocks, x, done = made.tower.blocks, made.tower.patch(patches), 0
    while done < len(blocks):
        x, count = run(blocks[done:], x)
        done += count
    return made.tower.merger(x)


def steps_of_a_layer() -> Iterator[Row]:
    """Each launch of a layer by itself: where the time goes."""
    made = model_of(config(layers=1))
    block = made.tower.blocks[0]
    for name in ("1288x952", "644x476", "8 of 644x476"):
        grids = SIZES[name]
        tokens = sum(grid.patches for grid in grids)
        x, wide = (torch.randn(tokens, n, device=CUDA, dtype=torch.bfloat16) for n in (1280, 5120))
        rotary = torch.rand(tokens, 80, device=CUDA)
        qkv = torch.randn(tokens, 3, 16, 80, device=CUDA, dtype=torch.bfloat16)
        assert block.out.bias is not None
        norm, matrix = block.attention_norm, 2 * tokens * 1280 * 1280 / FLOPS * 1e3
        calls: dict[str, tuple[Call, float]] = {
            "norm": (partial(vit_elementwise.norm_then_add, x, norm.weight, norm.bias, 1e-6, block.out.bias), 0),
            "norm, PyTorch": (partial(norm, x), 0),
            "qkv": (partial(block.qkv, x), 3 * matrix),
            "rotate": (partial(vit_elementwise.rotate_half, qkv, rotary), 0),
            "out, added": (partial(torch.addmm, x, x, block.out.weight.T, out=torch.empty_like(x)), matrix),
            "out, added in place": (partial(x.addmm_, x.clone(), block.out.weight.T), matrix),
            "up": (partial(block.up, x), 4 * matrix),
            "activation": (partial(vit_elementwise.quick_gelu, wide.clone()), 0),
            "down, added in place": (partial(x.addmm_, wide, block.down.weight.T), 4 * matrix),
            "down": (partial(block.down, wide), 4 * matrix),
        }
        for variant, (call, floor) in calls.items():
            yield Row(f"layer of {name}", variant, device_ms(call, 0.1) * 1e3, "us", floor * 1e3)


def attention_alone(variant: str) -> Iterator[Row]:
    """Heads padded to other sizes, too: a merged projection could write them so."""
    for name in ("1288x952", "644x476", "8 of 644x476"):
        lengths = [grid.patches for grid in SIZES[name]]
        floor = sum(4 * n * n * 1280 for n in lengths) / FLOPS * 1e6
        for dim in (80, 96, 128):
            qkv = torch.randn(sum(lengths), 3, 16, dim, device=CUDA, dtype=torch.bfloat16)
            attend = PackedAttention(ATTENTION[variant], lengths, CUDA)
            us = device_ms(partial(attend, qkv, 80**-0.5), 0.15) * 1e3
            yield Row(f"attention {name}", f"{variant}, d {dim}", us, "us", floor)


def _by_varlen(lengths: Sequence[int], device: torch.device) -> Attend:
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)

    def attend(qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)
        mixed = varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths))
        assert isinstance(mixed, Tensor)
        return mixed

    return attend


def new_sizes(variant: str) -> Iterator[Row]:
    """A picture of a size never seen: what a backend sets up for it, beside the work itself."""
    made = model_of(config())
    made.ops = FusedVision(ATTENTION[variant])
    finish(made.encode(patches_for([Grid(1, 40, 40)]), [Grid(1, 40, 40)]))
    for columns in (42, 44, 46):
        grids = [Grid(1, 40, columns)]
        patches = patches_for(grids)
        first, again = (wall_ms(lambda: finish(made.encode(patches, grids)), 1) for _ in range(2))  # noqa: B023
        yield Row(f"first of 40x{columns} patches", variant, first - again, "ms more")


def memory() -> Iterator[Row]:
    made = model_of(config())
    assert made.config.vision is not None
    per_patch = costs.encode_bytes_per_patch(made.config.vision, made.config.text, "bfloat16")
    for name in ("1288x952", "2548x1428"):
        grids = SIZES[name]
        finish(made.encode(patches_for(grids), grids))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        finish(made.encode(patches_for(grids), grids))
        taken = torch.cuda.max_memory_allocated() - before
        yield Row(f"memory of {name}", "peak", taken / 1e6, "MB", per_patch * grids[0].patches / 1e6)


# --- from bytes to embeddings -------------------------------------------------------------------------------------


def jpeg_to_embeddings() -> Iterator[Row]:
    stage = LocalEncoder(model_of(config()), 32768, 8, CUDA)
    for size in IMAGES:
        name = f"JPEG {size.width}x{size.height}"
        times = []
        for seed in range(4):  # the first one compiles
            item = item_of(size, seed)
            start = time.perf_counter()
            stage.submit([item])
            stage.advance(None)
            done = stage.poll()
            times.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            whole = (time.perf_counter() - start) * 1e3
        own = done.times[item.key]
        yield Row(name, "to embeddings", whole, "ms")
        yield Row(name, "until all is launched", statistics.median(times[1:]), "ms")
        yield Row(name, "decode_ms", own.decode_ms, "ms")
        yield Row(name, "encode_ms", own.encode_ms, "ms", floor_ms([item.geometry.grid]))
    items = [item_of(Size(1280, 720), seed) for seed in range(64)]
    start = time.perf_counter()
    stage.submit(items)
    stage.advance(None)
    torch.cuda.synchronize()
    yield Row("64 JPEGs of 1280x720", "8 threads", 64 / (time.perf_counter() - start), "pictures/s")
    stage.close()


# --- torch.compile ------------------------------------------------------------------------------------------------


def plain_layer(x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """A layer as functions of tensors, so that one compilation serves all layers and lengths."""
    norm1, bias1, w_qkv, b_qkv, w_out, b_out, norm2, bias2, w_up, b_up, w_down, b_down = weights
    qkv = F.linear(F.layer_norm(x, (1280,), norm1, bias1, 1e-6), w_qkv, b_qkv).view(-1, 3, 16, 80).transpose(0, 2)
    q, k = (rotate(qkv[:, i].float(), cos, sin).to(x.dtype) for i in range(2))  # [heads, T, d]
    mixed = F.scaled_dot_product_attention(q[None], k[None], qkv[None, :, 2], scale=80**-0.5)[0]
    x = x + F.linear(mixed.transpose(0, 1).flatten(1), w_out, b_out)
    wide = F.linear(F.layer_norm(x, (1280,), norm2, bias2, 1e-6), w_up, b_up)
    return x + F.linear(wide * torch.sigmoid(1.702 * wide), w_down, b_down)


def weights_of(block: VisionBlock) -> list[Tensor]:
    parts = (block.attention_norm, block.qkv, block.out, block.mlp_norm, block.up, block.down)
    return [tensor for part in parts for tensor in (part.weight, part.bias) if tensor is not None]


def compiled_layers() -> Iterator[Row]:
    made = model_of(config())
    weights = [weights_of(block) for block in made.tower.blocks]
    compiled = torch.compile(plain_layer, dynamic=True)
    start = time.perf_counter()
    for name in ("1288x952", "644x476"):
        grids = SIZES[name]
        x = torch.randn(grids[0].patches, 1280, device=CUDA, dtype=torch.bfloat16)
        angles = angles_of(grid_positions(grids, 80, 1e4, 2, CUDA))

        def tower(x: Tensor = x, angles: RotaryCosSin = angles) -> Tensor:
            for own in weights:
                x = compiled(x, own, *angles)
            return x

        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                yield Row(f"encode {name}", f"torch.compile, {backend.name}", device_ms(tower), "ms", floor_ms(grids))
    yield Row("torch.compile", "and runs", time.perf_counter() - start, "s")


def _by_sdpa(backend: SDPBackend, lengths: Sequence[int], device: torch.device) -> Attend:
    def attend(qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)
        with sdpa_kernel(backend):
            return packed_attention(q, k, v, lengths, scale)

    return attend


class _Launched(TiledVit):
    def __init__(self, start: Callable[[Sequence[int], torch.device], Attend]) -> None:
        self._start = start

    def begin(self, lengths: Sequence[int], heads: VisionHeads, device: torch.device) -> Attend:
        return self._start(lengths, device)


ATTENTION: dict[str, Sequence[VitKernel]] = {
    "triton": [TiledVit()],
    "hopper": [row.build(CUDA) for row in VIT],
    # What the engine's kernels are compared with.
    "cudnn": [_Launched(partial(_by_sdpa, SDPBackend.CUDNN_ATTENTION))],
    "flash": [_Launched(partial(_by_sdpa, SDPBackend.FLASH_ATTENTION))],
    "varlen_attn": [_Launched(_by_varlen)],
}
TOWERS = [variant for variant in ATTENTION if variant != "varlen_attn"]
PARTS: list[Callable[[], Iterator[Row]]] = [
    resize_equals_pillow, patches_equal_the_cpu, embeddings_equal_the_cpu, jpeg_to_embeddings_equals_the_cpu,
    before_the_tower, *(partial(whole_tower, variant) for variant in TOWERS), host_and_graph, steps_of_a_layer,
    jpeg_to_embeddings, memory, *(partial(new_sizes, variant) for variant in TOWERS),
    *(partial(attention_alone, variant) for variant in ATTENTION), plain_tower, compiled_layers,
]  # fmt: skip


if __name__ == "__main__":
    main()
