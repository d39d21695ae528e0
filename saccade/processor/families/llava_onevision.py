"""LLaVA-OneVision: LLaVA-NeXT's tiles, many more of them, with a limit on the embeddings (anyres_max_9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from saccade.errors import ConfigError
from saccade.processor.families.base import Files, pixel_settings, setting, vision_and_token
from saccade.processor.families.llava_next import LlavaNext, read_pinpoints, tile_side
from saccade.types.media import Size

_TOWER = "siglip_vision_model"
_MAX_TILES = 6  # along either side, where a checkpoint names no pinpoints
_SLACK = 1.1  # up to this ratio along a side, embeddings are not reduced


@dataclass(frozen=True, slots=True)
class LlavaOnevision(LlavaNext):
    max_tiles: int = 9  # embeddings of more tiles are interpolated down to as many

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = vision_and_token(files)
        image_processor = files.image_processor
        raw = files.config.raw
        if raw.get("vision_feature_select_strategy", "full") != "full":
            message = "vision_feature_select_strategy must be full: the tower has no class token to drop"
            raise ConfigError(message)
        if raw["vision_config"].get("model_type") != _TOWER:
            message = f"config.json: vision_config.model_type must be {_TOWER}: tiles have no class tokens"
            raise ConfigError(message)
        tile = tile_side(image_processor, vision)
        counts = range(1, _MAX_TILES + 1)
        max_tiles = _max_tiles(setting("vision_aspect_ratio", files.processor, raw, default="anyres_max_9"))
        return cls(
            tile=tile,
            patch_size=vision.patch_size,
            pinpoints=read_pinpoints(files, tile)
            or tuple(Size(columns * tile, rows * tile) for rows in counts for columns in counts),
            image_token_id=token,
            placeholder_ids=tuple(i for i in (token, files.config.video_token_id) if i is not None),
            settings={**pixel_settings(image_processor), "max_tiles": max_tiles},
            max_tiles=max_tiles,
        )

    def joined(self, cells: Size) -> Size:
        ratio = math.sqrt(cells.height * cells.width / (self.max_tiles * self.side**2))
        if ratio <= _SLACK:
            return cells
        return Size(int(cells.width // ratio), int(cells.height // ratio))


def _max_tiles(aspect_ratio: Any) -> int:
    """9 for "anyres_max_9"."""
    number = str(aspect_ratio).removeprefix("anyres_max_")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"vision_aspect_ratio must be anyres_max_ and a number, not {aspect_ratio!r}")
    return int(number)
