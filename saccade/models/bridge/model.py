"""A Transformers model as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.hf_processor import placeholder
from saccade.models.bridge.attention import LayerAttention
from saccade.models.bridge.entrance import Entrance
from saccade.models.bridge.images import ImageInputs
from saccade.models.bridge.rope import follow_lengths
from saccade.models.bridge.tail import Tail
from saccade.models.bridge.text_model import TextModel
from saccade.models.layers.forward_types import Attention, Encoding
from saccade.models.vision.preprocess import ImagePixels
from saccade.types.media import Geometry, Grid, Size


class Bridge:
    """`window`: tokens of the longest request."""

    def __init__(
        self,
        config: ModelConfig,
        model: Any,
        processor: Any,
        device: torch.device,
        dtype: torch.dtype,
        window: int,
    ) -> None:
        assert config.vision is not None
        self.config = config
        self.model = model
        self.processor = processor
        self.device = device
        self.dtype = dtype
        self.window = window
        self.text = decoder_of(model)
        self.head = model.get_output_embeddings()
        self.token = placeholder(processor, config.model_type, config.image_token_id)
        self.images = ImageInputs(processor, self.token, config.vision.patch_dim, dtype, device)
        hidden, width = config.text.hidden_size, config.text.embedding_size
        self.entrance = Entrance(model, self.text, hidden, width)
        self.attention = LayerAttention(
            self.text, config.text.head_dim**-0.5, has_blocks=config.text.blocks is not None
        )
        self.tail = Tail()  # the proof finds it, and the number of RoPE axes
        self.axes = 1
        self._rope = follow_lengths(self.text, config.text.rope_switch, window)
        ends = (model.get_input_embeddings(), self.head)
        self.decoder = TextModel(config.text, *ends, self.forward, layers=self.text, eager=self._eager_reason)

    def _eager_reason(self) -> str | None:
        if self._rope is not None:
            return "its RoPE changes with a prompt's length"
        if not all(rule.is_plain for rule in self.attention.rules.values()):
            return "its attention is more than causal"
        if self.entrance.extras:
            return "its decoder takes more than embeddings"
        return None if self.tail == Tail() else "its logits are scaled or capped"

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        assert isinstance(pixels, np.ndarray), "what is not resized is decoded"
        return self.images.rows(Image.fromarray(pixels))

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Of blank patches."""
        return self._encode(patches, [grid.patches for grid in grids], [None] * len(grids))

    def encode_images(self, patches: Tensor, geometries: Sequence[Geometry]) -> Encoding:
        counts = [geometry.grid.patches for geometry in geometries]
        return self._encode(patches, counts, [geometry.resized for geometry in geometries])

    def _encode(self, patches: Tensor, counts: Sequence[int], sizes: Sequence[Size | None]) -> Encoding:
        """Pauses after each image, as Transformers' layers cannot be interrupted."""
        embeddings = []
        for rows, size in zip(torch.split(patches, counts), sizes, strict=True):
            embeddings.append(self.images.frame.inside(self.entrance.rows(self.images.inputs(rows, size))))
            yield 1
        return embeddings

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """All but the decoder's and the head's: which of them a tower reads is not known."""
        decoder = {
            id(tensor) for end in (self.text, self.head) for tensor in (*end.parameters(), *end.buffers())
        }
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in tensors if id(tensor) not in decoder}

    def embed(self, token_ids: Tensor) -> Tensor:
        if self.entrance.extras:
            return self.entrance.rows({"input_ids": token_ids[None]})
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Positions as `fallback_positions` makes them: RoPE axes, a row of blocks, a row of lengths."""
        rope, blocks, lengths = self._rows_of(positions)
        inputs = {
            "inputs_embeds": embeds[None, :, : self.config.text.hidden_size],
            "position_ids": rope if len(rope) == 1 else rope[:, None],
            "use_cache": False,
            **self.entrance.arguments(embeds),
        }
        with self._lengths(lengths), self.attention.of_step(attention, blocks):
            output = self.text(**inputs)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _rows_of(self, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = list(positions.split(1))
        lengths = rows.pop()[0] if self.config.text.rope_switch is not None else None
        blocks = rows.pop()[0] if self.config.text.blocks is not None else None
        return torch.cat(rows), blocks, lengths

    @contextmanager
    def _lengths(self, lengths: Tensor | None) -> Iterator[None]:
        if self._rope is None:
            yield
            return
        self._rope.lengths = lengths
        try:
            yield
        finally:
            self._rope.lengths = None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.tail(self.head(hidden).float())


def decoder_of(model: Any) -> Any:
    """The module that takes embeddings and returns hidden states: none with a head of its own."""
    text = model.get_decoder()
    while hasattr(text, "lm_head") and hasattr(text, "model"):
        text = text.model
    return text
