"""DeepSeek-VL2 told a second time: plain, slow, and without a line of the engine's.

No library has this model, so what the engine computes is compared with the published rules written out here: keys and
values of every head, one expert at a time, the whole sequence again for every token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

# --- pictures, as the published processor says --------------------------------------------------------------------


def canvas_of(size: tuple[int, int], candidates: list[list[int]]) -> tuple[int, int]:
    """Most of the picture's own pixels, then least waste, then the first of them."""
    best, maximum, minimum = (0, 0), -1, 0
    for width, height in candidates:
        scale = min(width / size[0], height / size[1])
        shown = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        waste = width * height - shown
        if shown > maximum or (shown == maximum and waste < minimum):
            best, maximum, minimum = (width, height), shown, waste
    return best


def tokens_of(canvas: tuple[int, int], tile: int, patch: int, merge: int) -> int:
    side = math.ceil((tile // patch) / merge)
    columns, rows = canvas[0] // tile, canvas[1] // tile
    return side * (side + 1) + 1 + rows * side * (columns * side + 1)


def views_of(image: Image.Image, canvas: tuple[int, int], tile: int) -> list[Image.Image]:
    grey = (127, 127, 127)
    large = ImageOps.pad(image, canvas, color=grey)
    corners = [(x, y) for y in range(0, canvas[1], tile) for x in range(0, canvas[0], tile)]
    return [
        ImageOps.pad(image, (tile, tile), color=grey),
        *(large.crop((x, y, x + tile, y + tile)) for x, y in corners),
    ]


def pixels_of(view: Image.Image) -> Tensor:
    """[3, side, side] from -1 to 1"""
    values = torch.tensor(list(view.tobytes()), dtype=torch.float32).view(view.height, view.width, 3)
    return ((values / 255 - 0.5) / 0.5).permute(2, 0, 1)


# --- the model, as the published code says ------------------------------------------------------------------------


class SlowModel:
    def __init__(self, folder: Path) -> None:
        self.raw = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.text = self.raw["language_config"]
        self.tile, self.merge = self.raw["vision_config"]["image_size"], 2
        self.image_token = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
        self.image_token = next(t["id"] for t in self.image_token["added_tokens"] if t["content"] == "<image>")

    def __call__(
        self, input_ids: Tensor, views: Any = (), canvases: Any = (), attention_mask: Tensor | None = None
    ) -> Any:
        x = self._embeds(input_ids[0], views, canvases)
        return SimpleNamespace(logits=self._language(x)[None])

    def generate(
        self, input_ids: Tensor, views: Any = (), canvases: Any = (), max_new_tokens: int = 1, **_: Any
    ) -> Tensor:
        x, ids = self._embeds(input_ids[0], views, canvases), input_ids[0].tolist()
        for _step in range(max_new_tokens):
            ids.append(int(self._language(x)[-1].argmax()))
            x = torch.cat((x, self.w["language.model.embed_tokens.weight"][ids[-1:]]))
        return torch.tensor([ids])

    def _embeds(self, ids: Tensor, views: Any, canvases: Any) -> Tensor:
        x = self.w["language.model.embed_tokens.weight"][ids].clone()
        made = [self.features(v, c) for v, c in zip(views, canvases, strict=True)]
        if made:
            x[ids == self.image_token] = torch.cat(made)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    # --- pictures -------------------------------------------------------------------------------------------------

    def features(self, views: Tensor, canvas: tuple[int, int]) -> Tensor:
        """[1 + tiles, 3, side, side] -> embeddings in the order of the prompt"""
        cells = self._projected(self.tower(views))  # [views, side, side, hidden]
        columns, rows, side = canvas[0] // self.tile, canvas[1] // self.tile, cells.shape[1]
        lines = []
        for y in range(rows * side):
            for x in range(columns * side):
                tile = 1 + (y // side) * columns + x // side
                lines.append(cells[tile, y % side, x % side])
            lines.append(self.w["image_newline"])
        whole = []
        for y in range(side):
            whole += [cells[0, y, x] for x in range(side)] + [self.w["image_newline"]]
        between = [self.w["view_seperator"]]
        is_first = self.raw["global_view_pos"] == "head"
        return torch.stack(whole + between + lines if is_first else lines + between + whole)

    def tower(self, views: Tensor) -> Tensor:
        """[n, 3, side, side] -> [n, patches, width]"""
        stride = self.raw["vision_config"]["patch_size"]
        cut = F.conv2d(views, self.w["vision.patch_embed.proj.weight"], self.w["vision.patch_embed.proj.bias"], stride)
        x = cut.flatten(2).mT + self.w["vision.pos_embed"]
        for i in range(self.raw["vision_config"]["layers"]):
            block = f"vision.blocks.{i}"
            x = x + self._look(block, self._layer_norm(f"{block}.norm1", x))
            wide = self._linear(f"{block}.mlp.fc1", self._layer_norm(f"{block}.norm2", x))
            x = x + self._linear(f"{block}.mlp.fc2", F.gelu(wide, approximate="tanh"))
        return self._layer_norm("vision.norm", x)

    def _look(self, block: str, x: Tensor) -> Tensor:
        n, patches, width = x.shape
        heads = self.raw["vision_config"]["heads"]
        parts = self._linear(f"{block}.attn.qkv", x).view(n, patches, 3, heads, width // heads)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))  # [n, heads, patches, d]
        mixed = (q @ k.mT / (width // heads) ** 0.5).softmax(-1) @ v
        return self._linear(f"{block}.attn.proj", mixed.transpose(1, 2).reshape(n, patches, width))

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def _projected(self, features: Tensor) -> Tensor:
        n, patches, width = features.shape
        side = int(patches**0.5)
        missing = -side % self.merge
        channels_first = features.view(n, side, side, width).permute(0, 3, 1, 2)
        merged = F.unfold(F.pad(channels_first, (0, missing, 0, missing)), self.merge, stride=self.merge).mT
        made = self._linear("projector.layers.2", F.gelu(self._linear("projector.layers.0", merged)))
        tokens = math.ceil(side / self.merge)
        return made.view(n, tokens, tokens, -1)

    # --- language -------------------------------------------------------------------------------------------------

    def _language(self, x: Tensor) -> Tensor:
        for i in range(self.text["num_hidden_layers"]):
            layer = f"language.model.layers.{i}"
            normed = self._rms(f"{layer}.input_layernorm", x)
            attend = self._latent if self.text.get("use_mla", True) else self._heads
            x = x + attend(f"{layer}.self_attn", normed)
            normed = self._rms(f"{layer}.post_attention_layernorm", x)
            x = x + (self._experts if has_experts(self.text, i) else self._mlp)(f"{layer}.mlp", normed)
        return self._rms("language.model.norm", x) @ self.w["language.lm_head.weight"].T

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self._linear(f"{name}.gate_proj", x)
        return self._linear(f"{name}.down_proj", gate * gate.sigmoid() * self._linear(f"{name}.up_proj", x))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        count, length = self.text["num_attention_heads"], len(x)
        q, k, v = (self._linear(f"{name}.{part}_proj", x).view(length, count, -1).transpose(0, 1) for part in "qkv")
        halves = q.shape[-1] // 2
        turns = self._turns(q.shape[-1], length)

        def turned(y: Tensor) -> Tensor:
            waves = torch.complex(y[..., :halves], y[..., halves:]) * turns
            return torch.cat((waves.real, waves.imag), dim=-1)

        mixed = _attend(turned(q), turned(k), v, q.shape[-1] ** -0.5)
        return self._linear(f"{name}.o_proj", mixed)

    def _latent(self, name: str, x: Tensor) -> Tensor:
        text, length, count = self.text, len(x), self.text["num_attention_heads"]
        nope, rope, rank = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["kv_lora_rank"]
        if text["q_lora_rank"] is None:
            q = self._linear(f"{name}.q_proj", x)
        else:
            q = self._linear(
                f"{name}.q_b_proj", self._rms(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
            )
        q = q.view(length, count, nope + rope).transpose(0, 1)
        kept = self._linear(f"{name}.kv_a_proj_with_mqa", x)
        expanded = self._linear(f"{name}.kv_b_proj", self._rms(f"{name}.kv_a_layernorm", kept[:, :rank]))
        expanded = expanded.view(length, count, -1).transpose(0, 1)
        turns = self._turns(rope, length)

        def turned(y: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2)) * turns).flatten(-2)

        shared = turned(kept[:, rank:]).expand(count, -1, -1)
        queries = torch.cat((q[..., :nope], turned(q[..., nope:])), dim=-1)
        keys = torch.cat((expanded[..., :nope], shared), dim=-1)
        scale = (nope + rope) ** -0.5
        scaling = text.get("rope_scaling") or {}
        if scaling.get("mscale_all_dim"):
            scale *= _mscale(scaling, scaling["mscale_all_dim"]) ** 2
        return self._linear(f"{name}.o_proj", _attend(queries, keys, expanded[..., nope:], scale))

    def _turns(self, dims: int, length: int) -> Tensor:
        """What each pair of dimensions is multiplied with at each position: complex [T, dims / 2]"""
        scaling, base = self.text.get("rope_scaling") or {}, self.text.get("rope_theta", 10000.0)
        gain, speeds = 1.0, []
        for pair in range(dims // 2):
            fast = base ** (-2 * pair / dims)
            if not scaling:
                speeds.append(fast)
                continue
            trained = scaling["original_max_position_embeddings"]
            first, last = (
                dims * math.log(trained / (scaling[beta] * 2 * math.pi)) / (2 * math.log(base))
                for beta in ("beta_fast", "beta_slow")
            )
            low, high = max(math.floor(first), 0), min(math.ceil(last), dims - 1)
            slowed = min(max((pair - low) / (high - low if high != low else 0.001), 0), 1)
            speeds.append(fast / scaling["factor"] * slowed + fast * (1 - slowed))
            gain = _mscale(scaling, scaling["mscale"]) / _mscale(scaling, scaling["mscale_all_dim"])
        angles = torch.arange(length)[:, None] * torch.tensor(speeds)
        return gain * torch.polar(torch.ones_like(angles), angles)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        out = self._mlp(f"{name}.shared_experts", x)
        weights = torch.zeros(len(x), self.text["n_routed_experts"])
        for row, token in enumerate(x):
            for expert, weight in self._chosen(name, token).items():
                weights[row, expert] = weight
        for expert in range(weights.shape[1]):
            rows = weights[:, expert].nonzero()[:, 0]
            if len(rows):
                out[rows] += weights[rows, expert, None] * self._mlp(f"{name}.experts.{expert}", x[rows])
        return out

    def _chosen(self, name: str, token: Tensor) -> dict[int, float]:
        """A token's experts and their weights."""
        text, logits = self.text, self.w[f"{name}.gate.weight"] @ token
        scores = (logits.sigmoid() if text.get("scoring_func") == "sigmoid" else logits.softmax(-1)).tolist()
        offered = list(scores)
        method, groups = text["topk_method"], text["n_group"]
        if method == "noaux_tc":
            offered = [
                s + b for s, b in zip(scores, self.w[f"{name}.gate.e_score_correction_bias"].tolist(), strict=True)
            ]
        if method != "greedy":
            each = len(scores) // groups
            best = {g: sorted(offered[g * each : (g + 1) * each], reverse=True) for g in range(groups)}
            worth = {g: sum(values[: 2 if method == "noaux_tc" else 1]) for g, values in best.items()}
            kept = sorted(worth, key=lambda g: -worth[g])[: text["topk_group"]]
            offered = [value if i // each in kept else -math.inf for i, value in enumerate(offered)]
        order = sorted(range(len(scores)), key=lambda i: -offered[i])[: text["num_experts_per_tok"]]
        total = sum(scores[i] for i in order) if text.get("norm_topk_prob") else 1.0
        return {i: scores[i] / total * text.get("routed_scaling_factor", 1.0) for i in order}


def has_experts(text: Mapping[str, Any], index: int) -> bool:
    return bool(index >= text["first_k_dense_replace"] and index % text.get("moe_layer_freq", 1) == 0)


def _mscale(scaling: Mapping[str, Any], weight: float) -> float:
    return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[heads, T, d] each -> [T, heads * value]; nobody looks ahead."""
    length = q.shape[1]
    scores = (q @ k.mT * scale).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
