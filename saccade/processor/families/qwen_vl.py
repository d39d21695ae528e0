"""The first Qwen-VL: every image is resized to one square and resampled to n_queries embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from saccade.checkpoint.config import ModelConfig
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.types.media import Geometry, Grid, Size


@dataclass(frozen=True, slots=True)
class QwenVL:
    side: int  # of the square, in pixels
    patch_size: int
    queries: int  # embeddings of an image
    image_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = True

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision = files.config.vision
        image_token = files.config.image_token_id
        if vision is None or vision.image_size is None or image_token is None:
            names = "visual needs image_size and image_start_id"
            raise ConfigError(f"config.json: {names}, or this model takes no pictures")
        if vision.image_size % vision.patch_size:
            message = f"visual: a side of {vision.image_size} is not cut into patches of {vision.patch_size}"
            raise ConfigError(message)
        queries = files.config.raw["vision_config"]["n_queries"]
        if queries < 1 or math.isqrt(queries) ** 2 != queries:
            raise ConfigError(f"visual: n_queries={queries} must be a square, as queries lie on a grid")
        return cls(
            side=vision.image_size,
            patch_size=vision.patch_size,
            queries=queries,
            image_token_id=image_token,
            settings=base.pixel_settings(files.image_processor),
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The tower takes one size only; limits are ignored."""
        return self.side**2, self.side**2

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        shape = {"side": self.side, "patch": self.patch_size, "queries": self.queries}
        return base.tag({**self.settings, **shape})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        return self.largest(min_pixels, max_pixels)

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        patches = self.side // self.patch_size
        return Geometry(Size(self.side, self.side), Grid(1, patches, patches), self.queries, self.queries)

    expand = base.expand_to_embeddings
    positions = base.sequential_positions


CHATML = """\
{%- set pictures = namespace(count=0) -%}
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{%- set pictures.count = pictures.count + 1 -%}
{{- 'Picture ' ~ pictures.count ~ ': <img><imgpad></img>\\n' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template(config: ModelConfig) -> str | None:
    """ChatML with numbered images, if generation_config.json asks for it; the base model cannot chat."""
    return CHATML if config.raw.get("chat_format") == "chatml" else None
