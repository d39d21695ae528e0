"""A pass of the vision tower: decoded images packed together, some layers at a time. Knows no queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.media.video_pruning import Ints, Kept
from saccade.models.interface import EncodesBySize, Tiled, VisionLanguageModel
from saccade.models.layers.forward_types import Encoding
from saccade.runner.cuda.staging import to_device
from saccade.runner.encoder.image_errors import is_of_the_device
from saccade.runner.encoder.timing import DeviceWatch, HostWatch, Watch
from saccade.runner.encoder.upload import use_on_current_stream
from saccade.types.media import MediaItem


class Prepared(NamedTuple):
    """A decoded image."""

    patches: Tensor  # [patches, patch_dim]
    pruning: Kept | None  # tokens that stay; None: all
    decode_ms: float
    on_gpu: bool = False  # decoded there


class FinishedImage(NamedTuple):
    item: MediaItem
    embedding: Tensor  # [slots, hidden]
    cells: Ints | None  # [2, slots]: row and column of each embedding, of a pruned frame group
    decode_ms: float
    share: float  # of the pass's time


class EncoderPass:
    def __init__(
        self, model: VisionLanguageModel, images: Sequence[tuple[MediaItem, Prepared]], *, on_cuda: bool
    ) -> None:
        self.items = [item for item, _ in images]
        self.watch: Watch = DeviceWatch() if on_cuda else HostWatch()
        self.is_complete = False
        self.failure: type[Exception] | None = None  # not the error, whose traceback holds the tensors
        self._decode_ms = [prepared.decode_ms for _, prepared in images]
        self._prunings = [prepared.pruning for _, prepared in images]
        self._layers = _encode(model, self.items, [prepared.patches for _, prepared in images])
        self._embeddings: list[Tensor] = []  # once it is complete

    @property
    def patches(self) -> int:
        return sum(item.geometry.grid.patches for item in self.items)

    def run_layers(self, limit: float) -> int:
        """About `limit` layers, to the end if near, unless one fails; returns how many ran."""
        count = 0
        last = 1  # number of layers that ran together
        try:
            with self.watch.lap():
                while not self.is_complete and limit - count > last // 2:
                    last = self._run_next()
                    count += last
        except (RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError on CUDA
            if is_of_the_device(error):
                raise
            self.failure = type(error)
        return count

    def images(self) -> Iterator[FinishedImage]:
        """Once it is complete."""
        total = self.patches
        images = zip(self.items, self._embeddings, self._prunings, self._decode_ms, strict=True)
        for item, embedding, pruning, decode_ms in images:
            if pruning is not None:
                embedding = embedding.index_select(0, to_device(pruning.tokens, embedding.device))
            elif len(self.items) > 1:
                embedding = embedding.clone()  # a view would hold the whole pass after the others are evicted
            assert embedding.shape[0] == item.geometry.slots, "the bill and the tower disagree"
            cells = None if pruning is None else pruning.cells
            yield FinishedImage(item, embedding, cells, decode_ms, item.geometry.grid.patches / total)

    def _run_next(self) -> int:
        try:
            return next(self._layers)
        except StopIteration as stop:
            self._embeddings = list(stop.value)
            self.is_complete = True
            return 1


def _encode(model: VisionLanguageModel, items: Sequence[MediaItem], parts: list[Tensor]) -> Encoding:
    """Packs with the first layer: it may run out of memory, too, and is then retried like a layer."""
    # No method: a pass and its suspended layers would be a cycle, and keep their tensors when it is dropped.
    use_on_current_stream(parts)
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    parts.clear()
    geometries = [item.geometry for item in items]
    if isinstance(model, EncodesBySize):
        layers = model.encode_images(packed, geometries)
    else:
        layers = model.encode(packed, [geometry.grid for geometry in geometries])
    del packed  # the tower drops it after the patch embedding; no other reference may stay
    features = yield from layers
    if isinstance(model, Tiled):
        return [model.join(*pair) for pair in zip(features, geometries, strict=True)]
    return features
