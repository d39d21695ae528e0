"""Decode on a CUDA device: one CUDA graph per batch size, from the embeddings to the argmax of the logits.

    one int32 array a step   [6, size]   token, rotary position, slot, seq_len, row of the block tables,
                                         states of images that its cross-attention layers read

The sampled tokens stay on the device, by row of the block tables: the next step may begin before the host has
read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import DecodeMetadata, decode_inputs
from saccade.models.cuda.decoder import FusedDecoder, Mixers
from saccade.models.cuda.residual import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.graph_capture import capture
from saccade.runner.cuda.layer_kinds import LayerKinds
from saccade.runner.cuda.layer_pass import DecodePass
from saccade.runner.cuda.staging import Metadata, PinnedStaging


class DecodeRows(NamedTuple):
    """The latest token of each request and its metadata, all [size]."""

    tokens: Metadata  # -1 where only the device knows it yet
    positions: Metadata  # rotary; after the prompt all axes agree
    slots: Metadata
    seq_lens: Metadata  # tokens in the cache once this one is written
    rows: Metadata  # of the block tables
    states: Metadata  # of images, for decoders with cross-attention


_FIELDS = len(DecodeRows._fields)


class Decoded(NamedTuple):
    tokens: Tensor  # int64 [size]: the argmax, on the device; sampling overwrites its rows
    logits: Tensor  # [size, vocabulary] in the model's dtype; valid until the next run
    hidden: Tensor | None = None  # [size, H] after the norm, of prefill; as long as the logits
    rows: Tensor | None = None  # [T, H] after the norm: of all tokens of a prefill, where asked for


class DecodeGraphs:
    def __init__(
        self,
        decoder: FusedDecoder,
        kinds: LayerKinds,
        tables: BlockTables,
        block_size: int,
        requests: int,
    ) -> None:
        self.decoder = decoder
        self.kinds = kinds
        self.tables = tables
        self.block_size = block_size
        self.sizes = list(_sizes(requests))
        device = tables.blocks.device
        self._argmax = ArgmaxWorkspace.allocate(self.sizes[-1], device)
        self._metadata = torch.zeros(_FIELDS * self.sizes[-1], dtype=torch.int32, device=device)
        self._staging = PinnedStaging(_FIELDS * self.sizes[-1], device)
        self._logits = decoder.decoder.head.new_empty(self.sizes[-1], decoder.vocab_size)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        # By size, and whether rows attend to images.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def run(self, rows: DecodeRows) -> Decoded:
        count = len(rows.tokens)
        size = next(size for size in self.sizes if size >= count)
        self.send(rows, size)
        has_images = bool(rows.states.any())
        graph = self._graphs.get((size, has_images))
        if graph is None:
            self._forward(size, has_images)
        else:
            graph.replay()
        return self.decoded(count)

    def decoded(self, count: int) -> Decoded:
        """The first rows of the latest pass."""
        return Decoded(self._tokens[:count], self._logits[:count])

    def capture(self, pool: Any) -> None:
        nothing = torch.empty(0, dtype=torch.int32).numpy()
        for size in reversed(self.sizes):
            self.send(DecodeRows(*[nothing] * _FIELDS), size)
            for has_images in sorted({False, self.kinds.is_optional}):
                self._graphs[size, has_images] = capture(partial(self._forward, size, has_images), pool)

    def send(self, rows: DecodeRows, size: int) -> None:
        """Copies the metadata. Padding comes last: slot -1 (not stored), context 0, the spare table row."""
        count = len(rows.tokens)
        assert rows.seq_lens.all(), "the tile schedule ends at the first row without a context"
        columns = self._staging.open()[: _FIELDS * size].reshape(_FIELDS, size)
        columns[:, :count] = rows
        if count < size:
            columns[:, count:] = [[0], [0], [-1], [0], [self.tables.spare], [0]]
        self._staging.send(self._metadata[: _FIELDS * size])

    def _forward(self, size: int, has_images: bool) -> None:
        step = self.begin(size, has_images=has_images)
        gemms = self.decoder.gemms(size, in_parts=True)
        mixers = Mixers(self.kinds.decode(step), self.positions(size)[None])
        self.finish(self.decoder.forward(step.inputs.embeds, mixers, gemms), gemms, size)

    def positions(self, size: int) -> Tensor:
        return self._metadata_of(size).positions

    def begin(
        self, size: int, embeds: Tensor | None = None, taken: int = 0, *, has_images: bool
    ) -> DecodePass:
        """The pass over what was sent, with its embeddings. `taken`: SMs that prefill meanwhile."""
        metadata = self._metadata_of(size)
        tables = self.tables
        decoder = self.decoder.decoder
        weights = (decoder.table, decoder.rotary.frequencies)
        sources = (*weights, tables.blocks, self.block_size, embeds, self.decoder.temperature)
        tokens = self._known(metadata)
        if tokens is not None:
            in_table = tokens.clamp(max=len(decoder.table) - 1)
            metadata = metadata._replace(tokens=in_table)
        inputs = decode_inputs(metadata, tables.last_tokens, *sources)
        if tokens is not None:
            own = decoder.embed(tokens)
            inputs = inputs._replace(embeds=own if embeds is None else embeds.copy_(own))
        if decoder.rotary_gain != 1:
            inputs.cos.mul_(decoder.rotary_gain)
            inputs.sin.mul_(decoder.rotary_gain)
        states = self._columns(size)[-1]
        return DecodePass(metadata, states, has_images, inputs, taken)

    def _known(self, metadata: DecodeMetadata) -> Tensor | None:
        """All tokens, where the decoder has embeddings of its own."""
        if self.decoder.is_table:
            return None
        return torch.where(metadata.tokens < 0, self.tables.last_tokens[metadata.rows], metadata.tokens)

    def finish(self, x: Residual, gemms: Gemms, size: int) -> None:
        """From the residual stream after the last layer to the tokens."""
        logits = gemms.logits(x, self.decoder.decoder, self._logits[:size])
        self.decoder.finish(logits)
        sink = TokenSink(self.tables.last_tokens, self._metadata_of(size).rows)
        argmax(logits, self._argmax, self._tokens[:size], sink)

    def _metadata_of(self, size: int) -> DecodeMetadata:
        return DecodeMetadata(*self._columns(size)[:-1])

    def _columns(self, size: int) -> Tensor:
        return self._metadata[: _FIELDS * size].view(_FIELDS, size)


def _sizes(largest: int) -> Iterator[int]:
    """Each size costs a capture; a batch is padded to the next one, which costs little."""
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(320, 4097, 64)):
        if size >= largest:
            break
        yield size
    yield largest
