"""MiniCPM-V as it was published, in plain PyTorch, one view at a time; the decoder is Transformers'."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

DECODERS: dict[float, tuple[Any, Any]] = {
    2.6: (Qwen2Config, Qwen2ForCausalLM),
    4.0: (LlamaConfig, LlamaForCausalLM),
    4.5: (Qwen3Config, Qwen3ForCausalLM),
}

# --- pictures, as the published processor says ------------------------------------------------------------------


def multiple_of(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def view_size(size: tuple[float, float], scale: int, patch: int, *, enlarge: bool) -> tuple[int, int]:
    width, height = size
    if enlarge or width * height > scale * scale:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return multiple_of(width, patch), multiple_of(height, patch)


def grid_of(size: tuple[int, int], slices: int, scale: int) -> tuple[int, int] | None:
    """Columns and rows; the first of those whose logarithmic shape is nearest."""
    wish = min(math.ceil(size[0] * size[1] / (scale * scale)), slices)
    if wish <= 1:
        return None
    best, least = (1, 1), math.inf
    for number in (wish - 1, wish, wish + 1):
        if number == 1 or number > slices:
            continue
        for columns in range(1, number + 1):
            if number % columns:
                continue
            rows = number // columns
            error = abs(math.log(size[0] / size[1]) - math.log(columns / rows))
            if error < least:
                best, least = (columns, rows), error
    return best


def slice_size(size: tuple[int, int], grid: tuple[int, int], scale: int, patch: int) -> tuple[int, int]:
    cell = multiple_of(size[0], grid[0]) / grid[0], multiple_of(size[1], grid[1]) / grid[1]
    return view_size(cell, scale, patch, enlarge=True)


def views_of(image: Image.Image, slices: int, scale: int, patch: int) -> list[Image.Image]:
    grid = grid_of(image.size, slices, scale)
    whole = image.resize(view_size(image.size, scale, patch, enlarge=grid is None), Image.Resampling.BICUBIC)
    if grid is None:
        return [whole]
    width, height = slice_size(image.size, grid, scale, patch)
    large = image.resize((width * grid[0], height * grid[1]), Image.Resampling.BICUBIC)
    corners = [(x * width, y * height) for y in range(grid[1]) for x in range(grid[0])]
    return [whole, *(large.crop((x, y, x + width, y + height)) for x, y in corners)]


def pixels_of(view: Image.Image) -> Tensor:
    """[3, height, width] from -1 to 1"""
    values = torch.from_numpy(np.asarray(view).astype(np.float32) / 255)
    return ((values - 0.5) / 0.5).permute(2, 0, 1)


def spelled(size: tuple[int, int], number: int, slices: int, scale: int, queries: int) -> str:
    """What a prompt has for a picture."""
    inside, grid = "<unk>" * queries, grid_of(size, slices, scale)
    rows = [f"<slice>{inside}</slice>" * grid[0]] * grid[1] if grid else []
    return f"<image_id>{number}</image_id><image>{inside}</image>" + "\n".join(rows)


# --- the model, as the published code says --------------------------------------------------------------------------


class SlowModel:
    """One sequence at a time, computed anew for each token."""

    def __init__(self, folder: Path, unknown: int) -> None:
        self.raw = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.unknown = unknown
        apart = ("architectures", "auto_map", "vision_config", "slice_config", "model_type", "version")
        config, kind = DECODERS[self.raw["version"]]
        text = config(**{name: value for name, value in self.raw.items() if name not in apart})
        self.decoder = kind(text).float().eval()
        self.decoder.load_state_dict(
            {name.removeprefix("llm."): w for name, w in self.w.items() if name.startswith("llm.")}
        )
        self.attention = torch.nn.MultiheadAttention(self.raw["hidden_size"], self.raw["hidden_size"] // 128).eval()
        inner = "resampler.attn."
        self.attention.load_state_dict({n.removeprefix(inner): w for n, w in self.w.items() if n.startswith(inner)})

    def __call__(self, input_ids: Tensor, views: Any = None, **_: Any) -> Any:
        x = self.decoder.model.embed_tokens(input_ids)
        if views is not None:
            features = torch.cat([self.features(view) for image in views for view in image])
            places = torch.nonzero(input_ids[0] == self.unknown)[: len(features), 0]  # an answer may have more
            x[0, places] = features
        return SimpleNamespace(logits=self.decoder(inputs_embeds=x).logits)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **inputs: Any) -> Tensor:
        for _ in range(max_new_tokens):
            following = self(input_ids, **inputs).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, following), 1)
        return input_ids

    def features(self, pixels: Tensor) -> Tensor:
        """[3, height, width] -> [queries, hidden]"""
        return self.resample(*self.tower(pixels))

    def tower(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        vision = self.raw["vision_config"]
        patch = vision["patch_size"]
        x = F.conv2d(pixels[None], *self._pair("vpm.embeddings.patch_embedding"), stride=patch)[0]
        height, width = x.shape[1:]
        x = x.flatten(1).T + self.w["vpm.embeddings.position_embedding.weight"][self._places(height, width)]
        layers = vision["num_hidden_layers"] - self.raw["drop_vision_last_layer"]
        for i in range(layers):
            x = self._layer(x, f"vpm.encoder.layers.{i}")
        return self._norm(x, "vpm.post_layernorm"), height, width

    def _places(self, height: int, width: int) -> Tensor:
        side = self.raw["vision_config"]["image_size"] // self.raw["vision_config"]["patch_size"]
        borders = torch.arange(1 / side, 1.0, 1 / side)
        rows, columns = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor(n, dtype=torch.int32)), borders, right=True)
            for n in (height, width)
        )
        return (rows[:, None] * side + columns).flatten()

    def _layer(self, x: Tensor, name: str) -> Tensor:
        heads = self.raw["vision_config"]["num_attention_heads"]
        inside = self._norm(x, f"{name}.layer_norm1")
        q, k, v = (
            self._linear(inside, f"{name}.self_attn.{part}_proj").view(len(x), heads, -1).transpose(0, 1)
            for part in "qkv"
        )
        mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.self_attn.out_proj")
        wide = self._linear(self._norm(x, f"{name}.layer_norm2"), f"{name}.mlp.fc1")
        return x + self._linear(F.gelu(wide, approximate="tanh"), f"{name}.mlp.fc2")

    def resample(self, x: Tensor, height: int, width: int) -> Tensor:
        values = self._norm(x @ self.w["resampler.kv_proj.weight"].T, "resampler.ln_kv")
        queries = self._norm(self.w["resampler.query"], "resampler.ln_q")
        keys = values + waves(height, width, values.shape[1])
        mixed, _ = self.attention(queries, keys, values, need_weights=False)
        return self._norm(mixed, "resampler.ln_post") @ self.w["resampler.proj"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self._pair(name), eps=1e-6)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self._pair(name))

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.w[f"{name}.weight"], self.w[f"{name}.bias"]


def waves(height: int, width: int, size: int) -> Tensor:
    """Half of each vector is of the column, half of the row; sines, then cosines."""
    slow = np.float32(10000) ** -(np.arange(size // 4, dtype=np.float32) / np.float32(size / 4))
    made = np.empty((height, width, size), np.float32)
    for row in range(height):
        for column in range(width):
            angles = [np.float32(at) * slow for at in (column, row)]
            made[row, column] = np.concatenate([wave(a) for a in angles for wave in (np.sin, np.cos)])
    return torch.from_numpy(made).flatten(0, 1)
