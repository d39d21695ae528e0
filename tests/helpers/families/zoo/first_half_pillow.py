"""Image processors of families for which Transformers has one with torchvision alone.

Each makes of a picture what a model of the family reads, with the least of the family's rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import AutoImageProcessor, BatchFeature, PreTrainedConfig
from transformers.image_utils import SizeDict
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorKwargs,
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)


class WholeKwargs(Siglip2ImageProcessorKwargs, total=False):
    return_row_col_info: bool


class WholeLfm2VlImageProcessorPil(Siglip2ImageProcessorPil):
    """Without tiles: a picture has as many patches as `max_num_patches` lets it have, in pairs."""

    valid_kwargs = WholeKwargs
    return_row_col_info = False
    use_thumbnail = True
    tile_size = 512
    downsample_factor = 2
    encoder_patch_size = 16

    def _preprocess(self, images: list[np.ndarray], **kwargs: Any) -> BatchFeature:
        side = kwargs["patch_size"] * self.downsample_factor
        most = kwargs["max_num_patches"] // self.downsample_factor**2
        sizes = [get_image_size_for_max_num_patches(*image.shape[-2:], side, most) for image in images]
        resized = [
            self.resize(image, SizeDict(height=height, width=width), resample=kwargs["resample"])
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        made = super()._preprocess(resized, **{**kwargs, "do_resize": False})
        if kwargs.get("return_row_col_info"):
            made |= {"image_rows": [1] * len(images), "image_cols": [1] * len(images), "image_sizes": sizes}
        return made


class TilesUnlimitedOcrImageProcessorPil(DeepseekOcr2ImageProcessorPil):
    """DeepSeek-OCR 2's tiles, with their rows and columns."""

    def _preprocess(self, images: list[np.ndarray], **kwargs: Any) -> BatchFeature:
        made = super()._preprocess(images, **kwargs)
        made["num_local_patches"] = [int(count) for count in made["num_local_patches"]]
        tile, limits = kwargs["tile_size"], (kwargs["min_patches"], kwargs["max_patches"])
        made["patches_grid"] = [
            list(get_optimal_tiled_canvas(image.shape[-2:], (tile, tile), *limits)) if count else [1, 1]
            for image, count in zip(images, made["num_local_patches"], strict=True)
        ]
        return made


class PillowConfig(PreTrainedConfig):
    """Of no model: Transformers finds image processors by the class of a config."""

    model_type = "zoo_pillow"


KINDS = {"whole": WholeLfm2VlImageProcessorPil, "tiles": TilesUnlimitedOcrImageProcessorPil}
AutoImageProcessor.register(PillowConfig, image_processor_classes=KINDS, exist_ok=True)
