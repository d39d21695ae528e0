"""The encoder on a GPU: right to the rounding of bfloat16, and how far from the floor. `python -m benchmarks.encoder_gpu`

Random weights of Qwen2-VL-2B's tower; its decoder is left out but for its width. A part that fails prints the end of
its traceback, and the next one runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from saccade import costs
from saccade.config import ModelConfig, model_config
from saccade.kernels import vit_steps
from saccade.models import load_model
from saccade.models.attention import packed_attention
from saccade.models.fused_vision import ATTENTION, FusedVision
from saccade.models.layers import rotate
from saccade.models.pixels import as_tensor
from saccade.models.qwen2_vl import Qwen2VL
from saccade.models.vision import Angles, VisionBlock, grid_angles
from saccade.models.vision_ops import RunBlock, TorchVision
from saccade.runner.encoder import LocalEncoder
from saccade.runner.upload import Upload
from saccade.types import Geometry, Grid, Header, MediaItem, Size

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FLOPS = 800e12  # reachable on an H200
BICUBIC = int(Image.Resampling.BICUBIC)
SIZES = {"1288x952": [Grid(1, 68, 92)], "644x476": [Grid(1, 34, 46)], "8 of 644x476": [Grid(1, 34, 46)] * 8,
         "16 of 336x336": [Grid(1, 24, 24)] * 16, "2548x1428": [Grid(1, 102, 182)]}  # fmt: skip
PICTURES = [Size(644, 476), Size(1280, 960), Size(2560, 1440)]
Call = Callable[[], object]


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
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "Pillow", Image.__version__, file=sys.stderr)
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
        print(f"FAILED {part.__name__}:", "\n".join(traceback.format_exc().splitlines()[-12:]), flush=True)


# --- models, pictures, clocks -------------------------------------------------------------------------------------


def config(layers: int = 32, width: int = 1280, heads: int = 16, text_width: int = 1536) -> ModelConfig:
    vision = {"depth": layers, "embed_dim": width, "hidden_size": text_width, "mlp_ratio": 4, "num_heads": heads,
              "patch_size": 14, "in_channels": 3, "hidden_act": "quick_gelu", "spatial_merge_size": 2,
              "temporal_patch_size": 2}  # fmt: skip
    text = {"hidden_size": text_width, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096,
            "model_type": "qwen2_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}  # fmt: skip
    return model_config({"model_type": "qwen2_vl", "image_token_id": 3, "text_config": text, "vision_config": vision})


def model_of(shape: ModelConfig, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16) -> Qwen2VL:
    made = load_model(None, shape, dtype=dtype, device=device, load_format="dummy")
    assert isinstance(made, Qwen2VL)
    return made


def reference_of(made: Qwen2VL) -> Qwen2VL:
    """The same weights in float32 on the CPU."""
    twin = model_of(made.config, CPU, torch.float32)
    for name, tensor in twin.params.targets.items():
        tensor.copy_(made.params.targets[name])
    return twin


def photo(size: Size, seed: int = 0) -> bytes:
    """A smooth random picture with some grain, as JPEG bytes."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 255, (size.height // 40, size.width // 40, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.integers(-12, 13, smooth.shape, dtype=np.int16)
    stream = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def geometry_of(size: Size) -> Geometry:
    fitted = Size(round(size.width / 28) * 28, round(size.height / 28) * 28)
    grid = Grid(1, fitted.height // 14, fitted.width // 14)
    return Geometry(fitted, grid, grid.patches // 4, grid.patches // 4)


def item_of(size: Size, seed: int) -> MediaItem:
    header = Header("jpeg", size, 1, 1, "RGB")
    return MediaItem(f"{size} {seed}".encode(), "image", photo(size, seed), header, geometry_of(size))


def device_ms(call: Call, seconds: float = 0.4) -> float:
    """Median by the device's clock, after three calls that compile and fill caches."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def wall_ms(call: Call, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def finish(layers: Any) -> list[Tensor]:
    while True:
        try:
            next(layers)
        except StopIteration as stop:
            return list(stop.value)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def patches_for(grids: Sequence[Grid]) -> Tensor:
    return torch.randn(sum(grid.patches for grid in grids), 1176, device=CUDA, dtype=torch.bfloat16)


def floor_ms(grids: Sequence[Grid]) -> float:
    shape = config()
    assert shape.vision is not None
    return sum(costs.encode_flops(shape.vision, shape.text, grid.patches) for grid in grids) / FLOPS * 1e3


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
    image = np.asarray(Image.open(io.BytesIO(photo(Size(1000, 700)))))
    made = model_of(config(layers=1))
    geometry = geometry_of(Size(1000, 700))
    expected = reference_of(made).prepare(image, geometry)
    yield Row("patches", "bf16, against float32 on the CPU", relative(made.prepare(as_tensor(image).to(CUDA), geometry), expected), "relative")  # fmt: skip


def embeddings_equal_the_cpu() -> Iterator[Row]:
    shapes = {"small tower, 4 layers": config(4, 256, 4), "2 layers of full width": config(2)}
    grids = [Grid(1, 12, 16), Grid(1, 8, 8)]
    for name, shape in shapes.items():
        made = model_of(shape)
        patches = patches_for(grids)
        expected = torch.cat(finish(reference_of(made).encode(patches.float().cpu(), grids)))
        for variant in ATTENTION:
            made.ops = FusedVision(variant)
            yield Row(f"embeddings, {name}", variant, relative(torch.cat(finish(made.encode(patches, grids))), expected), "relative")  # fmt: skip
        made.ops = TorchVision()
        yield Row(f"embeddings, {name}", "plain PyTorch", relative(torch.cat(finish(made.encode(patches, grids))), expected), "relative")  # fmt: skip


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
    upload = Upload(made, CUDA)
    for size in PICTURES:
        name, data, geometry = f"{size.width}x{size.height}", photo(size), geometry_of(size)
        image = np.asarray(Image.open(io.BytesIO(data)))
        pinned = as_tensor(image).pin_memory()
        there = pinned.to(CUDA)
        small = made.ops.resize(there, geometry.resized, BICUBIC)
        torch_ops = TorchVision()
        yield Row(name, "decode JPEG", wall_ms(lambda: np.asarray(Image.open(io.BytesIO(data)))), "ms")  # noqa: B023
        yield Row(name, "copy to the device", device_ms(lambda: pinned.to(CUDA, non_blocking=True)), "ms", pinned.numel() / 50e6)  # noqa: B023, E501  # fmt: skip
        yield Row(name, "resize", device_ms(lambda: made.ops.resize(there, geometry.resized, BICUBIC)), "ms")  # noqa: B023, E501  # fmt: skip
        yield Row(name, "resize, plain PyTorch", device_ms(lambda: torch_ops.resize(there, geometry.resized, BICUBIC)), "ms")  # noqa: B023, E501  # fmt: skip
        cut = (geometry.grid, made.layout, made.pixels, torch.bfloat16)
        yield Row(name, "normalise and cut", device_ms(lambda: made.ops.cut(small, *cut)), "ms")  # noqa: B023
        yield Row(name, "normalise and cut, plain PyTorch", device_ms(lambda: torch_ops.cut(small, *cut)), "ms")  # noqa: B023, E501  # fmt: skip
        yield Row(name, "decoded to patches, with waits", wall_ms(lambda: upload(image, geometry)), "ms")  # noqa: B023
