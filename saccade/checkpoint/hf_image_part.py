"""The image processor of a processor of Transformers, alone: called for an image as the whole calls it.

Without the prompt, whose tokens are those of every image of its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.checkpoint.hf_processor import processed
from saccade.checkpoint.hf_shapes import with_steps

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
_MIN_SIDE = 5  # of an array: one of fewer rows could be one of channels


class ImagePart:
    def __init__(self, processor: Any, written: str, *, is_quick: bool) -> None:
        """Raises whatever the processor does, and ValueError if it does not ask for an image just once."""
        images = processor.image_processor
        self._images = with_steps(images, {"PilBackend": _quick_steps}) if is_quick else images
        self._depth, self._how = _call_of(processor, written)

    def __call__(self, pixels: Pixels) -> dict[str, Any]:
        """Inputs of the model that the pixels become, and maybe more."""
        argument: Any = pixels if pixels.flags.writeable else pixels.copy()  # or torch warns
        if min(pixels.shape[:2]) < _MIN_SIDE:
            argument = Image.fromarray(pixels)
        for _ in range(self._depth):
            argument = [argument]
        return dict(self._images(argument, **self._how))


def _call_of(processor: Any, written: str) -> tuple[int, Mapping[str, Any]]:
    """How deep the image is in lists, and the other arguments, in a call by the whole processor."""
    calls: list[tuple[Any, Mapping[str, Any]]] = []
    listening = copy(processor)
    listening.image_processor = copy(processor.image_processor)
    kind = type(processor.image_processor)

    def listen(self: Any, images: Any, **how: Any) -> Any:
        calls.append((images, dict(how)))
        return kind.__call__(self, images, **how)

    listening.image_processor.__class__ = type(kind.__name__, (kind,), {"__call__": listen})
    processed(listening, written, Image.new("RGB", (64, 64)))
    ((images, how),) = calls
    depth = 0
    while isinstance(images, (list, tuple)):
        (images,) = images
        depth += 1
    return depth, how


def _quick_steps(backend: Any) -> type:
    """Of `PilBackend`, with the same results: without an array of doubles, and along rows of memory."""

    class QuickSteps(backend):  # type: ignore[misc]
        def rescale(self, image: Any, scale: float, *args: Any, **named: Any) -> Any:
            if image.dtype != np.uint8:
                return super().rescale(image, scale, *args, **named)
            rescaled = np.empty(image.shape, np.float32)
            image = np.ascontiguousarray(image)
            np.multiply(image, scale, out=rescaled, dtype=np.float64, casting="unsafe")
            return rescaled

        def normalize(self, image: Any, mean: Any, std: Any, *args: Any, **named: Any) -> Any:
            if image.dtype != np.float32 or not len(image) == np.size(mean) == np.size(std):
                return super().normalize(image, mean, std, *args, **named)
            normalised = np.empty_like(image)
            of_channels = zip(np.asarray(mean, np.float32), np.asarray(std, np.float32), strict=True)
            for plane, made, (middle, width) in zip(image, normalised, of_channels, strict=True):
                np.subtract(plane, middle, out=made)
                np.divide(made, width, out=made)
            return normalised

    return QuickSteps
