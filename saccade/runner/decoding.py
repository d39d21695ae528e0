"""One new token for each of many requests on a CUDA device: the whole step is one recorded graph per batch size.

    one int32 array a step   [5, size]   token, rotary position, slot, context, row of the block tables

From the token's embedding to the largest logit nothing comes back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.kernels.argmax import ArgmaxWorkspace, argmax
from saccade.kernels.decode_inputs import decode_inputs
from saccade.kernels.paged_decode import DecodeWorkspace, NewTokens, paged_decode
from saccade.models.fused import FusedDecoder
from saccade.runner.tables import BlockTables

PADDING = (0, 0, -1, 0, 0)  # a row that is not stored and sees nothing


class DecodeRow(NamedTuple):
    """A request's latest token and where it stands."""

    token: int  # or -1 - row, for the token that row of the run before gives: only the device knows it yet
    position: int  # rotary; behind a prompt all axes agree
    slot: int
    context: int  # tokens in the cache once this one is written
    row: int  # of the block tables


class Decoded(NamedTuple):
    tokens: Tensor  # int64 [size]: the likeliest, on the device
    logits: Tensor  # [size, vocabulary] in the model's type; valid until the next run


class DecodePass:
    def __init__(self, decoder: FusedDecoder, tables: BlockTables, block_size: int, max_requests: int) -> None:
        self.decoder = decoder
        self.tables = tables
        self.block_size = block_size
        self.sizes = list(_sizes(max_requests))
        layer, device = decoder.decoder.layers[0], tables.blocks.device
        self._workspace = DecodeWorkspace.allocate(self.sizes[-1], layer.heads, layer.kv_heads, layer.head_dim, device)
        self._argmax = ArgmaxWorkspace.allocate(self.sizes[-1], device)
        self._numbers = torch.zeros(5, self.sizes[-1], dtype=torch.int32, device=device)
        # Two of them: one may still be on its way to the device while the next is written.
        self._hosts = [
            torch.zeros(5, self.sizes[-1], dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._logits = torch.empty(self.sizes[-1], decoder.vocab_size, dtype=decoder.decoder.head.dtype, device=device)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, rows: list[DecodeRow]) -> Decoded:
        size = next(size for size in self.sizes if size >= len(rows))
        padded = [*rows, *[PADDING] * (size - len(rows))]
        self._hosts.reverse()
        self._hosts[0].numpy()[:, :size] = np.array(padded, np.int32).T
        self._numbers.copy_(self._hosts[0], non_blocking=True)
        graph = self._graphs.get(size)
        if graph is None:
            self._forward(size)
        else:
            graph.replay()
        return Decoded(self._tokens[: len(rows)], self._logits[: len(rows)])

    def record(self, pool: Any) -> None:
        for size in reversed(self.sizes):
            self._numbers.copy_(torch.tensor(PADDING, dtype=torch.int32)[:, None])
            self._forward(size)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._forward(size)
            self._graphs[size] = graph

    def _forward(self, size: int) -> None:
        tokens, positions, slots, contexts, rows = self._numbers[:, :size]
        decoder, products = self.decoder.decoder, self.decoder.products(size)
        inputs = decode_inputs(
            tokens, positions, rows, self._tokens, decoder.table, decoder.rotary.frequencies, self.tables.blocks
        )

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            new, workspace = NewTokens(qkv, inputs.cos, inputs.sin, slots), self._workspace
            scale = self.decoder.scale
            return paged_decode(new, keys, values, inputs.tables, contexts, self.block_size, scale, workspace)

        hidden = self.decoder.forward(inputs.embeds, attend, products)
        logits = products.logits(hidden, decoder, self._logits[:size])
        argmax(logits, self._argmax, self._tokens[:size])


def _sizes(largest: int) -> Iterator[int]:
    """Each costs a recording; a batch is padded to the next one, which costs little between neighbours."""
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(320, 4097, 64)):
        if size >= largest:
            break
        yield size
    yield largest
