"""The inputs of a step in one launch: embeddings, rotary cos and sin, and block tables of its rows. Knows no layer.

row t    token ──────► row of the embedding table      embeds [T, hidden]
           or -1: the last token sampled for the request of this table row
         position ───► times each frequency            cos, sin [T, d]; d is rotary_dim, if RoPE is partial
                  └──► attention temperature           query_scales [T], if the model has it
         table row ──► the request's blocks            tables [T, max_blocks]
         slot ───────► its block is written into the request's table

That is decode. Prefill rows have a position for each axis, image embeddings in place of some tokens, and one block
table per window.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.varlen_tiles import power_of_two


class Temperature(NamedTuple):
    """Attention temperature: queries at position p are multiplied by 1 + beta log(1 + p // length)."""

    beta: float
    length: int


def _constants(temperature: Temperature | None) -> dict[str, float]:
    return {} if temperature is None else {"BETA": temperature.beta, "LENGTH": temperature.length}


class DecodeInputs(NamedTuple):
    embeds: Tensor  # [T, hidden or wider]
    cos: Tensor  # [T, d] in the embeddings' type, as `rotary_and_store` takes it
    sin: Tensor  # the same; carries the sign of its half
    tables: Tensor  # int32 [T, max_blocks]
    query_scales: Tensor | None  # float32 [T]


class DecodeMetadata(NamedTuple):
    """Of each row, from the CPU: int32 [T], dense."""

    tokens: Tensor  # or -1: the one in `last_tokens`
    positions: Tensor  # one for all axes: after a prompt they agree
    slots: Tensor  # of the new token; -1: nowhere
    seq_lens: Tensor  # tokens in the cache once this one is written
    rows: Tensor  # of the block tables


def decode_inputs(
    metadata: DecodeMetadata,
    last_tokens: Tensor,  # int64 [requests]: sampled tokens, which may be on the device only
    embedding: Tensor,  # [vocabulary, hidden], contiguous
    frequencies: Tensor,  # float32 [d / 2]
    block_tables: Tensor,  # int32 [requests, max_blocks], contiguous
    block_size: int,
    embeds: Tensor | None = None,  # [T, hidden or wider], contiguous: where embeddings go, padded with zeros
    temperature: Temperature | None = None,
) -> DecodeInputs:
    count = len(metadata.tokens)
    hidden = embedding.shape[1]
    half = len(frequencies)
    blocks = block_tables.shape[1]
    if embeds is None:
        embeds = embedding.new_empty(count, hidden)
    assert embedding.is_contiguous() and block_tables.is_contiguous() and embeds.is_contiguous()
    inputs = DecodeInputs(
        embeds,
        embedding.new_empty(count, 2 * half),
        embedding.new_empty(count, 2 * half),
        block_tables.new_empty(count, blocks),
        None if temperature is None else frequencies.new_empty(count),
    )
    _inputs_kernel[(count,)](
        *metadata, last_tokens, embedding, frequencies, block_tables, *inputs, blocks,
        BLOCK_SIZE=block_size, HIDDEN=hidden, WIDE=embeds.shape[1], PADDED=power_of_two(embeds.shape[1]),
        HALF=half, PADDED_HALF=power_of_two(half), **_constants(temperature), num_warps=4,
    )  # fmt: skip
    return inputs


class PrefillMetadata(NamedTuple):
    """Of packed windows, from the CPU: int32."""

    tokens: Tensor  # [T]; -1: the row of `embeds` is not written
    positions: Tensor  # [axes, T]
    rows: Tensor  # [W]: of the block tables
    seq_lens: Tensor  # [W]: tokens in the cache once the window's are written


class RotaryFrequencies(NamedTuple):
    frequencies: Tensor  # float32 [d / 2]
    axes: Tensor  # int64 [d / 2]: the axis whose position each is multiplied with


class PrefillInputs(NamedTuple):
    cos: Tensor  # [T, d]
    sin: Tensor  # the same; carries the sign of its half
    tables: Tensor  # int32 [W, max_blocks]: only blocks of the contexts are written
    query_scales: Tensor | None  # float32 [T]: of the first axis


def prefill_inputs(
    metadata: PrefillMetadata,
    embeds: Tensor,  # [T, hidden or wider], contiguous; wider ones are padded with zeros
    embedding: Tensor,  # [vocabulary, hidden], contiguous
    rotary: RotaryFrequencies,
    block_tables: Tensor,  # int32 [requests, max_blocks], contiguous
    block_size: int,
    temperature: Temperature | None = None,
) -> PrefillInputs:
    """Writes the embeddings of tokens."""
    count, wide = embeds.shape
    windows = len(metadata.rows)
    half = len(rotary.frequencies)
    assert embeds.is_contiguous() and embedding.is_contiguous() and wide >= embedding.shape[1] and windows <= count
    assert block_tables.is_contiguous() and metadata.positions.is_contiguous()
    cos, sin = embedding.new_empty(2, count, 2 * half)
    tables = block_tables.new_empty(windows, block_tables.shape[1])
    scales = None if temperature is None else rotary.frequencies.new_empty(count)
    _prefill_inputs_kernel[(count,)](
        *metadata, embedding, embeds, *rotary, cos, sin, block_tables, tables, scales,
        windows, block_tables.shape[1], BLOCK_SIZE=block_size, HIDDEN=embedding.shape[1], WIDE=wide,
        PADDED=power_of_two(wide), HALF=half, PADDED_HALF=power_of_two(half), **_constants(temperature),
        num_warps=4,
    )  # fmt: skip
    return PrefillInputs(cos, sin, tables, scales)


@triton.jit(do_not_specialize_on_alignment=["tokens", "positions", "rows", "seq_lens"])
def _prefill_inputs_kernel(
    tokens: tl.tensor, positions: tl.tensor, rows: tl.tensor, seq_lens: tl.tensor,
    embedding: tl.tensor, embeds: tl.tensor, frequencies: tl.tensor, axes: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    block_tables: tl.tensor, tables: tl.tensor, query_scales: tl.tensor, windows: tl.tensor, blocks: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, BETA: tl.constexpr = 0.0, LENGTH: tl.constexpr = 1,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    half = tl.arange(0, PADDED_HALF)
    inside = half < HALF
    own_axis = tl.load(axes + half, mask=inside, other=0) * tl.num_programs(0)
    position = tl.load(positions + own_axis + row, mask=inside, other=0).to(tl.float32)
    _write_cos_sin(position * tl.load(frequencies + half, mask=inside, other=0.0), cos, sin, row, half, HALF)
    if query_scales is not None:
        _write_scale(query_scales + row, tl.load(positions + row), BETA, LENGTH)
    if token >= 0:
        columns = tl.arange(0, PADDED)
        vector = tl.load(embedding + token * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
        tl.store(embeds + row * WIDE + columns, vector, mask=columns < WIDE)
    if row < windows:
        table = block_tables + tl.load(rows + row).to(tl.int64) * blocks
        for first in range(0, tl.cdiv(tl.load(seq_lens + row), BLOCK_SIZE), 512):
            places = first + tl.arange(0, 512)
            tl.store(
                tables + row * blocks + places, tl.load(table + places, mask=places < blocks), mask=places < blocks
            )


@triton.jit
def _write_scale(target: tl.tensor, position: tl.tensor, BETA: tl.constexpr, LENGTH: tl.constexpr) -> None:
    lengths = (position // LENGTH).to(tl.float32)  # of the context that the model was trained on
    tl.store(target, 1.0 + BETA * tl.log(1.0 + lengths))


@triton.jit
def _write_cos_sin(
    angles: tl.tensor, cos: tl.tensor, sin: tl.tensor, row: tl.tensor, half: tl.tensor, HALF: tl.constexpr
) -> None:
    own_cos, own_sin = tl.cos(angles), tl.sin(angles)
    offsets = row * 2 * HALF + half
    kind = cos.dtype.element_ty
    tl.store(cos + offsets, own_cos.to(kind), mask=half < HALF)
    tl.store(cos + offsets + HALF, own_cos.to(kind), mask=half < HALF)
    tl.store(sin + offsets, (-own_sin).to(kind), mask=half < HALF)
    tl.store(sin + offsets + HALF, own_sin.to(kind), mask=half < HALF)


# Step metadata is sliced from a larger array: each alignment would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=["tokens", "positions", "slots", "seq_lens", "rows"])
def _inputs_kernel(
    tokens: tl.tensor, positions: tl.tensor, slots: tl.tensor, seq_lens: tl.tensor, rows: tl.tensor,
    last_tokens: tl.tensor, embedding: tl.tensor, frequencies: tl.tensor, block_tables: tl.tensor,
    embeds: tl.tensor, cos: tl.tensor, sin: tl.tensor, tables: tl.tensor, query_scales: tl.tensor, blocks: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, BETA: tl.constexpr = 0.0, LENGTH: tl.constexpr = 1,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    prompt_token = tl.load(tokens + row)
    own_row = tl.load(rows + row).to(tl.int64)
    fed = tl.load(last_tokens + own_row, mask=prompt_token < 0, other=0)
    token = tl.where(prompt_token < 0, fed, prompt_token.to(tl.int64))
    columns = tl.arange(0, PADDED)
    vector = tl.load(embedding + token * HIDDEN + columns, mask=columns < HIDDEN, other=0.0)
    tl.store(embeds + row * WIDE + columns, vector, mask=columns < WIDE)
    half = tl.arange(0, PADDED_HALF)
    angles = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + half, mask=half < HALF, other=0.0)
    _write_cos_sin(angles, cos, sin, row, half, HALF)
    if query_scales is not None:
        _write_scale(query_scales + row, tl.load(positions + row), BETA, LENGTH)
    table, slot = block_tables + own_row * blocks, tl.load(slots + row)
    seq_len = tl.load(seq_lens + row)
    entry = tl.where(slot >= 0, (seq_len - 1) // BLOCK_SIZE, -1)  # where the slot's block belongs
    for first in range(0, tl.cdiv(seq_len, BLOCK_SIZE), 512):  # the rest is never read
        places = first + tl.arange(0, 512)
        own_blocks = tl.load(table + places, mask=places < blocks)
        own_blocks = tl.where(places == entry, slot // BLOCK_SIZE, own_blocks)
        tl.store(tables + row * blocks + places, own_blocks, mask=places < blocks)
    tl.store(table + entry, slot // BLOCK_SIZE, mask=entry >= 0)
