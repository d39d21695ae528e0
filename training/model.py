"""The model: its sizes, and a forward pass for training whose parameters carry Transformers' names.

All pictures of a batch have the same grid, so attention runs over plain [pictures, patches] and [samples, tokens]
with no masks: padding stands behind the text, where causal attention never looks.
`tests/training/test_training.py` compares the logits with Transformers' Qwen2-VL on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.canvas import FRAMES, NUM_GLYPH_CLASSES, NUM_LETTER_CLASSES, NUM_LINKS, PATCH
from training.palette import NAMES

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
MERGE = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hyperparameters; the defaults are the shipped model."""

    vocabulary: int = 1280
    hidden: int = 384
    intermediate: int = 896
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    rope_theta: float = 100.0  # positions stay below a thousand; a larger base would leave columns apart by no angle
    mrope_section: tuple[int, int, int] = (6, 10, 16)
    vision_depth: int = 6
    vision_width: int = 320
    vision_heads: int = 5
    vision_ratio: int = 4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Sizes(
    hidden=64,
    intermediate=96,
    layers=2,
    heads=2,
    kv_heads=1,
    mrope_section=(4, 6, 6),
    vision_depth=2,
    vision_width=64,
    vision_heads=2,
    vision_ratio=2,
)


class Views(NamedTuple):
    """What the tower makes of pictures."""

    tokens: Tensor  # [P, n, hidden]
    patches: Tensor  # [P, 4n, vision width], normalised: what the dense heads read


class Model(nn.Module):
    """`model.*` are Qwen2-VL's parameters; `dense` is used in training only."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = nn.ModuleDict({"visual": Tower(sizes), "language_model": Decoder(sizes)})
        self.dense = DenseHeads(sizes.vision_width)
        _initialise(self)

    @property
    def tower(self) -> Tower:
        tower = self.model["visual"]
        assert isinstance(tower, Tower)
        return tower

    @property
    def decoder(self) -> Decoder:
        decoder = self.model["language_model"]
        assert isinstance(decoder, Decoder)
        return decoder

    def forward(self, pixels: Tensor, ids: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Views]:
        """Hidden states [B, T, hidden] for ids [B, T], positions [3, B, T] and uint8 pictures.

        Pictures are [P, H, W, 3]; or [P, FRAMES, H, W, 3], the frame groups of videos.

        `slots` [P * n] says which place of the flattened ids each picture token takes; B * T means none.
        """
        views = self.tower(pixels)
        embeds = self.decoder.embed_tokens(ids).to(views.tokens.dtype)
        flat = torch.cat([embeds.flatten(0, 1), embeds.new_zeros(1, embeds.shape[-1])])
        flat = flat.index_copy(0, slots, views.tokens.flatten(0, 1))
        # Cloned: a view would make the first layer a case of its own to the compiler.
        return self.decoder(flat[:-1].view_as(embeds).clone(), positions), views

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.decoder.embed_tokens.weight.to(hidden.dtype))

    def exported(self) -> dict[str, Tensor]:
        """The state under Transformers' names, without the dense heads."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith("dense.")}


# --- vision -------------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.vision_width
        self.head_dim = width // sizes.vision_heads
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv3d(3, width, (FRAMES, PATCH, PATCH), (FRAMES, PATCH, PATCH), bias=False)}
        )
        self.blocks = nn.ModuleList(
            VisionBlock(width, sizes.vision_heads, sizes.vision_ratio) for _ in range(sizes.vision_depth)
        )
        self.merger = Merger(width, sizes.hidden)
        # Buffers, because a tensor made from a list on the GPU would wait for it at every step.
        self.register_buffer("mean", torch.tensor(MEAN), persistent=False)
        self.register_buffer("std", torch.tensor(STD), persistent=False)

    def forward(self, pixels: Tensor) -> Views:
        rows, columns = pixels.shape[-3] // PATCH, pixels.shape[-2] // PATCH
        normalised = pixels.float() * (1 / 255 / self.std) - self.mean / self.std  # as the image processor does
        x = self._embedded(normalised)
        cos, sin = vision_angles(rows, columns, self.head_dim, pixels.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        views: Views = self.merger(x)
        return views

    def _embedded(self, normalised: Tensor) -> Tensor:
        """[P, N, width]."""
        weight = self.patch_embed["proj"].weight
        assert isinstance(weight, Tensor)
        if normalised.dim() == 4:  # both frames hold the same pixels: adding their weights first halves the work
            return F.linear(patches(normalised), weight.sum(2).flatten(1))
        frames = zip(normalised.unbind(1), weight.unbind(2), strict=True)
        return torch.stack([F.linear(patches(shown), own.flatten(1)) for shown, own in frames]).sum(0)


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, ratio * width), "fc2": nn.Linear(ratio * width, width)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pictures, count, width = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).view(pictures, count, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [P, heads, N, d]
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(pictures, count, width))
        wide = self.mlp["fc1"](self.norm2(x))
        out: Tensor = x + self.mlp["fc2"](wide * torch.sigmoid(1.702 * wide))
        return out


class Merger(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        merged = width * MERGE**2
        self.ln_q = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, hidden))

    def forward(self, x: Tensor) -> Views:
        normed = self.ln_q(x)
        return Views(self.mlp(normed.reshape(len(x), -1, x.shape[-1] * MERGE**2)), normed)


class DenseHeads(nn.Module):
    """Names what covers each patch: glyph or shape, colour, place, and letters of the labels that a value belongs to.

    Teaches the tower to see, and to carry a column's heading to its cells, before answers can.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.splits = (NUM_GLYPH_CLASSES, len(NAMES) + 1, 2, *(NUM_LETTER_CLASSES,) * NUM_LINKS)
        self.proj = nn.Linear(width, sum(self.splits))

    def forward(self, seen: Tensor) -> tuple[Tensor, ...]:
        """Logits of glyphs and colours, places, logits of each link."""
        return self.proj(seen).split(self.splits, dim=-1)


def patches(pixels: Tensor) -> Tensor:
    """[P, H, W, 3] -> [P, N, 3 * PATCH * PATCH]; the four patches of a token follow each other."""
    pictures, height, width, channels = pixels.shape
    cells = pixels.view(pictures, height // 16, MERGE, PATCH, width // 16, MERGE, PATCH, channels)
    return cells.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(pictures, -1, channels * PATCH * PATCH)


def in_patch_order(cells: Tensor) -> Tensor:
    """[P, rows, columns] -> [P, rows * columns] in the order of `patches`."""
    pictures, rows, columns = cells.shape
    return cells.view(pictures, rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(2, 3).reshape(pictures, -1)


def vision_angles(rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    y, x = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    places = torch.stack([in_patch_order(axis[None])[0] for axis in (y, x)], dim=-1).float()  # [N, 2]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim // 2, 2, device=device) / (head_dim // 2))
    angles = (places[..., None] * frequencies).flatten(1)  # [N, d / 2]
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in float32; cos and sin broadcast over [..., tokens, d]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


# --- text ---------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    axes: Tensor  # [d / 2]: which position each frequency turns with

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.hidden)
        axes = [axis for axis, size in enumerate(sizes.mrope_section) for _ in range(size)]
        self.register_buffer("axes", torch.tensor(axes), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = text_angles(positions[self.axes], self.sizes.rope_theta)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class DecoderLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, kv = sizes.hidden, sizes.kv_heads * sizes.head_dim
        self.head_dim, self.groups = sizes.head_dim, sizes.heads // sizes.kv_heads
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, hidden),
                "k_proj": nn.Linear(hidden, kv),
                "v_proj": nn.Linear(hidden, kv),
                "o_proj": nn.Linear(hidden, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, sizes.intermediate, bias=False),
                "up_proj": nn.Linear(hidden, sizes.intermediate, bias=False),
                "down_proj": nn.Linear(sizes.intermediate, hidden, bias=False),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden), RmsNorm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, count, hidden = x.shape
        normed = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[name](normed).view(batch, count, -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (rotated(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
        x = x + self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, count, hidden))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        out: Tensor = x + self.mlp["down_proj"](gated)
        return out


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


def text_angles(by_frequency: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, d] of M-RoPE for positions [d / 2, B, T], one axis of them for each frequency."""
    half = len(by_frequency)
    frequencies = theta ** -(torch.arange(half, device=by_frequency.device) / half)
    angles = by_frequency.permute(1, 2, 0).float() * frequencies
    doubled = torch.cat((angles, angles), dim=-1)[:, None]
    return doubled.cos(), doubled.sin()


def _initialise(model: nn.Module) -> None:
    """Small outputs of each block, so that a deep sum starts near its input."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms are ones, biases zeros
        if "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.05)
        else:
            is_output = name.endswith(("attn.proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight"))
            fan_in = parameter[0].numel()
            nn.init.normal_(parameter, std=(0.25 if is_output else 0.8) / fan_in**0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
