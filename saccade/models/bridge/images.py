"""Images for a model of Transformers: what its processor makes of one, as rows of numbers and back.

image ──processor──► ids, grids, masks       a function of the image's size: kept by size
                     floating-point tensors  the content: one after the other, cut into rows [n, patch_dim]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from saccade.checkpoint.hf_image_part import ImagePart
from saccade.checkpoint.hf_processor import Frame, Leaves, Placeholder, frame_of, processed
from saccade.checkpoint.hf_shapes import SizeRuns
from saccade.errors import RequestError
from saccade.models.bridge.errors import Unfit
from saccade.models.vision.preprocess import Pixels, Undecoded, resize
from saccade.types.media import Size

Made = Callable[[Pixels], dict[str, Any]]
"""Inputs of the model that the pixels of an image become, and maybe others that follow from its size."""

Form = TypeVar("Form", bound=Hashable)
_KEPT = 256  # sizes, of at most so many bytes
_KEPT_BYTES = 1 << 28
_PLACED = 8  # sizes of which masks and ids stay on the device
_BLANKS = (Size(512, 384), Size(1280, 1280), Size(1280, 720), Size(720, 1280), Size(2048, 2048), Size(64, 64))
_NOISE = (Size(300, 211), Size(37, 90), Size(1280, 960), Size(1200, 200))


class MediaInputs(Generic[Form]):
    """What a processor makes of media, kept by all that is known of one before it is decoded."""

    def __init__(
        self,
        runs: Callable[[Form], dict[str, Any]],
        frame: Frame,
        patch_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.frame = frame
        self.patch_dim = patch_dim
        self.dtype = dtype
        self.device = device
        self._runs = runs
        self._lock = Lock()  # of what is kept; images are prepared by several threads
        self._kept: OrderedDict[Form, Leaves] = OrderedDict()  # without content, which is of one image
        self._on_device: Callable[[Form], Leaves] = lru_cache(maxsize=_PLACED)(self._placed)

    def packed(self, leaves: Leaves) -> Tensor:
        """[n, patch_dim] in host memory, pinned for a GPU: the content, padded to whole rows."""
        lengths = [tensor.numel() for tensor in leaves.content]
        whole = -(-sum(lengths) // self.patch_dim) * self.patch_dim
        flat = torch.empty(whole, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        *parts, rest = torch.split(flat, [*lengths, whole - sum(lengths)])
        for part, tensor in zip(parts, leaves.content, strict=True):
            part.view(tensor.shape).copy_(tensor)
        rest.zero_()
        return flat.view(-1, self.patch_dim)

    def inputs(self, rows: Tensor, form: Form) -> dict[str, Any]:
        """Of the model, for media of this form."""
        leaves = self._on_device(form)
        lengths = [tensor.numel() for tensor in leaves.content]
        parts = torch.split(rows.reshape(-1)[: sum(lengths)], lengths)
        content = [part.view(tensor.shape) for part, tensor in zip(parts, leaves.content, strict=True)]
        return leaves.joined(content)

    def checked(self, output: Mapping[str, Any], form: Form, what: str, blank: str) -> Leaves:
        """Those of what was made, if it has the sizes and tokens of a blank one."""
        expected = self.leaves(form)
        inputs = expected.joined(expected.content)
        leaves = Leaves.of(inputs | {name: value for name, value in output.items() if name in inputs})
        if not leaves.is_like(expected):
            message = f"of {what} the model's own processor makes other sizes or tokens than of {blank}"
            raise RequestError(message, code="invalid_image")
        return leaves

    def leaves(self, form: Form) -> Leaves:
        with self._lock:
            kept = self._kept.get(form)
            if kept is not None:
                self._kept.move_to_end(form)
        if kept is None:
            kept = Leaves.of(self._runs(form)).without_content()
            with self._lock:
                self._keep(form, kept)
        return kept

    def _placed(self, form: Form) -> Leaves:
        """On the device, but for content. A copy from memory that is not pinned waits for the last tower."""
        leaves = self.leaves(form)
        return Leaves.of(on_device(leaves.joined(leaves.content), self.device))

    def _keep(self, form: Form, leaves: Leaves) -> None:
        self._kept[form] = leaves
        total = sum(_bytes(other) for other in self._kept.values())
        while len(self._kept) > 1 and (total > _KEPT_BYTES or len(self._kept) > _KEPT):
            _, oldest = self._kept.popitem(last=False)
            total -= _bytes(oldest)


class ImageInputs(MediaInputs[Size]):
    def __init__(
        self, processor: Any, place: Placeholder, patch_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        runs = SizeRuns(processor, place.written)
        super().__init__(runs, frame_of(processor, place), patch_dim, dtype, device)
        self.processor = processor
        self.place = place
        resampling = getattr(processor.image_processor, "resample", None)
        self._resampling = int(resampling if isinstance(resampling, int) else Image.Resampling.BICUBIC)
        self._blank: dict[Size, Tensor] = {}  # one, on the device
        self._made = self._proven()

    def rows_of(self, image: Pixels | Undecoded, size: Size) -> Tensor:
        """Of an image that a deployment's limits make another size."""
        return self.rows(resize(image, size, self._resampling))

    def rows(self, image: Pixels) -> Tensor:
        return self.packed(self._leaves(self._made, image))

    def blank(self, rows: int) -> dict[str, Any]:
        """Inputs of the model for a black image of about so many rows; its masks are those of its size."""
        size = min(_BLANKS, key=lambda size: abs(_values(self.leaves(size)) - rows * self.patch_dim))
        if size not in self._blank:
            black = self.rows(np.zeros((size.height, size.width, 3), np.uint8))
            self._blank = {size: black.to(self.device)}
        return self.inputs(self._blank[size], size)

    def _whole(self, image: Pixels) -> dict[str, Any]:
        return dict(processed(self.processor, self.place.written, Image.fromarray(image)))

    def _proven(self) -> Made:
        """The cheapest way that makes of noise what the whole processor does."""
        pairs = []
        for size in _NOISE:
            pixels = _noise(size)
            try:
                pairs.append((pixels, self._leaves(self._whole, pixels)))
            except RequestError as error:
                raise Unfit(error.message) from None
            except Exception:  # it may not take all sizes
                continue
        for is_quick in (True, False):
            with suppress(Exception):  # whatever it raises, the whole processor runs then
                part = ImagePart(self.processor, self.place.written, is_quick=is_quick)
                if pairs and all(self._is_same(part, *pair) for pair in pairs):
                    return part
        return self._whole

    def _is_same(self, part: Made, pixels: Pixels, whole: Leaves) -> bool:
        contents = self._leaves(part, pixels).content, whole.content
        return all(map(torch.equal, *contents))

    def _leaves(self, made: Made, image: Pixels) -> Leaves:
        """Those of its size, but for what was made of it."""
        size = Size(image.shape[1], image.shape[0])
        self.leaves(size)  # a size that the processor does not take
        return self.checked(
            made(image), size, "a picture", f"a blank one of its {size.width}x{size.height} pixels"
        )


def _noise(size: Size) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (size.height, size.width, 3), np.uint8)


def on_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    moved = pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(device), inputs)
    placed: dict[str, Any] = moved
    return placed


def _bytes(leaves: Leaves) -> int:
    """Of masks and sizes: content has no memory here."""
    tensors = [value for value in leaves.values if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


def _values(leaves: Leaves) -> int:
    return sum(tensor.numel() for tensor in leaves.content)
