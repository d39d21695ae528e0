"""Decode on a CUDA device: one CUDA graph per batch size, from the embeddings to the argmax of the logits.

    one int32 array a step   [5, size]   token, rotary position, slot, seq_len, row of the block tables

The sampled tokens stay on the device, by row of the block tables: the next step may begin before the host has
read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import NewTokens
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import DecodeMetadata, decode_inputs
from saccade.models.cuda.decoder import FusedDecoder, Mixers
from saccade.models.cuda.gemms import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.delta_nets import DeltaNets, Mixing
from saccade.runner.cuda.staging import Metadata, PinnedStaging


class DecodeRows(NamedTuple):
    """The latest token of each request and its metadata, all [size]."""

    tokens: Metadata  # -1 where only the device knows it yet
    positions: Metadata  # rotary; after the prompt all axes agree
    slots: Metadata
    seq_lens: Metadata  # tokens in the cache once this one is written
    rows: Metadata  # of the block tables


class Decoded(NamedTuple):
    tokens: Tensor  # int64 [size]: the argmax, on the device; sampling overwrites its rows
    logits: Tensor  # [size, vocabulary] in the model's dtype; valid until the next run


class Attending(Protocol):
    """`Attend` for a part of a pass's rows, with the result in `out` if given."""

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor: ...


class DecodeGraphs:
    def __init__(
        self,
        decoder: FusedDecoder,
        tables: BlockTables,
        block_size: int,
        requests: int,
        nets: DeltaNets | None = None,
    ) -> None:
        self.decoder = decoder
        self.nets = nets  # of decoders with gated delta nets
        self.tables = tables
        self.block_size = block_size
        self.sizes = list(_sizes(requests))
        device = tables.blocks.device
        dtype = decoder.kv.k.dtype
        self._attention = DecodeAttention(decoder.heads, dtype, block_size, self.sizes[-1], device)
        self._argmax = ArgmaxWorkspace.allocate(self.sizes[-1], device)
        self._metadata = torch.zeros(5 * self.sizes[-1], dtype=torch.int32, device=device)
        self._staging = PinnedStaging(5 * self.sizes[-1], device)
        self._logits = decoder.decoder.head.new_empty(self.sizes[-1], decoder.vocab_size)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, rows: DecodeRows) -> Decoded:
        count = len(rows.tokens)
        size = next(size for size in self.sizes if size >= count)
        self.send(rows, size)
        graph = self._graphs.get(size)
        if graph is None:
            self._forward(size)
        else:
            graph.replay()
        return self.found(count)

    def found(self, count: int) -> Decoded:
        """The first rows of the latest pass."""
        return Decoded(self._tokens[:count], self._logits[:count])

    def capture(self, pool: Any) -> None:
        nothing = torch.empty(0, dtype=torch.int32).numpy()
        for size in reversed(self.sizes):
            self.send(DecodeRows(*[nothing] * 5), size)
            self._forward(size)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._forward(size)
            self._graphs[size] = graph

    def send(self, rows: DecodeRows, size: int) -> None:
        """Copies the metadata. Padding comes last: slot -1 (not stored), context 0, the spare table row."""
        count = len(rows.tokens)
        assert rows.seq_lens.all(), "the tile schedule ends at the first row without a context"
        written = self._staging.open()[: 5 * size].reshape(5, size)
        written[:, :count] = rows
        if count < size:
            written[:, count:] = [[0], [0], [-1], [0], [self.tables.spare]]
        self._staging.send(self._metadata[: 5 * size])

    def _forward(self, size: int) -> None:
        embeds, attend = self.begin(size)
        gemms = self.decoder.gemms(size, in_parts=True)
        x = self.decoder.forward(embeds, Mixers(attend, self.begin_nets(size)), gemms)
        self.finish(x, gemms, size)

    def begin_nets(self, size: int) -> Mixing | None:
        """The gated delta nets of these rows, of decoders that have some."""
        return self.nets.decode(self._sent(size).rows) if self.nets else None

    def begin(self, size: int, embeds: Tensor | None = None, taken: int = 0) -> tuple[Tensor, Attending]:
        """Embeddings of what was sent, and attention of these rows. `taken`: SMs that prefill meanwhile."""
        metadata = self._sent(size)
        tables = self.tables
        decoder = self.decoder.decoder
        weights = (decoder.table, decoder.rotary.frequencies)
        given = (*weights, tables.blocks, self.block_size, embeds, self.decoder.temperature)
        inputs = decode_inputs(metadata, tables.last_tokens, *given)
        schedule = self._attention.plan(metadata.seq_lens, taken)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
            new = NewTokens(qkv, inputs.cos, inputs.sin, metadata.slots, inputs.query_scales)
            scale = self.decoder.scale
            return self._attention(new, keys, values, inputs.tables, metadata.seq_lens, scale, schedule, out)

        return inputs.embeds, attend

    def finish(self, x: Residual, gemms: Gemms, size: int) -> None:
        """From the residual stream after the last layer to the tokens."""
        logits = gemms.logits(x, self.decoder.decoder, self._logits[:size])
        sink = TokenSink(self.tables.last_tokens, self._sent(size).rows)
        argmax(logits, self._argmax, self._tokens[:size], sink)

    def _sent(self, size: int) -> DecodeMetadata:
        return DecodeMetadata(*self._metadata[: 5 * size].view(5, size))


def _sizes(largest: int) -> Iterator[int]:
    """Each size costs a capture; a batch is padded to the next one, which costs little."""
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(320, 4097, 64)):
        if size >= largest:
            break
        yield size
    yield largest
