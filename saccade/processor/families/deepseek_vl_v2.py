"""DeepSeek-VL2: one square of the whole image plus tiles of a larger one; sequential RoPE positions.

    whole: rows of 14 tokens and a newline | separator | tiles: rows across all of them, each with a newline

A canvas is padded with grey, whose tokens are kept. More than two images in a prompt get one tile each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from saccade.checkpoint.config import ModelConfig, VisionConfig
from saccade.checkpoint.tokenizer_json import added_tokens
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.processor.families.llava_next import area, best_canvas
from saccade.types.media import Geometry, Grid, Size, Tiling

_MAX_IN_TILES = 2  # images of one prompt; if there are more, each has one tile
_UNKNOWN = -1  # image token of a folder without a tokenizer: counting needs none

_PARTS = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {{- '<image>\\n' if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
_CHAT = (
    _PARTS
    + """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- set text = text_of(message.content) | trim -%}
  {%- if message.role == 'user' -%}
    {{- '<|User|>: ' + text + '\\n\\n' -}}
    {%- if add_generation_prompt or not loop.last -%}{{- '<|Assistant|>:' -}}{%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {{- text -}}{%- if not loop.last -%}{{- eos_token -}}{%- endif -%}
  {%- elif message.role == 'system' and loop.first -%}
    {{- text -}}
  {%- else -%}
    {{- raise_exception('this model takes a system message first, then those of user and assistant') -}}
  {%- endif -%}
{%- endfor -%}
"""
)
"""The format of the original code; published checkpoints ship no template."""
_OCR = (
    _PARTS + "{{- bos_token -}}{%- for message in messages -%}{{- text_of(message.content) -}}{%- endfor -%}"
)


def chat_template(config: ModelConfig) -> str:
    return _CHAT


def ocr_template(config: ModelConfig) -> str:
    """Of DeepSeek-OCR and its kin: the text alone."""
    return _OCR


@dataclass(frozen=True, slots=True)
class DeepseekVL2:
    tile: int  # pixels along one side of a tile
    patch_size: int
    merge: int  # patches along each side of a token
    canvases: tuple[Size, ...]  # possible sizes of all tiles together, in the checkpoint's order
    image_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = False
    markup: ClassVar[tuple[str, ...]] = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, tile = _vision_and_tile(files)
        processor = files.processor
        raw = files.config.raw
        if raw.get("tile_tag", "2D") != "2D":
            reason = f"config.json says tile_tag={raw['tile_tag']!r}"
            raise ConfigError(f"{reason}; rows of tiles are marked here, as by '2D'")
        sizes = base.setting("candidate_resolutions", processor, raw, default=())
        ours = {"patch_size": vision.patch_size, "downsample_ratio": vision.spatial_merge_size}
        base.check_agreement("processor_config.json", processor, ours)
        return cls(
            tile=tile,
            patch_size=vision.patch_size,
            merge=vision.spatial_merge_size,
            canvases=_canvases(sizes, tile),
            image_token_id=_image_token(files),
            settings={**files.image_processor},
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    @property
    def patches(self) -> int:
        """Patches along one side of a tile; a rest of pixels is dropped."""
        return self.tile // self.patch_size

    @property
    def side(self) -> int:
        """Tokens along one side of a tile; the last one of a row may be padded."""
        return -(-self.patches // self.merge)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """Limits on all tiles together. Images always fill their tiles, so there is no minimum."""
        return base.limits(min_pixels, max_pixels, self.tile**2, max(map(area, self.canvases)))

    def max_pixels_for(self, images: int, max_pixels: int) -> int:
        if images <= _MAX_IN_TILES:
            return max_pixels
        return min(max_pixels, self.tile**2)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        canvases = self._allowed(max_pixels)
        shape = {"tile": self.tile, "patch": self.patch_size, "merge": self.merge}
        return base.tag({**self.settings, **shape, "canvases": canvases})

    def _allowed(self, max_pixels: int) -> list[Size]:
        """Canvases within the limit, or a single tile."""
        within = [canvas for canvas in self.canvases if area(canvas) <= max_pixels]
        return within or [Size(self.tile, self.tile)]

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        canvas = best_canvas(size, self._allowed(max_pixels))
        return self._of(canvas, size.inside(canvas))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The maximum of tiles and the maximum of tokens, though perhaps not of the same image."""
        every = [self._of(canvas, canvas) for canvas in self._allowed(max_pixels)]
        maximum = max(every, key=lambda geometry: geometry.tokens)
        tiled = max(every, key=lambda geometry: geometry.grid.patches)
        return replace(tiled, tokens=maximum.tokens, slots=maximum.slots)

    def _of(self, canvas: Size, resized: Size) -> Geometry:
        columns = canvas.width // self.tile
        rows = canvas.height // self.tile
        cells = Size(columns * self.side, rows * self.side)
        slots = self.side * (self.side + 1) + 1 + cells.height * (cells.width + 1)
        grid = Grid(1 + rows * columns, self.patches, self.patches)
        return Geometry(resized, grid, slots, slots, Tiling(columns, rows, cells, cells))

    expand = base.expand_to_embeddings
    positions = base.sequential_positions


def _vision_and_tile(files: Files) -> tuple[VisionConfig, int]:
    vision = files.config.vision
    if vision is None or vision.image_size is None:
        reason = "config.json has no vision_config, or one without image_size"
        raise ConfigError(f"{reason}, so this model takes no pictures")
    return vision, vision.image_size


def _canvases(resolutions: Sequence[Sequence[int]], tile: int) -> tuple[Size, ...]:
    """[width, height] each. The first one is also the canvas of the whole image."""
    sizes = tuple(Size(int(width), int(height)) for width, height in resolutions)
    are_tiles = all(side >= tile and side % tile == 0 for size in sizes for side in size)
    if not are_tiles or not sizes or sizes[0].width != tile:
        setting = f"candidate_resolutions {[list(size) for size in sizes]}"
        rule = f"be made of tiles of {tile}x{tile} pixels, which the vision tower takes"
        raise ConfigError(f"{setting} must {rule}, and begin with one that is as wide")
    return sizes


def _image_token(files: Files) -> int:
    """The id of the token that processor_config.json names, as config.json has none."""
    if files.config.image_token_id is not None:
        return files.config.image_token_id
    name = files.processor.get("image_token", "<image>")
    file = files.path / "tokenizer.json"
    if not file.is_file():
        return _UNKNOWN
    token_id = added_tokens(file).get(name)
    if token_id is None:
        raise ConfigError(f"tokenizer.json has no token {name!r}, which stands for a picture; add it there")
    return token_id
