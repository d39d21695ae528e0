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

from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import NewTokens
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import DecodeInputs, DecodeMetadata, decode_inputs
from saccade.models.cuda.decoder import Crossing, FusedDecoder, Mixers, Mixing
from saccade.models.cuda.residual import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.cross_attention import CrossAttentions
from saccade.runner.cuda.gated_delta_net import DeltaNets
from saccade.runner.cuda.graph_capture import capture
from saccade.runner.cuda.mla import LatentAttentions, LatentStep
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
        tables: BlockTables,
        block_size: int,
        requests: int,
        nets: DeltaNets | None = None,
        latent: LatentAttentions | None = None,
        cross: CrossAttentions | None = None,
    ) -> None:
        self.decoder = decoder
        self.nets = nets  # of decoders with gated delta nets
        self.latent = latent  # of decoders with MLA
        self.cross = cross  # of decoders with cross-attention
        self.tables = tables
        self.block_size = block_size
        self.sizes = list(_sizes(requests))
        device = tables.blocks.device
        dtype = decoder.kv.k.dtype
        self._attention = None
        if latent is None:
            given = (dtype, block_size, self.sizes[-1], device, decoder.norm_eps)
            self._attention = DecodeAttention(decoder.heads, *given)
        self._argmax = ArgmaxWorkspace.allocate(self.sizes[-1], device)
        self._metadata = torch.zeros(_FIELDS * self.sizes[-1], dtype=torch.int32, device=device)
        self._staging = PinnedStaging(_FIELDS * self.sizes[-1], device)
        self._logits = decoder.decoder.head.new_empty(self.sizes[-1], decoder.vocab_size)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[
            tuple[int, bool], torch.cuda.CUDAGraph
        ] = {}  # by size, and whether it has cross-attention

    def run(self, rows: DecodeRows) -> Decoded:
        count = len(rows.tokens)
        size = next(size for size in self.sizes if size >= count)
        self.send(rows, size)
        is_crossing = bool(rows.states.any())
        graph = self._graphs.get((size, is_crossing))
        if graph is None:
            self._forward(size, is_crossing)
        else:
            graph.replay()
        return self.found(count)

    def found(self, count: int) -> Decoded:
        """The first rows of the latest pass."""
        return Decoded(self._tokens[:count], self._logits[:count])

    def capture(self, pool: Any) -> None:
        nothing = torch.empty(0, dtype=torch.int32).numpy()
        for size in reversed(self.sizes):
            self.send(DecodeRows(*[nothing] * _FIELDS), size)
            for is_crossing in (False, True) if self.cross else (False,):
                self._graphs[size, is_crossing] = capture(partial(self._forward, size, is_crossing), pool)

    def send(self, rows: DecodeRows, size: int) -> None:
        """Copies the metadata. Padding comes last: slot -1 (not stored), context 0, the spare table row."""
        count = len(rows.tokens)
        assert rows.seq_lens.all(), "the tile schedule ends at the first row without a context"
        written = self._staging.open()[: _FIELDS * size].reshape(_FIELDS, size)
        written[:, :count] = rows
        if count < size:
            written[:, count:] = [[0], [0], [-1], [0], [self.tables.spare], [0]]
        self._staging.send(self._metadata[: _FIELDS * size])

    def _forward(self, size: int, is_crossing: bool) -> None:
        embeds, attend = self.begin(size)
        gemms = self.decoder.gemms(size, in_parts=True)
        cross = self.begin_cross(size) if is_crossing else None
        mixers = Mixers(attend, self.begin_nets(size), cross, self.positions(size))
        self.finish(self.decoder.forward(embeds, mixers, gemms), gemms, size)

    def positions(self, size: int) -> Tensor:
        return self._sent(size).positions

    def begin_cross(self, size: int) -> Crossing | None:
        """Cross-attention of these rows, of decoders that have it."""
        sent = self._sent(size)
        return self.cross.decode(sent.rows, self._states(size)) if self.cross else None

    def begin_nets(self, size: int) -> Mixing | None:
        """The gated delta nets of these rows, of decoders that have some."""
        return self.nets.decode(self._sent(size).rows) if self.nets else None

    def begin(self, size: int, embeds: Tensor | None = None, taken: int = 0) -> tuple[Tensor, Mixing]:
        """Embeddings of what was sent, and attention of these rows. `taken`: SMs that prefill meanwhile."""
        metadata = self._sent(size)
        tables = self.tables
        decoder = self.decoder.decoder
        weights = (decoder.table, decoder.rotary.frequencies)
        given = (*weights, tables.blocks, self.block_size, embeds, self.decoder.temperature)
        inputs = decode_inputs(metadata, tables.last_tokens, *given)
        if decoder.rotary_gain != 1:
            inputs.cos.mul_(decoder.rotary_gain)
            inputs.sin.mul_(decoder.rotary_gain)
        if self.latent is not None:
            step = LatentStep(inputs.cos, inputs.sin, metadata.slots, inputs.tables, metadata.seq_lens)
            return inputs.embeds, self.latent.decode(step)
        return inputs.embeds, self._attend(metadata, inputs, taken)

    def _attend(self, metadata: DecodeMetadata, inputs: DecodeInputs, taken: int) -> Mixing:
        attention = self._attention
        assert attention is not None
        planned = attention.plan(metadata.seq_lens, taken)
        kv = self.decoder.kv
        scale = self.decoder.scale

        def attend(projected: Tensor, own: Any, index: int, out: Tensor | None = None) -> Tensor:
            norms = own.qk_norms
            by = (norms.q.weight, norms.k.weight) if norms else ()
            new = NewTokens(projected, inputs.cos, inputs.sin, metadata.slots, inputs.query_scales, *by)
            by_head = None if out is None else out.view(len(out), own.heads, own.head_dim)
            given = (kv.k[index], kv.v[index], inputs.tables, metadata.seq_lens, scale, planned, by_head)
            return attention(new, *given, kv.scales_of(index)).flatten(1)

        return attend

    def finish(self, x: Residual, gemms: Gemms, size: int) -> None:
        """From the residual stream after the last layer to the tokens."""
        logits = gemms.logits(x, self.decoder.decoder, self._logits[:size])
        sink = TokenSink(self.tables.last_tokens, self._sent(size).rows)
        argmax(logits, self._argmax, self._tokens[:size], sink)

    def _sent(self, size: int) -> DecodeMetadata:
        return DecodeMetadata(*self._metadata[: _FIELDS * size].view(_FIELDS, size)[:-1])

    def _states(self, size: int) -> Tensor:
        return self._metadata[: _FIELDS * size].view(_FIELDS, size)[-1]


def _sizes(largest: int) -> Iterator[int]:
    """Each size costs a capture; a batch is padded to the next one, which costs little."""
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(320, 4097, 64)):
        if size >= largest:
            break
        yield size
    yield largest
