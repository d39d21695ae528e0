"""What the encoder's benchmark works on: towers of random weights, photographs, clocks."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.models import load_model
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FLOPS = 800e12  # reachable on an H200
Call = Callable[[], object]


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


def pixels_of(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


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
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
