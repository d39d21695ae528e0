"""dots.ocr as it was published, in plain PyTorch: its tower under the names of its weights, and Qwen2's decoder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM


class SlowModel:
    """One sequence at a time, computed anew for each token."""

    def __init__(self, folder: Path) -> None:
        self.raw = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        apart = ("architectures", "auto_map", "vision_config", "model_type")
        text = Qwen2Config(**{name: value for name, value in self.raw.items() if name not in apart})
        self.decoder = Qwen2ForCausalLM(text).float().eval()
        of_text = {name: w for name, w in self.w.items() if not name.startswith("vision_tower.")}
        self.decoder.load_state_dict(of_text)

    def __call__(self, input_ids: Tensor, pixel_values: Any = None, image_grid_thw: Any = None, **_: Any) -> Any:
        x = self.decoder.model.embed_tokens(input_ids)
        if pixel_values is not None:
            lengths = [int(grid.prod()) for grid in image_grid_thw]
            pictures = zip(pixel_values.split(lengths), image_grid_thw.tolist(), strict=True)
            x[input_ids == self.raw["image_token_id"]] = torch.cat([self.features(p, *grid) for p, grid in pictures])
        return SimpleNamespace(logits=self.decoder(inputs_embeds=x).logits)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **inputs: Any) -> Tensor:
        for _ in range(max_new_tokens):
            following = self(input_ids, **inputs).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, following), 1)
        return input_ids

    # --- the tower: one picture at a time ---------------------------------------------------------------------------

    def features(self, patches: Tensor, _frames: int, height: int, width: int) -> Tensor:
        vision = self.raw["vision_config"]
        pixels = patches.view(len(patches), 3, vision["patch_size"], vision["patch_size"])
        x = F.conv2d(pixels, *self._pair("patch_embed.patchifier.proj")).flatten(1)
        x = self._rms(x, "patch_embed.patchifier.norm")
        turns = self._turns(height, width)
        for i in range(vision["num_hidden_layers"]):
            block = f"blocks.{i}"
            x = x + self._attention(self._rms(x, f"{block}.norm1"), f"{block}.attn", turns)
            x = x + self._mlp(self._rms(x, f"{block}.norm2"), f"{block}.mlp")
        if vision["post_norm"]:
            x = self._rms(x, "post_trunk_norm")
        x = F.layer_norm(x, (vision["embed_dim"],), *self._pair("merger.ln_q"), eps=1e-6)
        x = x.reshape(-1, vision["spatial_merge_size"] ** 2 * vision["embed_dim"])
        return F.linear(F.gelu(F.linear(x, *self._pair("merger.mlp.0"))), *self._pair("merger.mlp.2"))

    def _turns(self, height: int, width: int) -> Tensor:
        """Complex numbers [patches, d / 2]: the first half of them turns with the row, the other with the column."""
        vision = self.raw["vision_config"]
        merge, half = vision["spatial_merge_size"], vision["embed_dim"] // vision["num_attention_heads"] // 2
        speeds = 10000.0 ** -(torch.arange(0, half, 2) / half)
        cells = [
            (row + y, column + x)
            for row in range(0, height, merge)
            for column in range(0, width, merge)
            for y in range(merge)
            for x in range(merge)
        ]
        angles = torch.stack([torch.cat((row * speeds, column * speeds)) for row, column in cells])
        return torch.polar(torch.ones_like(angles), angles)

    def _attention(self, x: Tensor, name: str, turns: Tensor) -> Tensor:
        heads = self.raw["vision_config"]["num_attention_heads"]
        q, k, v = (part.view(len(x), heads, -1).transpose(0, 1) for part in self._linear(x, f"{name}.qkv").chunk(3, -1))
        mixed = (_turned(q, turns) @ _turned(k, turns).mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = self._linear(x, f"{name}.fc1")
        return self._linear(gate * gate.sigmoid() * self._linear(x, f"{name}.fc3"), f"{name}.fc2")

    def _rms(self, x: Tensor, name: str) -> Tensor:
        eps = self.raw["vision_config"]["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.w[f"vision_tower.{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self._pair(name))

    def _pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.w[f"vision_tower.{name}.weight"], self.w.get(f"vision_tower.{name}.bias")


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Values i and i + d / 2 of a head are one complex number."""
    turned = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((turned.real, turned.imag), -1)
