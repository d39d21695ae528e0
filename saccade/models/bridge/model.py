"""A Transformers model as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.hf_processor import placeholder
from saccade.checkpoint.hf_video import form_of
from saccade.errors import RequestError
from saccade.models.bridge.attention import LayerAttention
from saccade.models.bridge.entrance import Entrance
from saccade.models.bridge.images import ImageInputs
from saccade.models.bridge.indexers import Indexers
from saccade.models.bridge.pauses import Pauses
from saccade.models.bridge.rope import follow_lengths
from saccade.models.bridge.states import StateLayers, TokensBefore, of_group
from saccade.models.bridge.tail import Tail
from saccade.models.bridge.text_model import TextModel
from saccade.models.bridge.together import Together
from saccade.models.bridge.videos import video_inputs
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.forward_types import Attention, Encoding, States
from saccade.models.layers.hybrid_decoder import HybridDecoder
from saccade.models.layers.ruled_decoder import RuledDecoder
from saccade.models.layers.torch_attention import PagedAttention
from saccade.models.state_dict import Parameters
from saccade.models.vision.preprocess import ImagePixels
from saccade.types.attention_reach import AttentionReach
from saccade.types.media import Clip, Geometry, Grid, Size


class ModelBridge:
    """`window`: tokens of the longest request."""

    is_random = False  # its weights: what it computes is not compared with much then
    no_videos = "its processor of videos cannot be loaded in this process"  # or what the proof says

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
        self.head = model.get_output_embeddings() or model.get_decoder().get_output_embeddings()
        self.place = placeholder(processor, config)
        self.images = ImageInputs(processor, self.place, config.vision.patch_dim, dtype, device)
        self.videos = video_inputs(processor, model.config, config.vision.patch_dim, dtype, device)
        hidden, width = config.text.hidden_size, config.text.embedding_size
        self.entrance = Entrance(model, self.text, hidden, width)
        self.pauses = Pauses(device)
        self.own_tower: Any = None  # its layers in ours
        self.together: Together | None = None  # how images share a call of it; None: they do not
        linear = config.text.linear
        self.states: StateLayers | None = None
        if linear is not None:
            values = linear.key_dim * linear.value_dim
            self.states = StateLayers(self.text.config, linear.layers, values)
        self.attention = LayerAttention(
            self.text, config.text.head_dim**-0.5, linear.layers if linear else ()
        )
        self.indexers = Indexers(self.text)
        self.tail = Tail()  # the proof finds it, and the number of RoPE axes
        self.axes = 1
        self._rope = follow_lengths(self.text, config.text.rope_switch, window)
        ends = (model.get_input_embeddings(), self.head)
        self.params: Parameters | None = None  # of a decoder of ours
        self.decoder: TextModel | Decoder = TextModel(config.text, *ends, self, layers=self.text)

    def eager_reason(self) -> str | None:
        if self.states is not None:
            return "its layers keep states"
        if self._rope is not None:
            return "its RoPE changes with a prompt's length"
        if self.config.text.blocks == "images":
            return "its pictures see each other, and not the text between them"
        if not all(rule.is_interval for rule in self.attention.rules.values()):
            return "its attention sees a prompt and, apart from it, a window"
        return None

    @property
    def reach(self) -> AttentionReach | None:
        return self.attention.reach

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        return self.prepare_on_host(image, geometry.resized, geometry.clip).to(self.device)

    def prepare_on_host(self, image: ImagePixels, size: Size, clip: Clip | None = None) -> Tensor:
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        if clip is None:
            return self.images.rows_of(pixels, size)
        if self.videos is None:
            raise RequestError(f"this model's videos are not read here: {self.no_videos}", code="unsupported")
        assert isinstance(pixels, np.ndarray), "frames are decoded"
        return self.videos.rows(pixels, clip)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Of blank patches."""
        return self._encode(patches, [grid.patches for grid in grids], [None] * len(grids))

    def encode_images(self, patches: Tensor, geometries: Sequence[Geometry]) -> Encoding:
        counts = [geometry.grid.patches for geometry in geometries]
        return self._encode(patches, counts, geometries)

    def _encode(
        self, patches: Tensor, counts: Sequence[int], geometries: Sequence[Geometry | None]
    ) -> Encoding:
        """Pauses after each layer over all images, or after each call of the tower."""
        parts = iter(list(zip(torch.split(patches, list(counts)), geometries, strict=True)))
        groups = [list(islice(parts, count)) for count in self._groups(list(map(_size_of, geometries)))]
        encoded = partial(self._embeddings, groups)
        return (yield from self.pauses.running(encoded, len(groups)))

    def _groups(self, sizes: Sequence[Size | None]) -> Iterable[int]:
        return [1] * len(sizes) if self.together is None else self.together.groups(sizes)

    def _embeddings(self, groups: list[list[tuple[Tensor, Geometry | None]]]) -> list[Tensor]:
        embeddings = []
        for group in groups:
            embeddings += self._encoded_together(group) or [self.encoded(*one) for one in group]
            if not self.pauses.has_layers:
                self.pauses.after_layers(len(groups))
        return embeddings

    def encoded(self, rows: Tensor, geometry: Geometry | None) -> Tensor:
        if geometry is not None and geometry.clip is not None:
            assert self.videos is not None, "its rows come from there"
            inputs = self.videos.inputs(rows, form_of(geometry.resized, geometry.clip))
            return cast(Tensor, self.videos.frame.inside(self.entrance.rows(inputs)))
        images = self.images
        inputs = images.blank(len(rows)) if geometry is None else images.inputs(rows, geometry.resized)
        return self.rows_of([inputs], ())[0]

    def _encoded_together(self, group: list[tuple[Tensor, Geometry | None]]) -> list[Tensor]:
        """Nothing for one, and where these cannot stand side by side, unlike those that were tried."""
        if len(group) == 1:
            return []
        sizes = tuple(geometry.resized for _, geometry in group if geometry is not None)
        try:
            inputs = [self.images.inputs(rows, size) for (rows, _), size in zip(group, sizes, strict=True)]
            return self.rows_of(inputs, sizes)
        except Exception as error:  # of any code of the model
            if isinstance(error, MemoryError) or "memory" in str(error):
                raise
            return []

    def rows_of(self, inputs: Sequence[Mapping[str, Any]], sizes: tuple[Size, ...]) -> list[Tensor]:
        """Of images that go through the tower in one call."""
        if len(inputs) == 1:
            return [self.images.frame.inside(self.entrance.rows(inputs[0]))]
        assert self.together is not None and self.own_tower is not None
        with self.own_tower.encoding(sizes):
            rows = self.entrance.rows(self.together.join(inputs))
        parts = torch.split(rows, [one["input_ids"].shape[1] for one in inputs])
        return [self.images.frame.inside(part) for part in parts]

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """All but the decoder's and the head's: which of them a tower reads is not known. And the embeddings
        of text, since a picture has tokens of it."""
        decoder = {
            id(tensor) for end in (self.text, self.head) for tensor in (*end.parameters(), *end.buffers())
        } - {id(tensor) for tensor in self.model.get_input_embeddings().parameters()}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in tensors if id(tensor) not in decoder}

    def embed(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.decoder, Decoder):
            return self.decoder.embed(token_ids)
        if self.entrance.extras:
            return self.entrance.rows({"input_ids": token_ids[None]})
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor:
        """Positions as `fallback_positions` makes them: RoPE axes, a row of blocks, a row of lengths."""
        rope, blocks, lengths = self._rows_of(positions)
        if isinstance(self.decoder, RuledDecoder):
            return self.decoder.forward(embeds, rope, attention, blocks)
        if isinstance(self.decoder, HybridDecoder):
            return self.decoder.forward(embeds, rope, attention, states)
        if isinstance(self.decoder, Decoder):
            return self.decoder.forward(embeds, rope, attention)
        if states is not None:
            return self._in_groups(embeds, rope, cast(PagedAttention, attention), states)
        with self._lengths(lengths), self.attention.of_step(attention, blocks):
            return self.decode(embeds[None], rope[:, None])[0]

    def decode(self, embeds: Tensor, rope: Tensor, cache: Any = None) -> Tensor:
        """Embeddings [B, T, width] at positions [axes, B, T] -> [B, T, hidden]."""
        if cache is None and getattr(self.text.config, "attn_temperature_tuning", False):
            cache = TokensBefore(rope[0, 0])
        hidden: Tensor = self.text(
            inputs_embeds=embeds[..., : self.config.text.hidden_size],
            position_ids=rope[0] if len(rope) == 1 else rope,
            attention_mask=self.indexers.mask(embeds.device),
            past_key_values=cache,
            use_cache=cache is not None,
            **self.entrance.arguments(embeds),
        ).last_hidden_state
        return hidden

    def _in_groups(self, embeds: Tensor, rope: Tensor, attention: PagedAttention, states: States) -> Tensor:
        """Windows of one length together, pieces of a window one after the other."""
        assert self.states is not None
        hidden = embeds.new_empty(len(embeds), self.config.text.hidden_size)
        for group in states.groups:
            cache = self.states.load(states, group.rows)
            batch = of_group(attention.batch, group.tokens)
            part = PagedAttention(attention.kv, batch, attention.scale, attention.backend)
            with self.attention.of_step(part, None):
                hidden[group.tokens] = self.decode(embeds[group.tokens], rope[:, group.tokens], cache)
            self.states.store(cache, states, group)
        return hidden

    def _rows_of(self, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        text = self.config.text
        rows = list(torch.split(positions, 1))
        if len(rows) < self.axes:  # a pass that only takes time
            rows = rows[:1] * self.axes
        lengths = blocks = None
        if len(rows) == self.axes:
            return torch.cat(rows), blocks, lengths
        if text.rope_switch is not None:
            lengths = rows.pop()[0]
        if text.blocks is not None:
            blocks = rows.pop()[0]
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
        if isinstance(self.decoder, Decoder):
            return self.decoder.logits(hidden)
        return self.tail(self.head(hidden).float())


def _size_of(geometry: Geometry | None) -> Size | None:
    """None: it goes through the tower by itself. A blank image, a video."""
    return None if geometry is None or geometry.clip is not None else geometry.resized


def decoder_of(model: Any) -> Any:
    """The module that takes embeddings and returns hidden states: none with a head of its own."""
    text = model.get_decoder()
    while hasattr(text, "lm_head") and hasattr(text, "model"):
        text = text.model
    return text
