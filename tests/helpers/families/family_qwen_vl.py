"""Small folders of the first Qwen-VL as it was published, and what its code computes, written plainly and slowly.

No library has this model, so the reference is here: ranks merged one pair at a time, attention with its scores in full,
every answer's token computed from the beginning. Nothing of it is shared with the engine.
"""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import regex
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference
from tests.helpers.families.made_once import made_once

IMAGE = "<img><imgpad></img>\n"
CUT = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
MARKS = ["<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>"]
TEXT: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "hidden_size": 256,
    "intermediate_size": 2 * 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 64,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8192,
    "seq_length": 2048,
    "no_bias": True,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
VISUAL: dict[str, Any] = {
    "heads": 2,
    "image_size": 112,
    "layers": 3,
    "mlp_ratio": 2.5,
    "n_queries": 16,  # published ones leave it at 256
    "output_dim": 256,
    "patch_size": 14,
    "width": 48,
}


# --- the tokenizer ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def train_ranks(tokens: int = 180) -> dict[bytes, int]:
    """All bytes, then what a trainer merges first in the corpus."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + tokens, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(checkpoints.CORPUS, trainer)
    plain = [chr(b) for b in range(256) if chr(b) in alphabet]
    letters = plain + sorted(set(alphabet) - set(plain))  # bytes that print, then the others in their order
    others = [b for b in range(256) if chr(b) not in alphabet]
    byte_of = dict(zip(letters, [*map(ord, plain), *others], strict=True))
    vocabulary = sorted((i, token) for token, i in trained.get_vocab().items() if len(token) > 1)
    words = [bytes(byte_of[letter] for letter in token) for _, token in vocabulary]
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *words])}


class SlowTokenizer:
    def __init__(self, folder: Path) -> None:
        lines = (folder / "qwen.tiktoken").read_text().splitlines()
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        marks = MARKS if "visual" in json.loads((folder / "config.json").read_text()) else []
        self.specials = {token: len(self.ranks) + i for i, token in enumerate([*CONTROL, *marks])}
        self.parts = regex.compile("|".join(regex.escape(t) for t in sorted(self.specials, key=len, reverse=True)))

    def __call__(self, text: str, **_how: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([self.encode(text)])}

    def encode(self, text: str) -> list[int]:
        ids, done, text = [], 0, unicodedata.normalize("NFC", text)
        for found in self.parts.finditer(text):
            ids += [*self._plain(text[done : found.start()]), self.specials[found[0]]]
            done = found.end()
        return [*ids, *self._plain(text[done:])]

    def _plain(self, text: str) -> list[int]:
        return [i for piece in CUT.findall(text) for i in self._piece(piece.encode())]

    def _piece(self, piece: bytes) -> list[int]:
        if piece in self.ranks:
            return [self.ranks[piece]]
        parts = [bytes([b]) for b in piece]
        while True:
            joined = [(self.ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in self.ranks]
            if not joined:
                return [self.ranks[part] for part in parts]
            at = min(joined)[1]
            parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


# --- the model, under the names of its published tensors -------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class TextAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.heads, self.base = config["num_attention_heads"], config["rotary_emb_base"]
        self.c_attn = nn.Linear(size, 3 * size)
        self.c_proj = nn.Linear(size, size, bias=not config["no_bias"])

    def forward(self, x: Tensor) -> Tensor:
        length, size = x.shape
        q, k, v = (part.view(length, self.heads, -1).transpose(0, 1) for part in self.c_attn(x).split(size, -1))
        scores = self._turned(q) @ self._turned(k).mT / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(mixed.transpose(0, 1).reshape(length, size))

    def _turned(self, x: Tensor) -> Tensor:
        """As complex numbers: dimension i and i + d / 2 are one."""
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * self.base ** (-torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)


class TextMLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, wide, bias = config["hidden_size"], config["intermediate_size"] // 2, not config["no_bias"]
        self.w1, self.w2 = nn.Linear(size, wide, bias=bias), nn.Linear(size, wide, bias=bias)
        self.c_proj = nn.Linear(wide, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        second = self.w2(x)
        return self.c_proj(self.w1(x) * second * second.sigmoid())


class TextBlock(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.ln_1 = Norm(config["hidden_size"], config["layer_norm_epsilon"])
        self.attn = TextAttention(config)
        self.ln_2 = Norm(config["hidden_size"], config["layer_norm_epsilon"])
        self.mlp = TextMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PatchAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.in_proj, self.out_proj = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        each = x.shape[-1] // self.heads
        rows, mixed = self.in_proj(x), []
        for head in range(self.heads):  # its q, k and v follow each other
            q, k, v = rows[..., 3 * head * each : 3 * (head + 1) * each].split(each, -1)
            mixed.append((q @ k.mT / math.sqrt(each)).softmax(-1) @ v)
        return self.out_proj(torch.cat(mixed, -1))


class PatchBlock(nn.Module):
    def __init__(self, visual: dict[str, Any]) -> None:
        super().__init__()
        size = visual["width"]
        self.ln_1, self.ln_2 = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.attn = PatchAttention(size, visual["heads"])
        wide = int(size * visual["mlp_ratio"])
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(size, wide), "c_proj": nn.Linear(wide, size)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        wide = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2))))


def spread(places: Tensor, count: int) -> Tensor:
    """A square of vectors, bicubically made as large as another one."""
    side, wanted = math.isqrt(len(places)), math.isqrt(count)
    if side == wanted:
        return places
    square = places.view(side, side, -1).permute(2, 0, 1)[None]
    larger = nn.functional.interpolate(square, size=(wanted, wanted), mode="bicubic", align_corners=False)
    return larger[0].permute(1, 2, 0).reshape(count, -1)


class Pool(nn.Module):
    def __init__(self, visual: dict[str, Any]) -> None:
        super().__init__()
        size, queries = visual["output_dim"], visual.get("n_queries", 256)
        self.pos_embed = nn.Parameter(waves(size, math.isqrt(queries)))
        self.query = nn.Parameter(torch.zeros(queries, size))
        is_narrow = visual["width"] != size
        self.kv_proj = nn.Linear(visual["width"], size, bias=False) if is_narrow else nn.Identity()
        self.attn = nn.MultiheadAttention(size, size // 128, batch_first=True)
        self.ln_q, self.ln_kv = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.ln_kv(self.kv_proj(x))
        asked = (self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        return self.attn(asked, seen + spread(self.pos_embed, x.shape[1]), seen, need_weights=False)[0]


def waves(size: int, side: int) -> Tensor:
    """Sines and cosines of the column, then of the row, from fast to slow."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    slow = 10000.0 ** -(torch.arange(size // 4) / (size // 4))
    return torch.cat([wave(at.reshape(-1, 1) * slow) for at in (columns, rows) for wave in (torch.sin, torch.cos)], 1)


class Visual(nn.Module):
    def __init__(self, visual: dict[str, Any]) -> None:
        super().__init__()
        size, width = visual["output_dim"], visual["width"]
        self.conv1 = nn.Conv2d(3, width, visual["patch_size"], visual["patch_size"], bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(256, width))
        self.ln_pre = nn.LayerNorm(width, eps=1e-6)
        blocks = nn.ModuleList(PatchBlock(visual) for _ in range(visual["layers"]))
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.attn_pool = Pool(visual)
        self.ln_post = nn.LayerNorm(size, eps=1e-6)
        self.proj = nn.Parameter(torch.zeros(size, size))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels).flatten(2).mT
        x = self.ln_pre(x + spread(self.positional_embedding, x.shape[1]))
        for block in self.transformer["resblocks"]:
            x = block(x)
        return self.ln_post(self.attn_pool(x)) @ self.proj


class Model(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config["vocab_size"], size)}
        parts["h"] = nn.ModuleList(TextBlock(config) for _ in range(config["num_hidden_layers"]))
        parts["ln_f"] = Norm(size, config["layer_norm_epsilon"])
        if config.get("visual"):
            parts["visual"] = Visual({k: v for k, v in config["visual"].items() if k != "image_start_id"})
        self.config = config
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(size, config["vocab_size"], bias=False)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, **_more: Any) -> Any:
        ids = input_ids[0]
        x = self.transformer["wte"](ids)
        if pixel_values is not None:
            start = self.config["visual"]["image_start_id"]
            first, last = (torch.nonzero(ids == start + i)[:, 0].tolist() for i in (0, 1))
            for a, b, features in zip(first, last, self.transformer["visual"](pixel_values), strict=True):
                x[a + 1 : b] = features
        for block in self.transformer["h"]:
            x = block(x)
        return SimpleNamespace(logits=self.lm_head(self.transformer["ln_f"](x))[None])

    def generate(self, input_ids: Tensor, max_new_tokens: int, **inputs: Any) -> Tensor:
        for _ in range(max_new_tokens):
            following = self(input_ids, **inputs).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, following), 1)
        return input_ids


# --- folders ------------------------------------------------------------------------------------------------------


@made_once
def build(folder: Path, *, layout: str = "published", seed: int = 0, **changes: Any) -> Path:
    """Weights, config and tokenizer as on the hub; `visual=None` leaves the tower out."""
    assert layout == "published"
    ranks = train_ranks()
    visual = {**VISUAL, "image_start_id": len(ranks) + len(CONTROL) + 6, **(changes.pop("visual", {}) or {})}
    sees = changes.pop("sees", True)
    config = {**TEXT, "vocab_size": len(ranks) + len(CONTROL) + len(MARKS) + 5, **changes}
    config |= {"visual": visual} if sees else {}
    model = Model(config)
    randomise(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    checkpoints._write(folder / "config.json", config)
    end = len(ranks)
    checkpoints._write(folder / "generation_config.json", {"chat_format": "chatml", "eos_token_id": end})
    checkpoints._write(folder / "tokenizer_config.json", {"model_max_length": 8192, "tokenizer_class": "QWenTokenizer"})
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "qwen.tiktoken").write_text("".join(lines))
    return folder


def randomise(model: Model, seed: int) -> None:
    """Small embeddings and strong layers, so that a token depends on all before it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "pos_embed" in name:
                continue
            if "wte" in name or "positional" in name or name.endswith("query"):
                parameter.copy_(0.2 * noise)
            elif parameter.dim() >= 2:
                gain = 6.0 if "c_proj" in name and ".h." in name else 1.5
                parameter.copy_(noise * gain / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(float(name.endswith("weight")) + 0.1 * noise)


def load_reference(folder: Path) -> Model:
    model = Model(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def reference(folder: Path) -> Reference:
    model = load_reference(folder)
    visual = model.config.get("visual") or VISUAL
    side = visual["image_size"]

    def pixels(image: Image.Image) -> Tensor:
        small = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
        scaled = (small - np.float32(checkpoints.CLIP_MEAN)) / np.float32(checkpoints.CLIP_STD)
        return torch.from_numpy(scaled).permute(2, 0, 1)

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        stands = "<imgpad>" * visual.get("n_queries", 256)
        return {"pixel_values": torch.stack([pixels(p) for p in images])}, [stands] * len(images)

    return Reference(model, SlowTokenizer(folder), "<imgpad>", read)  # type: ignore[arg-type]
