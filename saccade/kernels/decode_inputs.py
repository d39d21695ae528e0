"""What a decode step begins with, in one launch: embeddings, angles and block tables of its rows. Knows no layer.

row t    token ──────► row of the embedding table      embeds [T, hidden]
           or -1 - i: the token that row i of the step before gave
         position ───► times each frequency            cos, sin [T, d]
         table row ──► the request's blocks            tables [T, max_blocks]
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.tiles import power_of_two


class DecodeInputs(NamedTuple):
    embeds: Tensor  # [T, hidden]
    cos: Tensor  # [T, d] in the embeddings' type, as `rotary_and_store` takes it
    sin: Tensor  # the same; carries the sign of its half
    tables: Tensor  # int32 [T, max_blocks]


def decode_inputs(
    tokens: Tensor,  # int32 [T], dense; so are positions and rows
    positions: Tensor,  # one for all axes: behind a prompt they agree
    rows: Tensor,  # of the block tables
    latest: Tensor,  # int64: tokens of the step before
    embedding: Tensor,  # [vocabulary, hidden], contiguous
    frequencies: Tensor,  # float32 [d / 2]
    block_tables: Tensor,  # int32 [requests, max_blocks], contiguous
) -> DecodeInputs:
    count, hidden, half, blocks = len(tokens), embedding.shape[1], len(frequencies), block_tables.shape[1]
    assert embedding.is_contiguous() and block_tables.is_contiguous()
    found = DecodeInputs(
        embedding.new_empty(count, hidden),
        embedding.new_empty(count, 2 * half),
        embedding.new_empty(count, 2 * half),
        block_tables.new_empty(count, blocks),
    )
    _inputs_kernel[(count,)](
        tokens, positions, rows, latest, embedding, frequencies, block_tables, *found, blocks,
        HIDDEN=hidden, PADDED_HIDDEN=power_of_two(hidden), HALF=half, PADDED_HALF=power_of_two(half), num_warps=4,
    )  # fmt: skip
    return found


# Numbers of a step lie anywhere in a larger array; a variant for each alignment would compile anew.
@triton.jit(do_not_specialize_on_alignment=["tokens", "positions", "rows"])
def _inputs_kernel(
    tokens: tl.tensor, positions: tl.tensor, rows: tl.tensor, latest: tl.tensor, embedding: tl.tensor,
    frequencies: tl.tensor, block_tables: tl.tensor,
    embeds: tl.tensor, cos: tl.tensor, sin: tl.tensor, tables: tl.tensor, blocks: tl.tensor,
    HIDDEN: tl.constexpr, PADDED_HIDDEN: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    given = tl.load(tokens + row)
    fed = tl.load(latest + tl.maximum(-1 - given, 0), mask=given < 0, other=0)
    token = tl.where(given < 0, fed, given.to(tl.int64))
    columns = tl.arange(0, PADDED_HIDDEN)
    own = tl.load(embedding + token * HIDDEN + columns, mask=columns < HIDDEN)
    tl.store(embeds + row * HIDDEN + columns, own, mask=columns < HIDDEN)
    half = tl.arange(0, PADDED_HALF)
    angles = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + half, mask=half < HALF, other=0.0)
    along, across = tl.cos(angles), tl.sin(angles)
    place = row * 2 * HALF + half
    kind = cos.dtype.element_ty
    tl.store(cos + place, along.to(kind), mask=half < HALF)
    tl.store(cos + place + HALF, along.to(kind), mask=half < HALF)
    tl.store(sin + place, (-across).to(kind), mask=half < HALF)
    tl.store(sin + place + HALF, across.to(kind), mask=half < HALF)
    table = block_tables + tl.load(rows + row).to(tl.int64) * blocks
    for first in range(0, blocks, 512):
        some = first + tl.arange(0, 512)
        tl.store(tables + row * blocks + some, tl.load(table + some, mask=some < blocks), mask=some < blocks)
