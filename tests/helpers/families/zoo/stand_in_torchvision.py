"""The few functions of torchvision that image processors of Transformers call, for a machine without that library.

Some families have no image processor for Pillow. With `provided()` theirs load and run as they are; nothing else in
the process sees a torchvision, and afterwards Transformers is as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

MODULES = {  # where Transformers looks for a class, and the file that has it
    "cohere2_vision": "image_processing_cohere2_vision.Cohere2VisionImageProcessor",
    "gemma4_unified": "image_processing_gemma4_unified.Gemma4UnifiedImageProcessor",
    "inkling": "image_processing_inkling.InklingImageProcessor",
    "inkling2": "image_processing_inkling2.Inkling2ImageProcessor",
    "lfm2_vl": "image_processing_lfm2_vl.Lfm2VlImageProcessor",
    "llama4": "image_processing_llama4.Llama4ImageProcessor",
    "kimi_k25": "image_processing_kimi_k25.Kimi_K25ImageProcessor",
    "molmo2": "image_processing_molmo2.Molmo2ImageProcessor",
    "nemotron_h_omni": "image_processing_nemotron_h_omni.NemotronH_Omni_Reasoning_V3ImageProcessor",
    "perception_lm": "image_processing_perception_lm.PerceptionLMImageProcessor",
    "phi4_multimodal": "image_processing_phi4_multimodal.Phi4MultimodalImageProcessor",
    "pixtral": "processing_pixtral.PixtralProcessor",
    "pp_formulanet": "image_processing_pp_formulanet.PPFormulaNetImageProcessor",
    "step3p7": "image_processing_step3p7.Step3p7ImageProcessor",
    "unlimited_ocr": "image_processing_unlimited_ocr.UnlimitedOcrImageProcessor",
}


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "area"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(
    image: Tensor, size: Sequence[int], interpolation: Any = InterpolationMode.BILINEAR, antialias: bool = True
) -> Tensor:
    batch = image.reshape(-1, *image.shape[-3:]).float()
    if not isinstance(interpolation, InterpolationMode):  # Pillow's number
        interpolation = InterpolationMode[Image.Resampling(interpolation).name]
    smooth = interpolation in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
    found = functional.interpolate(batch, tuple(size), mode=interpolation.value, antialias=antialias and smooth)
    if not image.is_floating_point():
        found = found.round().clamp(0, 255)
    return found.to(image.dtype).reshape(*image.shape[:-2], *size)


def pad(image: Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    left, top, right, bottom = padding
    height, width = image.shape[-2:]
    padded = image.new_empty(*image.shape[:-2], top + height + bottom, left + width + right)
    padded[:] = torch.as_tensor(fill, dtype=image.dtype).reshape(-1, 1, 1)
    padded[..., top : top + height, left : left + width] = image
    return padded


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    return (image - torch.as_tensor(mean).reshape(-1, 1, 1)) / torch.as_tensor(std).reshape(-1, 1, 1)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: Tensor) -> Tensor:
    return image.expand(*image.shape[:-3], 3, -1, -1) if image.shape[-3] == 1 else image


def rgb_to_grayscale(image: Tensor, num_output_channels: int = 1) -> Tensor:
    weights = torch.tensor([0.2989, 0.587, 0.114]).reshape(3, 1, 1)
    gray = (image.float() * weights).sum(-3, keepdim=True).to(image.dtype)
    return gray.expand(*image.shape[:-3], num_output_channels, -1, -1)


def pil_to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _modules() -> dict[str, ModuleType]:
    made = ModuleType("torchvision.transforms.v2.functional")
    names = (resize, pad, normalize, crop, grayscale_to_rgb, rgb_to_grayscale, pil_to_tensor, InterpolationMode)
    vars(made).update({each.__name__: each for each in names})
    parents = [ModuleType(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")]
    for parent, child in zip(parents, [*parents[1:], made], strict=True):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    return {each.__name__: each for each in (*parents, made)}


@contextmanager
def provided() -> Iterator[None]:
    """Transformers with the image processors of MODULES, if torchvision is not installed."""
    if find_spec("torchvision"):
        yield
        return
    backends = import_module("transformers.image_processing_backends")
    modules = _modules()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "tvF", modules["torchvision.transforms.v2.functional"], raising=False)
        modes = {
            getattr(Image.Resampling, mode.name): mode for mode in InterpolationMode if mode.value != "nearest-exact"
        }
        patch.setattr(backends, "pil_torch_interpolation_mapping", modes)
        with pytest.MonkeyPatch.context() as importing:
            for name, module in modules.items():
                importing.setitem(sys.modules, name, module)
            found = {name: _load(name, place) for name, place in MODULES.items()}
        for name, kind in found.items():
            for module in ("transformers", f"transformers.models.{name}"):
                patch.setattr(import_module(module), kind.__name__, kind)
        yield


def _load(name: str, place: str) -> Any:
    folder = f"transformers.models.{name}"
    file, kind = place.split(".")
    if file.startswith("processing_"):  # it asks this one for a function
        import_module(f"{folder}.image_{file}")
    return getattr(import_module(f"{folder}.{file}"), kind)
