"""What every family is held to in tests/models/families/test_conformance.py: a row for each, beside `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from saccade.checkpoint.config import model_config
from saccade.models.families.qwen2_5_vl import Qwen2_5VL
from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.processor.families.deepseek_vl_v2 import DeepseekVL2
from saccade.processor.families.llava_next import LlavaNext
from saccade.processor.families.llava_onevision import LlavaOnevision
from saccade.processor.families.minicpmv import Marks, MiniCPMV
from saccade.processor.families.mistral3 import Mistral3
from saccade.types.media import Size
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_qwen2_5_vl, family_qwen3_vl
from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_checks import CrossAttentionSubject, Given, Subject
from tests.helpers.families.family_deepseek_vl_v2 import TINY
from tests.helpers.families.qwen_checks import small_model
from tests.helpers.media.images import make_photo

PHOTOS = (make_photo(112, 84, 1), make_photo(60, 130, 2), make_photo(31, 33, 3), make_photo(300, 70, 4))
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION_PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def sizes_of(pinpoints: list[list[int]]) -> tuple[Size, ...]:
    return tuple(Size(width, height) for height, width in pinpoints)


def hf_features(reference: Reference, photo: Image.Image) -> torch.Tensor:
    """As Transformers' model gives them; where some come from deeper layers, side by side."""
    inner = reference.model.model
    owner = inner if hasattr(inner, "get_image_features") else reference.model
    out = owner.get_image_features(**reference.read([photo])[0])
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(part)) for part in parts], dim=1)


def deepseek_features(reference: Reference, photo: Image.Image) -> torch.Tensor:
    made = reference.read([photo])[0]
    return torch.as_tensor(reference.model.features(made["views"][0], made["canvases"][0]))


def dots_features(reference: Reference, photo: Image.Image) -> torch.Tensor:
    made = reference.read([photo])[0]
    return torch.as_tensor(reference.model.features(made["pixel_values"], *made["image_grid_thw"][0].tolist()))


def views_features(reference: Reference, photo: Image.Image) -> torch.Tensor:
    return torch.cat([reference.model.features(view) for view in reference.read([photo])[0]["views"][0]])


def qwen_vl_features(reference: Reference, photo: Image.Image) -> torch.Tensor:
    return torch.as_tensor(reference.model.transformer["visual"](reference.read([photo])[0]["pixel_values"])[0])


class Row(NamedTuple):
    counted: Size  # an image
    tokens: int  # that it costs in the small checkpoint
    features: Callable[[Reference, Image.Image], torch.Tensor] | None = hf_features
    photos: tuple[Image.Image, ...] = PHOTOS
    rules: Any = None  # of the published checkpoints, where limits leave out or shrink images
    qwen_patch: int | None = None  # sizes and positions are those of Qwen2-VL, with patches of so many pixels
    small: Callable[..., Any] | None = None  # a tower of the family for kernels in the interpreter
    subject: type[Subject] = Subject


ROWS: dict[str, Row] = {
    "llava": Row(Size(112, 84), 16),
    "llava_next": Row(
        Size(112, 112), 16 + 8 * 9, rules=LlavaNext(336, 14, sizes_of(NEXT_PINPOINTS), 32000, (32000,), {})
    ),
    "llava_onevision": Row(
        Size(180, 180),
        16 + 8 * 9,
        # The last two have more patches than may be kept: one is within the slack, the other is reduced.
        photos=(PHOTOS[0], make_photo(31, 33, 2), make_photo(300, 70, 3), make_photo(200, 190, 4)),
        rules=LlavaOnevision(384, 14, sizes_of(ONEVISION_PINPOINTS), 151646, (151646, 151647), {}),
    ),
    "pixtral": Row(Size(84, 56), 4 * 7, rules=Mistral3(16, 1, Size(1024, 1024), 10, 12, 13, {})),
    "mistral3": Row(Size(84, 56), 2 * 4, rules=Mistral3(14, 2, Size(1540, 1540), 10, 12, 13, {})),
    "ministral3": Row(Size(84, 56), 2 * 4),
    "mllama": Row(Size(110, 50), 1, features=None, subject=CrossAttentionSubject),
    "deepseek_vl_v2": Row(
        Size(88, 88),
        2 * 3 + 1 + 4 * 5,
        features=deepseek_features,
        rules=DeepseekVL2.from_checkpoint(Given(model_config(TINY))),
    ),
    "dots_ocr": Row(Size(112, 84), 4 * 3, features=dots_features, qwen_patch=14),
    "minicpmv": Row(
        Size(112, 84),
        (1 + 4) * (4 + 2) + 1,
        features=views_features,
        rules=MiniCPMV(14, 448, 9, 64, Marks(0, (1, 2), (3, 4), 5), True, {}),
    ),
    "qwen_vl": Row(Size(84, 56), 16, features=qwen_vl_features),
    "qwen2_vl": Row(Size(112, 84), 4 * 3),
    "qwen2_5_vl": Row(
        Size(112, 84), 4 * 3, qwen_patch=14, small=partial(small_model, Qwen2_5VL, family_qwen2_5_vl.SMALL)
    ),
    "qwen3_vl": Row(Size(320, 192), 10 * 6, qwen_patch=16, small=partial(small_model, Qwen3VL, family_qwen3_vl.SMALL)),
    "qwen3_vl_moe": Row(Size(320, 192), 10 * 6, qwen_patch=16),
    "qwen3_5": Row(Size(320, 192), 10 * 6, qwen_patch=16),
    "qwen3_5_moe": Row(Size(320, 192), 10 * 6, qwen_patch=16),
}
LAYOUTS = [f"{name}-{layout}" for name in ROWS for layout in FAMILIES[name].layouts]


def row_of(layout: str) -> Row:
    return ROWS[layout.split("-")[0]]


class Case:
    """A family's small checkpoint in one layout, in Saccade and in its reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.row = ROWS[name]
        self.image = FAMILIES[name].image
        self.folder = folder
        self.subject = self.row.subject(folder)
        self.reference = FAMILIES[name].reference(folder)

    def text(self, count: int) -> str:
        return f"Look: {self.image * count}what is it? The quick brown fox jumps over the lazy dog."
