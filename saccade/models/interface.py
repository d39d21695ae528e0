"""The model interface of the engine (vLLM: SupportsMultiModal). Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.models.layers.forward_types import Attention, CrossAttentionRows, Encoding, States
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, pixel_policy
from saccade.types.attention_reach import AttentionReach
from saccade.types.media import Clip, Geometry, Grid, Size

if TYPE_CHECKING:
    from saccade.models.layers.decoder import Decoder


class ModelParts(NamedTuple):
    """What the model of a family is made from."""

    config: ModelConfig
    params: Parameters
    image_processor: Mapping[str, Any]  # preprocessor_config.json
    ops: VisionOps


class VisionLanguageModel(Protocol):
    config: ModelConfig
    decoder: Decoder  # for the CUDA runner, which runs its layers with fused kernels

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """Resize, crop, normalise and cut an RGB image [H, W, 3] -> [patches, patch_dim] on the device.

        An image on the device is processed there, with equal results. Video models also take frame groups
        [frames, H, W, 3].
        """

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Run the vision tower over the packed patches of several images [sum of patches, patch_dim]."""

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """Every tensor that the result of `encode` depends on."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, width], as wide as what `encode` returns"""

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Packed embeddings at RoPE positions [axes, T] -> [T, hidden], final norm applied."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]"""


class CrossAttentionModel(VisionLanguageModel, Protocol):
    """A model with cross-attention layers (`Span.is_cross_attended`): it gets the rows of each image."""

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, rows: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        """Rows that are in none of `rows` skip cross-attention."""


class RecurrentModel(VisionLanguageModel, Protocol):
    """A model with linear attention layers (`TextConfig.linear`)."""

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor: ...


@runtime_checkable
class Tiled(Protocol):
    """A model whose tower encodes tiles, which have to be joined."""

    def join(self, features: Tensor, geometry: Geometry) -> Tensor:
        """All that `encode` returned for one image -> its embeddings in prompt order [slots, hidden]."""


@runtime_checkable
class EncodesBySize(Protocol):
    """A model whose tower takes more of an image than its patches: what its size tells."""

    def encode_images(self, patches: Tensor, geometries: Sequence[Geometry]) -> Encoding:
        """As `encode`, in place of it."""


@runtime_checkable
class PreparesOnHost(Protocol):
    """A model whose images are prepared by the CPU whatever its device is."""

    def prepare_on_host(self, image: ImagePixels, size: Size, clip: Clip | None = None) -> Tensor:
        """As `prepare` to this size, but in host memory: pinned, where the model's device is a GPU."""


@runtime_checkable
class HasReach(Protocol):
    """A model whose layers may all have windows."""

    @property
    def reach(self) -> AttentionReach | None:
        """None where a layer reads all that was computed."""


class DecoderModel:
    """What most families have in common: their parts, a resize and cut, and what the decoder implements."""

    decoder: Decoder
    layout: PatchLayout

    def __init__(self, parts: ModelParts) -> None:
        self.config = parts.config
        self.params = parts.params
        self.ops = parts.ops
        self.pixels = pixel_policy(parts.image_processor)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        small = self.ops.resize(image, geometry.resized, self.pixels.resample).to(self.params.device)
        return self.ops.cut(small, geometry.grid, self.layout, self.pixels, self.params.dtype)

    def encoder_weights(self) -> Mapping[str, Tensor]:
        assert self.params.targets, "the weights are packed"
        return {
            name: tensor for name, tensor in self.params.targets.items() if not name.startswith("decoder.")
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed(token_ids)

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self.decoder.forward(embeds, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)
