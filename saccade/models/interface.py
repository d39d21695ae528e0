"""What the engine may ask of a model, whatever its family. Tensors in, tensors out: no requests, no blocks, no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.models.layers.types import Attention, CrossAttentionRows, Encoding, States
from saccade.models.vision.preprocess import ImagePixels
from saccade.types import Geometry, Grid

if TYPE_CHECKING:
    from saccade.models.layers.decoder import Decoder


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


class CrossAttentionModel(VisionLanguageModel, Protocol):
    """A model with cross-attention layers (`Span.is_cross_attended`): it is told which rows attend to which image."""

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, seen: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        """As above. Rows that `seen` does not name look at nothing, and nothing they become depends on a picture."""


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
