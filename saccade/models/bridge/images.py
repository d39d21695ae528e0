"""Images for a model of Transformers: what its processor makes of one, as rows of numbers and back.

image ──processor──► ids, grids, masks       a function of the image's size: kept by size
                     floating-point tensors  the content: one after the other, cut into rows [n, patch_dim]
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils import _pytree as pytree

from saccade.checkpoint.hf_processor import Leaves, Placeholder, frame_of, processed
from saccade.types.media import Size

_KEPT = 256  # sizes, of at most so many bytes
_KEPT_BYTES = 1 << 28
_BLANKS = (Size(512, 384), Size(1280, 1280), Size(1280, 720), Size(720, 1280), Size(2048, 2048), Size(64, 64))


class ImageInputs:
    def __init__(
        self, processor: Any, place: Placeholder, patch_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.processor = processor
        self.place = place
        self.patch_dim = patch_dim
        self.dtype = dtype
        self.device = device
        self.frame = frame_of(processor, place)
        self._by_size: OrderedDict[Size, Leaves] = OrderedDict()  # without content, which is of one image

    def rows(self, image: Image.Image) -> Tensor:
        """[n, patch_dim]: the content, padded to whole rows."""
        leaves = self._leaves(image)
        flat = torch.cat([tensor.to(self.dtype).reshape(-1) for tensor in leaves.content])
        whole = flat.new_zeros(-(-len(flat) // self.patch_dim) * self.patch_dim)
        whole[: len(flat)] = flat
        return whole.view(-1, self.patch_dim).to(self.device)

    def inputs(self, rows: Tensor, size: Size | None) -> dict[str, Any]:
        """Of the model. `size`: of the image; None for blank rows: then one of about so many rows."""
        leaves = self._of_size(self._blank_size(len(rows)) if size is None else size)
        lengths = [tensor.numel() for tensor in leaves.content]
        flat = rows.reshape(-1)
        flat = F.pad(flat, (0, max(0, sum(lengths) - len(flat))))  # blank rows may be too few
        parts = torch.split(flat[: sum(lengths)], lengths)
        content = [part.view(tensor.shape) for part, tensor in zip(parts, leaves.content, strict=True)]
        return on_device(leaves.joined(content), self.device)

    def _blank_size(self, rows: int) -> Size:
        return min(_BLANKS, key=lambda size: abs(_values(self._of_size(size)) - rows * self.patch_dim))

    def _of_size(self, size: Size) -> Leaves:
        kept = self._by_size.get(size)
        return self._leaves(Image.new("RGB", size)) if kept is None else kept

    def _leaves(self, image: Image.Image) -> Leaves:
        leaves = Leaves.of(processed(self.processor, self.place.written, image))
        pairs = zip(leaves.values, leaves.is_content, strict=True)
        shapes = [value.to("meta") if yes else value for value, yes in pairs]
        self._by_size[Size(*image.size)] = leaves._replace(values=shapes)
        total = sum(_bytes(other) for other in self._by_size.values())
        while len(self._by_size) > 1 and (total > _KEPT_BYTES or len(self._by_size) > _KEPT):
            _, oldest = self._by_size.popitem(last=False)
            total -= _bytes(oldest)
        return leaves


def on_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
    placed: dict[str, Any] = moved
    return placed


def _bytes(leaves: Leaves) -> int:
    """Of masks and sizes: content has no memory here."""
    tensors = [value for value in leaves.values if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


def _values(leaves: Leaves) -> int:
    return sum(tensor.numel() for tensor in leaves.content)
