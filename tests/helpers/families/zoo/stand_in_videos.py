"""Video processors of Transformers for a machine without torchvision: with the stand-in's few functions.

Pictures keep the processors that they have without torchvision: only a class of videos is given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from tests.helpers.families.zoo.stand_in_torchvision import InterpolationMode, _modules


@contextmanager
def provided(name: str) -> Iterator[None]:
    """Transformers with the video processor of this class."""
    if find_spec("torchvision"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        functional = _modules()["torchvision.transforms.v2.functional"]
        modes = {
            getattr(Image.Resampling, mode.name): mode for mode in InterpolationMode if mode.value != "nearest-exact"
        }
        for module in ("image_processing_backends", "video_processing_utils"):
            patch.setattr(import_module(f"transformers.{module}"), "tvF", functional, raising=False)
        patch.setattr(import_module("transformers.image_processing_backends"), "pil_torch_interpolation_mapping", modes)
        library = import_module("transformers")
        automatic = import_module("transformers.models.auto.video_processing_auto").AutoVideoProcessor
        patch.setattr(library, "AutoVideoProcessor", automatic, raising=False)
        patch.setattr(library, name, _class(name), raising=False)
        if name == "SmolVLMVideoProcessor":  # it writes how many frames there are in words, by a library
            patch.setattr(import_module("transformers.models.smolvlm.processing_smolvlm"), "num2words", "n{}".format)
        yield


def to_pil_image(image: Tensor) -> Image.Image:
    return Image.fromarray(np.asarray(image.permute(1, 2, 0)))


def _class(name: str) -> Any:
    models = Path(import_module("transformers").__file__ or "").parent / "models"
    files = models.glob("*/video_processing_*.py")
    file = next(file for file in files if f"class {name}(" in file.read_text("utf-8"))
    utils = import_module("transformers.utils")
    with pytest.MonkeyPatch.context() as importing:
        for module in _more_modules():
            importing.setitem(sys.modules, module.__name__, module)
        for where in (utils, import_module("transformers.utils.import_utils")):
            for question in ("is_torchvision_available", "is_torchvision_v2_available"):
                importing.setattr(where, question, lambda: True)
        return getattr(import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)


def _more_modules() -> list[ModuleType]:
    """Those of pictures, and an older name of their functions."""
    modules = _modules()
    vars(modules["torchvision.transforms"])["InterpolationMode"] = InterpolationMode
    older = ModuleType("torchvision.transforms.functional")
    vars(older).update(vars(modules["torchvision.transforms.v2.functional"]) | {"to_pil_image": to_pil_image})
    older.__name__ = "torchvision.transforms.functional"
    return [*modules.values(), older]
