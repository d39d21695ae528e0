"""What the engine may ask of a model, whatever its family. Tensors in, tensors out: no requests, no blocks, no text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.models.vision.preprocess import ImagePixels
from saccade.types import Geometry, Grid

if TYPE_CHECKING:
    from saccade.models.layers.decoder import Decoder

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [T, heads, d]. It keeps k and v for later."""

Encoding = Generator[int, None, list[Tensor]]
"""Encoding of some pictures: pauses after each layer or a few, and says how many these were; returns one
[slots, width] tensor per picture.

The width is the decoder's, or a multiple of it for towers that feed several of its layers (`TextConfig.num_deepstack`).
"""


class CrossAttentionRows(NamedTuple):
    """Rows of a step that look at the same pictures."""

    rows: Tensor  # int64 [n]: packed rows
    embeddings: tuple[Tensor, ...]  # what `encode` returned for each picture they see


class VisionLanguageModel(Protocol):
    config: ModelConfig
    decoder: Decoder  # for those who run its layers with kernels of their own

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """Resize, crop, normalise and cut an RGB picture [H, W, 3] -> [patches, patch_dim] on the model's device.

        A picture that is there already is worked on there; the patches are the same. Models that take video are given
        frame groups [frames, H, W, 3] too, of one frame or more.
        """

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Run the vision tower over the packed patches of several pictures [sum of patches, patch_dim]."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> rows as wide as what `encode` returns"""

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Packed rows of `embed` and `encode` at rotary positions [axes, T] -> [T, hidden], final norm applied."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]"""


@runtime_checkable
class EagerModel(Protocol):
    """A model whose decoder no kernels know: on every device it runs in plain PyTorch, through `forward`."""

    eager_reason: str  # for the start-up log


class CrossAttentionModel(VisionLanguageModel, Protocol):
    """A model whose spans last (`Span.is_cross_attended`): layers of its own read pictures, so it is told who sees what."""

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, seen: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        """As above. Rows that `seen` does not name look at nothing, and nothing they become depends on a picture."""


class WindowGroup(NamedTuple):
    """Windows of equal length, computed together."""

    tokens: Tensor  # int64 [windows, length]: their packed rows
    rows: Tensor  # int64 [windows]: the states that belong to them
    keep_in: Tensor | None = None  # int64 [windows]: rows that get a copy of what they are then


class States(NamedTuple):
    """What layers without keys and values remember of each request. Whoever reads a row leaves the next state there."""

    past: Tensor  # [layers, rows, channels, kernel - 1]: inputs that the next convolution still sees
    memory: Tensor  # float32 [layers, rows, heads, key, value]
    groups: Sequence[WindowGroup]  # every packed token is in one of them


class RecurrentModel(VisionLanguageModel, Protocol):
    """A model with such layers (`TextConfig.linear`)."""

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor: ...


@runtime_checkable
class Tiled(Protocol):
    """A model whose tower sees tiles: what it makes of a picture's tiles has to be put together."""

    def join(self, features: Tensor, geometry: Geometry) -> Tensor:
        """All that `encode` returned for one picture -> its embeddings in the order of the prompt [slots, hidden]."""
