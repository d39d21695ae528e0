"""One new token for each of many requests on a CUDA device: the whole step is one recorded graph per batch size.

    one int32 array a step   [5, size]   token, rotary position, slot, context, row of the block tables

From the token's embedding to the largest logit nothing comes back to the host, and the tokens found are kept by row of
the block tables: the next step may begin before the host has seen them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import NewTokens
from saccade.kernels.launch.device import Heads
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.prepare_inputs import DecodeMetadata, decode_inputs
from saccade.models.cuda.decoder import FusedDecoder
from saccade.models.cuda.gemms import Gemms, Residual
from saccade.runner.cuda.block_table import BlockTables
from saccade.runner.cuda.staging import Metadata, PinnedStaging


class DecodeRows(NamedTuple):
    """The latest token of each request and where it stands: one number each."""

    tokens: Metadata  # or -1, where only the device knows it yet
    positions: Metadata  # rotary; behind a prompt all axes agree
    slots: Metadata
    contexts: Metadata  # tokens in the cache once this one is written
    rows: Metadata  # of the block tables


class Decoded(NamedTuple):
    tokens: Tensor  # int64 [size]: the likeliest, on the device; whoever wants others puts them in their place
    logits: Tensor  # [size, vocabulary] in the model's type; valid until the next run


class Attending(Protocol):
    """`Attend`, of rows that may be a part of a pass: then it is told where its result goes."""

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor: ...


class DecodeGraphs:
    def __init__(self, decoder: FusedDecoder, tables: BlockTables, block_size: int, max_requests: int) -> None:
        self.decoder = decoder
        self.tables = tables
        self.block_size = block_size
        self.sizes = list(_sizes(max_requests))
        layer, device = decoder.decoder.layers[0], tables.blocks.device
        heads = Heads(layer.heads, layer.kv_heads, layer.head_dim)
        self._attention = DecodeAttention(heads, decoder.kv.k.dtype, block_size, self.sizes[-1], device)
        self._argmax = ArgmaxWorkspace.allocate(self.sizes[-1], device)
        self._metadata = torch.zeros(5 * self.sizes[-1], dtype=torch.int32, device=device)
        self._mailbox = PinnedStaging(5 * self.sizes[-1], device)
        self._logits = torch.empty(self.sizes[-1], decoder.vocab_size, dtype=decoder.decoder.head.dtype, device=device)
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
        """Of the first rows of the latest pass."""
        return Decoded(self._tokens[:count], self._logits[:count])

    def record(self, pool: Any) -> None:
        nothing = torch.empty(0, dtype=torch.int32).numpy()
        for size in reversed(self.sizes):
            self.send(DecodeRows(*[nothing] * 5), size)
            self._forward(size)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._forward(size)
            self._graphs[size] = graph

    def send(self, rows: DecodeRows, size: int) -> None:
        """Behind the rows come those of padding: not stored, seeing nothing, of no request."""
        count = len(rows.tokens)
        assert rows.contexts.all(), "shares of programs end with the first row that sees nothing"
        written = self._mailbox.open()[: 5 * size].reshape(5, size)
        written[:, :count] = rows
        if count < size:
            written[:, count:] = [[0], [0], [-1], [0], [self.tables.spare]]
        self._mailbox.send(self._metadata[: 5 * size])

    def _forward(self, size: int) -> None:
        embeds, attend = self.begin(size)
        gemms = self.decoder.gemms(size, in_parts=True)
        self.finish(self.decoder.forward(embeds, attend, gemms), gemms, size)

    def begin(self, size: int, embeds: Tensor | None = None, taken: int = 0) -> tuple[Tensor, Attending]:
        """The embeddings of what was sent, in `embeds` if given, and how a layer attends for these rows.

        `taken`: multiprocessors that attend for others at the same time.
        """
        metadata, tables, decoder = self._sent(size), self.tables, self.decoder.decoder
        inputs = decode_inputs(
            metadata,
            tables.last_tokens,
            decoder.table,
            decoder.rotary.frequencies,
            tables.blocks,
            self.block_size,
            embeds,
        )
        schedule = self._attention.plan(metadata.contexts, taken)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
            new, scale = NewTokens(qkv, inputs.cos, inputs.sin, metadata.slots), self.decoder.scale
            return self._attention(new, keys, values, inputs.tables, metadata.contexts, scale, schedule, out)

        return inputs.embeds, attend

    def finish(self, x: Residual, gemms: Gemms, size: int) -> None:
        """From the stream behind the last layer to the tokens."""
        logits = gemms.logits(x, self.decoder.decoder, self._logits[:size])
        argmax(logits, self._argmax, self._tokens[:size], TokenSink(self.tables.last_tokens, self._sent(size).rows))

    def _sent(self, size: int) -> DecodeMetadata:
        return DecodeMetadata(*self._metadata[: 5 * size].view(5, size))


def _sizes(largest: int) -> Iterator[int]:
    """Each costs a recording; a batch is padded to the next one, which costs little between neighbours."""
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(320, 4097, 64)):
        if size >= largest:
            break
        yield size
    yield largest
