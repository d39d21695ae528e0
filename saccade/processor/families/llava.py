"""LLaVA-1.5: every image is resized by its short side and cropped to one square; sequential positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from saccade.errors import ConfigError, member
from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.types.media import Geometry, Grid, Size

_DEFAULT_SIDE = 224  # what CLIP's image processor assumes when a checkpoint is silent


@dataclass(frozen=True, slots=True)
class Llava:
    short_side: int | None  # after the resize; None: stretched to the crop
    crop: Size
    patch_size: int
    extra_tokens: int  # beside the patches: 1 for a class token that is kept
    image_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = True

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        image_processor = files.image_processor
        processor = files.processor
        if image_processor.get("do_pad"):
            message = "the image processor says do_pad=true, but pictures are cropped here, not padded"
            raise ConfigError(message)
        short_side, crop = _resize_and_crop(image_processor)
        base.check_agreement("processor_config.json", processor, {"patch_size": vision.patch_size})
        if vision.image_size is not None and set(crop) != {vision.image_size}:
            size = f"{crop.width}x{crop.height}"
            crop_text = f"the image processor's crop_size (or size) makes {size} pixels of a picture"
            raise ConfigError(f"{crop_text}, but the vision tower takes image_size={vision.image_size}")
        return cls(
            short_side=short_side,
            crop=crop,
            patch_size=vision.patch_size,
            extra_tokens=_extra_tokens(processor, files.config.raw),
            image_token_id=token,
            settings=base.pixel_settings(image_processor),
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The tower takes one size only; limits are ignored."""
        pixels = self.crop.width * self.crop.height
        return pixels, pixels

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        sides = {"short_side": self.short_side, "crop": self.crop, "patch": self.patch_size}
        return base.tag({**self.settings, **sides})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        return self._of(self._resized(size))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        return self._of(self.crop)

    def _resized(self, size: Size) -> Size:
        if self.short_side is None:
            return self.crop
        longer = int(self.short_side * max(size) / min(size))  # truncated, not rounded
        return Size(self.short_side, longer) if size.width <= size.height else Size(longer, self.short_side)

    def _of(self, resized: Size) -> Geometry:
        grid = Grid(1, self.crop.height // self.patch_size, self.crop.width // self.patch_size)
        tokens = grid.patches + self.extra_tokens
        return Geometry(resized, grid, tokens, tokens)

    expand = base.expand_to_embeddings
    positions = base.sequential_positions


def _resize_and_crop(processor: Mapping[str, Any]) -> tuple[int | None, Size]:
    """`size` and `crop_size` are integers in old checkpoints, mappings in newer ones."""
    sides = {name: processor[name] for name in ("size", "crop_size") if processor.get(name) is not None}
    size = sides.get("size", {"shortest_edge": _DEFAULT_SIDE})
    short_side = size if isinstance(size, int) else size.get("shortest_edge")
    crop_size = sides.get("crop_size", _DEFAULT_SIDE)
    # Without do_center_crop SigLIP's processor does not crop: it resizes to height and width.
    crops = "crop_size" in sides or isinstance(size, int) or not size.get("height")
    crop = crop_size if processor.get("do_center_crop", crops) else size
    base.check_does(processor, "do_resize", "the vision tower takes pictures of one size only")
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if not all(map(crop.get, ("height", "width"))):
        sizes = f"size={size}, crop_size={crop_size}"
        raise ConfigError(f"the image processor neither crops nor resizes to one height and width ({sizes})")
    return short_side, Size(crop["width"], crop["height"])


def _extra_tokens(processor: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Tokens beside one per patch. CLIP adds a class token, SigLIP has none; the strategy "default" drops it.

    A processor without patch_size does not count it, so the tower's own output decides.
    """
    name = "vision_feature_select_strategy"
    in_config = raw.get(name)
    strategy = base.setting(name, processor, raw, default="default")
    if strategy not in ("default", "full") or in_config not in (None, strategy):
        strategies = f"{strategy!r} in processor_config.json and {in_config!r} in config.json"
        raise ConfigError(f"{name} must be default or full in both files, not {strategies}")
    is_siglip = member(raw.get("vision_config"), "model_type") == "siglip_vision_model"
    tokens = 0 if is_siglip else 1
    setting = processor.get("num_additional_image_tokens")
    if setting is not None and processor.get("patch_size"):
        tokens = int(setting)
    dropped = 1 if strategy == "default" else 0
    if tokens < dropped:
        reason = f"processor_config.json counts {tokens} extra image tokens but drops {dropped}"
        raise ConfigError(f"{reason}; set num_additional_image_tokens to 1, the tower's class token")
    return tokens - dropped
