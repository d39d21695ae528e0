"""Second launch of a gated delta net over windows: the states between chunks, one chunk after the other.

grid (value blocks, value_heads, pieces): a program walks all pieces of one window, if it is given the first one

    S^T [value block, key] in registers, float32             per chunk
      ├► written for the outputs of the chunk
      ├► known = S^T k^T                                     [value block, 64]
      │    d = (beta v - beta 2^total known) ((I + L)^-1)^T  written for the outputs
      └► S^T = 2^end S^T + (2^(end - total) d) k             end: total at the last token

The state is kept transposed: the result of each GEMM is the left operand of the next one, which stays in registers.
After a piece, a checkpoint of the state is copied to the row `keep`; after the last, the state goes back to its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gdn.layout import last_piece, load_tile, store_tile
from saccade.kernels.launch.pdl import pdl_release_then_wait


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["rows", "keep", "first_chunks"])
def scan_kernel(
    k_in: tl.tensor, v_in: tl.tensor, inverse_in: tl.tensor, gates_in: tl.tensor,
    d_out: tl.tensor, states_out: tl.tensor, memory: tl.tensor,
    rows: tl.tensor, keep: tl.tensor, first_chunks: tl.tensor, pieces: tl.tensor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    kind = k_in.dtype.element_ty
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    piece = tl.program_id(2)
    row = tl.load(rows + piece)
    before = tl.load(rows + piece - 1, mask=piece > 0, other=-1)
    pdl_release_then_wait(PDL)
    if (row < 0) | (row == before):
        return
    last = last_piece(rows, piece, row, pieces, PIECES)
    each = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    EXACT: tl.constexpr = KEY == KEYS and VALUE % BLOCK == 0
    inside = (value < VALUE)[:, None] & (key < KEY)[None, :]
    in_values = (value < VALUE)[:, None] & (each >= 0)[None, :]
    in_keys = (each >= 0)[:, None] & (key < KEY)[None, :]
    by_key = each[:, None] * KEY + key[None, :]
    by_token = value[:, None] * CHUNK + each[None, :]
    places = head * KEY * VALUE + key[None, :] * VALUE + value[:, None]
    state_size = VALUE_HEADS * KEY * VALUE
    state = load_tile(memory + row.to(tl.int64) * state_size + places, inside, EXACT)
    for index in range(piece, last):
        for chunk in range(tl.load(first_chunks + index), tl.load(first_chunks + index + 1)):
            of_head = tl.cast(chunk, tl.int64) * VALUE_HEADS + head
            of_key_head = tl.cast(chunk, tl.int64) * KEY_HEADS + key_head
            k = load_tile(k_in + of_key_head * CHUNK * KEY + by_key, in_keys, EXACT)
            v = load_tile(v_in + of_head * VALUE * CHUNK + by_token, in_values, EXACT)
            inverse = tl.load(inverse_in + of_head * CHUNK * CHUNK + each[:, None] * CHUNK + each[None, :])
            end = tl.load(gates_in + of_head * 3 * CHUNK + CHUNK - 1)
            until = tl.load(gates_in + of_head * 3 * CHUNK + CHUNK + each)
            after = tl.load(gates_in + of_head * 3 * CHUNK + 2 * CHUNK + each)
            old = state.to(kind)
            store_tile(states_out + of_head * VALUE * KEY + value[:, None] * KEY + key[None, :], old, inside, EXACT)
            recalled = tl.dot(old, tl.trans(k), input_precision=PRECISION)
            d = tl.dot((v.to(tl.float32) - recalled * until[None, :]).to(kind), inverse, input_precision=PRECISION)
            store_tile(d_out + of_head * VALUE * CHUNK + by_token, d.to(kind), in_values, EXACT)
            state = tl.dot((d * after[None, :]).to(kind), k, state * tl.exp2(end), input_precision=PRECISION)
        copy = tl.load(keep + index)
        if copy >= 0:
            store_tile(memory + copy.to(tl.int64) * state_size + places, state, inside, EXACT)
    store_tile(memory + row.to(tl.int64) * state_size + places, state, inside, EXACT)
