"""What a processor of Transformers makes of a size of picture, without the pixels.

The code of a family runs as it is. The steps under it, which families share, get pictures that have a shape
and no content, and return such pictures: an array whose pixels are all one value in memory, or a tensor of
torch's `meta` device. So a picture of 25 megapixels costs what its tokens cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.checkpoint.hf_processor import Leaves, processed

_PROBES = ((300, 211), (64, 64), (37, 90), (640, 480), (480, 641), (1280, 960), (1600, 200), (90, 900))
_MIN_SIDE = 5  # of an array: one of fewer rows could be one of channels


class SizeRuns:
    """Inputs of the model for a prompt that is one blank picture, by its size (width, height)."""

    def __init__(self, processor: Any, written: str) -> None:
        self._processor = processor
        self._written = written
        self._shapes = _without_pixels(processor)
        if self._shapes is not None:
            agree = [self._agrees(size) for size in _PROBES]
            if False in agree or True not in agree:
                self._shapes = None

    @property
    def is_cheap(self) -> bool:
        return self._shapes is not None

    def __call__(self, size: tuple[int, int]) -> dict[str, Any]:
        if self._shapes is not None and min(size) >= _MIN_SIDE:
            with suppress(Exception):  # the blank picture tells whether it is the size or the shape
                return self._of_shape(size)
        return self._of_blank(size)

    def _of_blank(self, size: tuple[int, int]) -> dict[str, Any]:
        return dict(processed(self._processor, self._written, Image.new("RGB", size)))

    def _of_shape(self, size: tuple[int, int]) -> dict[str, Any]:
        shape: Any = _one_value((size[1], size[0], 3), np.uint8)
        inputs = dict(processed(self._shapes, self._written, shape))
        leaves = Leaves.of(inputs)
        if any(getattr(value, "is_meta", False) for value in leaves.rest):
            raise ValueError("a size that is a pixel")
        return inputs

    def _agrees(self, size: tuple[int, int]) -> bool | None:
        """None: a size that it does not take says nothing of shapes."""
        try:
            blank = Leaves.of(self._of_blank(size))
        except Exception:
            return None
        try:
            return blank.is_like(Leaves.of(self._of_shape(size)))
        except Exception:
            return False


def _without_pixels(processor: Any) -> Any:
    """A copy that takes shapes; None where the steps of its image processor are not known."""
    without = copy(processor)
    with suppress(LookupError):
        without.image_processor = with_steps(processor.image_processor, _STEPS)
        return without
    return None


def with_steps(images: Any, steps: Mapping[str, Callable[[Any], type]]) -> Any:
    """A copy of an image processor with other steps under its code, by the name of the class that has them.

    In the order of bases these come after its own class and before that class, so that `super()` meets them.
    """
    backend = next((base for base in type(images).__mro__ if base.__name__ in steps), None)
    if backend is None:
        raise LookupError(f"{type(images).__name__} has none of {', '.join(steps)}")
    bases = (type(images), steps[backend.__name__](backend))
    twin = copy(images)
    twin.__class__ = type(type(images).__name__, bases, {})
    return twin


def _one_value(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _of_arrays(backend: Any) -> type:
    """Steps of `PilBackend`, images [3, height, width]."""
    own = sys.modules[backend.__module__]

    class ArrayShapes(backend):  # type: ignore[misc]
        def process_image(self, image: Any, *args: Any, **named: Any) -> Any:
            return np.moveaxis(image, -1, 0)

        def resize(self, image: Any, size: Any, *args: Any, **named: Any) -> Any:
            return _one_value((*image.shape[:-2], *_resized(own, image, size)), image.dtype)

        def rescale(self, image: Any, *args: Any, **named: Any) -> Any:
            return _one_value(image.shape, np.float32)

        def normalize(self, image: Any, *args: Any, **named: Any) -> Any:
            return _one_value(image.shape, np.float32)

    return ArrayShapes


def _resized(own: Any, image: Any, size: Any) -> tuple[int, int]:
    """As `PilBackend.resize` has it."""
    shape = image.shape[-2:]
    if size.shortest_edge and size.longest_edge:
        height, width = own.get_size_with_aspect_ratio(shape, size.shortest_edge, size.longest_edge)
    elif size.shortest_edge:
        height, width = own.get_resize_output_image_size(
            image, size=size.shortest_edge, default_to_square=False, input_data_format="channels_first"
        )
    elif size.max_height and size.max_width:
        height, width = own.get_image_size_for_max_height_width(shape, size.max_height, size.max_width)
    else:
        height, width = size.height, size.width
    return height, width


def _of_tensors(backend: Any) -> type:
    """Steps of `TorchvisionBackend`: what follows runs on tensors without memory."""
    torch = sys.modules["torch"]

    class TensorShapes(backend):  # type: ignore[misc]
        def process_image(self, image: Any, *args: Any, **named: Any) -> Any:
            return torch.empty((3, *image.shape[:2]), dtype=torch.uint8, device="meta")

    return TensorShapes


_STEPS: dict[str, Callable[[Any], type]] = {"PilBackend": _of_arrays, "TorchvisionBackend": _of_tensors}
