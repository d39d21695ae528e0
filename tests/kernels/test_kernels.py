"""Every kernel against plain PyTorch: in Triton's interpreter on the CPU, on the device itself where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention.decode_triton import DecodeWorkspace, choose_splits, paged_decode
from saccade.kernels.attention.prefill_triton import choose_rows
from saccade.kernels.attention.prefill_triton import choose_splits as prefill_splits
from saccade.kernels.attention.rope_store_kv import rotary, rotary_and_store
from saccade.kernels.attention.vit_triton import TILE_ROWS, packed_vit
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two
from saccade.kernels.ops import reference
from saccade.kernels.ops.argmax import ArgmaxWorkspace, TokenSink, argmax
from saccade.kernels.ops.norm import Added, add_rms_norm, rms_norm, silu_and_mul
from saccade.kernels.ops.prepare_inputs import (
    DecodeMetadata,
    PrefillInputs,
    PrefillMetadata,
    RotaryFrequencies,
    decode_inputs,
    prefill_inputs,
)
from saccade.models.layers.rotary_embedding import cos_sin
from saccade.models.layers.torch_attention import reference_packed_attention
from tests.helpers.kernels.paged import BLOCK, DEVICE, HALF, SMALL, Paged, assert_close, ints, random

# --- paged decode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_equals_the_reference_however_keys_are_split(splits: int) -> None:
    paged = Paged.of([1, 16, 17, 100, 63], kv_heads=2, dim=64, dtype=torch.float32)
    q = random(5, 6, 64)
    assert_close(paged.decode(q, splits), paged.expected(q, [1] * 5))


def test_decode_reads_many_tiles_of_one_split() -> None:
    paged = Paged.of([200, 1, 65, 64], kv_heads=1, dim=64, dtype=torch.float32)
    q = random(4, 4, 64)
    launch = Launch(rows=16, keys=16, warps=4, stages=3)
    assert_close(paged.decode(q, 1, launch), paged.expected(q, [1] * 4))


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_decode_takes_every_head_size(dim: int) -> None:
    paged = Paged.of([30, 7], kv_heads=1, dim=dim, dtype=torch.float32)
    q = random(2, 3, dim)
    assert_close(paged.decode(q, 2), paged.expected(q, [1, 1]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 2), (7, 1), (20, 1)])
def test_decode_packs_the_heads_that_share_keys(heads: int, kv_heads: int) -> None:
    paged = Paged.of([40, 3], kv_heads=kv_heads, dim=64, dtype=torch.float32)
    q = random(2, heads, 64)
    assert_close(paged.decode(q, 2), paged.expected(q, [1, 1]))


def test_decode_runs_in_half_precision_with_its_own_launch() -> None:
    paged = Paged.of([150, 9, 64], kv_heads=2, dim=128, dtype=HALF)
    q = random(3, 12, 128, dtype=HALF)
    assert_close(paged.decode(q, 2, launch=None), paged.expected(q, [1] * 3))


def test_decode_chooses_its_splits_within_the_workspace() -> None:
    paged = Paged.of([200], kv_heads=2, dim=64, dtype=torch.float32)
    q = random(1, 4, 64)
    assert_close(paged.decode(q), paged.expected(q, [1]))


def test_a_row_of_padding_decodes_to_zero_and_leaves_others_alone() -> None:
    paged = Paged.of([20, 0, 35], kv_heads=2, dim=64, dtype=torch.float32)
    q = random(3, 4, 64)
    found = paged.decode(q, 4)
    assert not found[1].any()
    assert_close(found[[0, 2]], paged.expected(q[[0, 2]], [1] * 3))


def test_decode_turns_and_stores_the_new_token() -> None:
    paged = Paged.of([20, 35], kv_heads=2, dim=80, dtype=torch.float32)
    cos, sin = random(2, 2, 1, 80, seed=3)
    new = paged.new_tokens(random(2, 4, 80))._replace(cos=cos[:, 0], sin=sin[:, 0])
    q, k, v = new.qkv.clone().split([4, 2, 2], dim=1)
    expected = Paged(paged.k.clone(), paged.v.clone(), paged.tables, paged.seq_lens)
    reference.rotary_and_store(q, k, v, cos, sin, expected.k, expected.v, new.slots.long())
    workspace = DecodeWorkspace.allocate(2, 4, 2, 80, DEVICE)
    found = paged_decode(new, paged.k, paged.v, paged.tables, ints([20, 35]), BLOCK, 0.2, workspace, launch=SMALL)
    assert_close(found, expected.expected(q, [1, 1]))
    slots = new.slots.long()
    assert_close(paged.k[slots], expected.k[slots])
    assert_close(paged.v[slots], expected.v[slots])


def test_a_new_token_without_a_slot_is_seen_and_not_stored() -> None:
    paged = Paged.of([20], kv_heads=2, dim=64, dtype=torch.float32)
    q, slot = random(1, 4, 64), paged.slot(0)
    expected = paged.expected(q, [1])
    new, workspace = paged.new_tokens(q)._replace(slots=ints([-1])), DecodeWorkspace.allocate(1, 4, 2, 64, DEVICE)
    found = paged_decode(new, paged.k, paged.v, paged.tables, ints([20]), BLOCK, 0.2, workspace, launch=SMALL)
    assert_close(found, expected)
    assert paged.k[slot].isnan().all()


@pytest.mark.parametrize("splits", [2, 16])
def test_more_splits_than_are_added_up_at_once_give_the_same(splits: int) -> None:
    paged = Paged.of([200, 5, 130], kv_heads=2, dim=64, dtype=torch.float32)
    q = random(3, 6, 64)
    assert_close(paged.decode(q, splits), paged.expected(q, [1] * 3))


def test_decode_refuses_a_workspace_that_is_too_small() -> None:
    paged = Paged.of([20, 35], kv_heads=2, dim=64, dtype=torch.float32)
    workspace = DecodeWorkspace.allocate(1, 4, 2, 64, DEVICE)
    with pytest.raises(ValueError, match="allocate it for more requests"):
        new = paged.new_tokens(random(2, 4, 64))
        paged_decode(new, paged.k, paged.v, paged.tables, ints([20, 35]), BLOCK, 0.2, workspace, splits=16)


def test_splits_fill_the_device_and_stay_a_power_of_two() -> None:
    splits = [choose_splits(requests, 2, 4096, num_sms=132) for requests in (1, 8, 32, 128, 512)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > 16
    assert splits[-1] == 1
    assert all(n == power_of_two(n) for n in splits)


def test_short_contexts_are_not_split() -> None:
    assert choose_splits(1, 2, 64, num_sms=132) == 1


# --- paged prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_lens"),
    [([33], [33]), ([5], [50]), ([1], [40]), ([20, 1, 16, 3], [20, 30, 48, 3]), ([40, 2], [41, 77])],
    ids=["prompt", "chunk", "one token", "mixed", "nearly all new"],
)
def test_prefill_equals_the_reference(lengths: list[int], seq_lens: list[int]) -> None:
    paged = Paged.of(seq_lens, kv_heads=2, dim=64, dtype=torch.float32)
    q = random(sum(lengths), 4, 64)
    assert_close(paged.prefill(q, lengths), paged.expected(q, lengths))


@pytest.mark.parametrize("share", [16, 48, 256])
@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize(
    ("lengths", "seq_lens"),
    [([33], [33]), ([5], [150]), ([20, 1, 16, 3], [20, 130, 48, 3])],
    ids=["prompt", "chunk", "mixed"],
)
def test_prefill_equals_the_reference_however_keys_are_split(
    lengths: list[int], seq_lens: list[int], splits: int, share: int
) -> None:
    paged = Paged.of(seq_lens, kv_heads=2, dim=80, dtype=torch.float32)
    q = random(sum(lengths), 4, 80)
    assert_close(paged.prefill(q, lengths, splits=splits, share=share), paged.expected(q, lengths))


def test_short_windows_are_split_until_the_device_is_full() -> None:
    splits = [prefill_splits(tokens, 12, 64, num_sms=132) for tokens in (16, 64, 128, 512, 2048)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] >= 8
    assert splits[-1] == 1


@pytest.mark.parametrize("seed", range(3))
def test_prefill_equals_the_reference_on_random_windows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (3,), generator=generator).tolist()
    past = torch.randint(0, 60, (3,), generator=generator).tolist()
    paged = Paged.of([n + p for n, p in zip(lengths, past, strict=True)], kv_heads=2, dim=32, dtype=torch.float32)
    q = random(sum(lengths), 6, 32, seed=seed)
    assert_close(paged.prefill(q, lengths), paged.expected(q, lengths))


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_prefill_takes_every_head_size(dim: int) -> None:
    paged = Paged.of([20], kv_heads=1, dim=dim, dtype=torch.float32)
    q = random(18, 2, dim)
    assert_close(paged.prefill(q, [18]), paged.expected(q, [18]))


@pytest.mark.parametrize("splits", [1, 3])
def test_prefill_in_one_loop_equals_the_reference(splits: int) -> None:
    paged = Paged.of([20, 130, 90], kv_heads=2, dim=64, dtype=torch.float32)
    q = random(61, 4, 64)
    found = paged.prefill(q, [20, 1, 40], launch=SMALL._replace(one_loop=True), splits=splits)
    assert_close(found, paged.expected(q, [20, 1, 40]))


@pytest.mark.parametrize("rows", [64, 128])
def test_prefill_runs_in_half_precision_with_its_own_launch(rows: int) -> None:
    paged = Paged.of([150, 70], kv_heads=1, dim=64, dtype=HALF)
    q = random(170, 2, 64, dtype=HALF)
    assert_close(paged.prefill(q, [130, 40], rows, launch=None), paged.expected(q, [130, 40]))


def test_small_steps_are_cut_into_small_tiles() -> None:
    assert choose_rows(512, 12, num_sms=132) < choose_rows(8192, 12, num_sms=132)


# --- packed pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [12, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("lengths", [[5], [16, 32], [40, 1, 17]], ids=str)
def test_images_attend_to_themselves_alone(lengths: list[int], dim: int) -> None:
    q, k, v = random(3, sum(lengths), 2, dim)
    found = packed_vit(q, k, v, Tiles.of(lengths, 16, DEVICE), 0.2, launch=SMALL)
    assert_close(found, reference_packed_attention(q, k, v, lengths, 0.2))


@pytest.mark.parametrize("dim", [72, 80, 128])
def test_images_run_in_half_precision_with_their_own_launch(dim: int) -> None:
    lengths = [130, 64]
    q, k, v = random(3, sum(lengths), 2, dim, dtype=HALF)
    found = packed_vit(q, k, v, Tiles.of(lengths, TILE_ROWS, DEVICE), 0.1)
    assert_close(found, reference_packed_attention(q, k, v, lengths, 0.1))


def test_images_are_read_inside_a_merged_projection() -> None:
    q, k, v = random(20, 3, 2, 80).unbind(1)
    found = packed_vit(q, k, v, Tiles.of([20], 16, DEVICE), 0.2, launch=SMALL)
    assert_close(found, reference_packed_attention(q, k, v, [20], 0.2))


def test_tiles_of_padding_change_nothing() -> None:
    q, k, v = random(3, 30, 2, 64)
    exact, padded = Tiles.of([18, 12], 16, DEVICE), Tiles.of([18, 12], 16, DEVICE, capacity=8)
    expected = packed_vit(q, k, v, exact, 0.2, launch=SMALL)
    assert torch.equal(packed_vit(q, k, v, padded, 0.2, launch=SMALL), expected)


# --- tiles --------------------------------------------------------------------------------------------------------


def test_every_row_is_in_exactly_one_tile() -> None:
    tiles = Tiles.of([5, 0, 33, 16], 16, DEVICE)
    rows = [
        (owner, row)
        for owner, first in tiles.index.tolist()
        for row in range(first, min(first + 16, [5, 0, 33, 16][owner]))
    ]
    assert sorted(rows) == [(owner, row) for owner, n in enumerate([5, 0, 33, 16]) for row in range(n)]


def test_the_tile_with_most_keys_comes_first() -> None:
    tiles = Tiles.of([32, 16], 16, DEVICE, seq_lens=[32, 100])
    assert tiles.index.tolist() == [[1, 0], [0, 16], [0, 0]]


def test_more_tiles_than_a_launch_has_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tiles do not fit a launch of 2"):
        Tiles.of([33], 16, DEVICE, capacity=2)


# --- storing ------------------------------------------------------------------------------------------------------


def stored(dtype: torch.dtype, dim: int = 80, heads: int = 5, kv_heads: int = 3) -> tuple[Tensor, ...]:
    """q, k and v inside one projection, angles, two empty caches, and slots of which some are padding."""
    q, k, v = random(4, heads + 2 * kv_heads, dim, dtype=dtype).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = random(2, 4, 1, dim, dtype=dtype, seed=1)
    k_cache, v_cache = torch.zeros(2, 32, kv_heads, dim, dtype=dtype, device=DEVICE)
    return q, k, v, cos, sin, k_cache, v_cache, ints([7, -1, 31, 0], torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_turning_and_storing_equals_doing_one_after_the_other(dim: int, dtype: torch.dtype) -> None:
    found, expected = stored(dtype, dim), stored(dtype, dim)
    rotary_and_store(*found)
    reference.rotary_and_store(*expected)
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        assert_close(ours, theirs)


def test_a_projection_in_parts_is_turned_and_stored_as_its_sum() -> None:
    whole, expected = stored(torch.float32), stored(torch.float32)
    qkv = torch.cat(whole[:3], dim=1)
    parts = torch.stack([random(*qkv.shape, seed=5), qkv - random(*qkv.shape, seed=5)])
    found = (*parts.split([5, 3, 3], dim=2), *whole[3:])
    turned = rotary_and_store(*found)
    reference.rotary_and_store(*expected)
    assert_close(turned, expected[0])
    assert_close(found[5], expected[5])
    assert_close(found[6], expected[6])


@pytest.mark.parametrize(("dim", "rotating"), [(64, 64), (80, 80), (128, 32)])
@pytest.mark.parametrize("by_head", [False, True], ids=["rows of heads", "heads of rows"])
def test_queries_and_keys_rotate_in_place_and_what_is_beside_them_stays(dim: int, rotating: int, by_head: bool) -> None:
    whole = random(9, 4, dim).transpose(0, 1) if by_head else random(4, 9, dim)
    q, k, v = whole.split([5, 2, 2], dim=1)
    expected = [part.clone() for part in (q, k, v)]
    cos, sin = random(2, 4, rotating, seed=1)
    rotary(q, k, cos, sin)
    for part in expected[:2]:
        low, high = part[..., :rotating].chunk(2, dim=-1)
        half = torch.cat((-high, low), dim=-1)
        part[..., :rotating] = part[..., :rotating] * cos[:, None] + half * sin[:, None]
    for found, theirs in zip((q, k, v), expected, strict=True):
        assert_close(found, theirs)


# --- between the products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [64, 200, 1536])
def test_the_norm_of_a_sum_equals_the_reference(hidden: int, dtype: torch.dtype) -> None:
    x, residual = random(2, 3, hidden, dtype=dtype)
    weight = random(hidden, dtype=dtype, seed=1)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(normed, expected_normed)
    assert_close(total, expected_total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [16, 200])
def test_the_norm_without_a_sum_equals_that_of_adding_nothing(hidden: int, dtype: torch.dtype) -> None:
    x, weight = random(2, 3, hidden, dtype=dtype), random(hidden, seed=1)
    nothing = torch.zeros(6, hidden, dtype=dtype, device=DEVICE)
    expected, _ = add_rms_norm(x.flatten(0, 1), nothing, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6).flatten(0, 1), expected)


@pytest.mark.parametrize("parts", [(), (3,)], ids=["whole", "in parts"])
def test_what_is_added_may_have_a_norm_of_its_own_and_the_sum_several(parts: tuple[int, ...]) -> None:
    x, residual = random(*parts, 5, 200), random(5, 200, seed=3)
    weight, added = random(3, 200, seed=1), Added(random(200, seed=2), 1e-5, 0.3)
    found = add_rms_norm(x, residual, weight, 1e-6, added=added)
    assert found[0].shape == (3, 5, 200)
    for ours, expected in zip(found, reference.add_rms_norm(x, residual, weight, 1e-6, added=added), strict=True):
        assert_close(ours, expected)


def test_the_norm_takes_float32_weights_for_half_rows() -> None:
    x, residual = random(2, 3, 200, dtype=torch.bfloat16)
    weight = 1 + random(200, seed=1) / 8
    found = add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(found, reference.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        assert_close(ours, theirs)


def test_the_norm_of_some_rows_alone_equals_theirs_among_all() -> None:
    x, residual, weight, only = random(3, 5, 200), random(5, 200, seed=1), random(200, seed=2), ints([4, 0, 4])
    found = add_rms_norm(x, residual, weight, 1e-6, only)
    for ours, all_of_them in zip(found, add_rms_norm(x, residual, weight, 1e-6), strict=True):
        assert torch.equal(ours, all_of_them[[4, 0, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [8, 1100])
def test_gate_and_up_of_a_merged_projection_are_multiplied(wide: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * wide, dtype=dtype)
    assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert_close(silu_and_mul(gate_up, gelu=True), reference.gelu_and_mul(gate_up))


# --- the ends of a decode step ------------------------------------------------------------------------------------


def test_the_largest_of_each_row_is_found_across_splits() -> None:
    logits, workspace = random(3, 9000, dtype=torch.bfloat16), ArgmaxWorkspace.allocate(4, DEVICE)
    found = argmax(logits, workspace, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert torch.equal(logits.gather(1, found[:, None]), logits.amax(1, keepdim=True))
    assert not workspace.counters.any(), "a launch leaves the counters at zero for the next one"


def test_of_equal_largest_values_the_first_one_is_found() -> None:
    logits = torch.full((2, 9000), -7.0, device=DEVICE)
    logits[0, [4100, 5, 8999]] = -1.0
    found = argmax(logits, ArgmaxWorkspace.allocate(2, DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert found.tolist() == [5, 0]


@pytest.mark.parametrize("size", [40, 9000])
def test_what_is_found_is_written_down_for_the_step_that_follows(size: int) -> None:
    logits, last_tokens = random(2, size), ints([-1, -1, -1], torch.int64)
    sink = TokenSink(last_tokens, ints([2, 0]))
    found = argmax(logits, ArgmaxWorkspace.allocate(2, DEVICE), ints([0, 0], torch.int64), sink)
    assert last_tokens.tolist() == [found[1].item(), -1, found[0].item()]


def begun(embeds: Tensor, tables: Tensor) -> tuple[PrefillInputs, Tensor, Tensor]:
    """Three rows of two windows with two axes, the table of tokens and the angles they should have."""
    embedding, turning = (
        random(9, 40, dtype=torch.bfloat16),
        RotaryFrequencies(random(8).abs(), ints([0, 1] * 4, torch.int64)),
    )
    positions = ints([0, 700, 31, 5, 6, 7]).view(2, 3)
    metadata = PrefillMetadata(ints([4, -1, 0]), positions, ints([2, 0]), ints([49, 600 * BLOCK]))
    found = prefill_inputs(metadata, embeds, embedding, turning, tables, BLOCK)
    return found, embedding, positions.float().index_select(0, turning.axes).T * turning.frequencies


def test_tokens_become_rows_of_the_table_and_images_stay() -> None:
    embeds, tables = random(3, 60, dtype=torch.bfloat16, seed=1), ints([0] * 1800).view(3, 600)
    before = embeds.clone()
    _, embedding, _ = begun(embeds, tables)
    wide = torch.cat((embedding, embedding.new_zeros(9, 20)), dim=1)
    assert torch.equal(embeds, torch.stack([wide[4], before[1], wide[0]]))


def test_a_pass_of_prompts_begins_with_angles_of_every_axis_and_tables_of_windows() -> None:
    tables = torch.arange(3 * 600, dtype=torch.int32, device=DEVICE).view(3, 600)
    found, _, angles = begun(random(3, 40, dtype=torch.bfloat16), tables)
    cos, sin = cos_sin(angles, torch.bfloat16)
    assert_close(found.cos, cos)
    assert_close(found.sin, sin)
    for row, blocks, of in ((0, 4, 2), (1, 600, 0)):  # as many as the context has
        assert torch.equal(found.tables[row, :blocks], tables[of, :blocks])


def signed_nan(dtype: torch.dtype) -> Tensor:
    """Not a number with the sign bit set, which no arithmetic of a CUDA device makes."""
    bits = {torch.float32: torch.int32}.get(dtype, torch.int16)
    return torch.tensor(-1, dtype=bits).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_sign", [False, True])
def test_not_a_number_is_the_largest_and_with_a_sign_the_smallest(dtype: torch.dtype, has_sign: bool) -> None:
    logits = random(1, 9000, dtype=dtype)
    largest = int(logits.argmax())
    logits[0, 6000] = signed_nan(dtype) if has_sign else float("nan")
    found = argmax(logits, ArgmaxWorkspace.allocate(1, DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert found.tolist() == [largest if has_sign else 6000]


def test_embeddings_of_a_decode_step_may_go_into_wider_rows_of_a_larger_pass() -> None:
    embedding, rows = random(9, 40, dtype=torch.bfloat16), random(5, 60, dtype=torch.bfloat16, seed=1)
    others, last_tokens, tables = rows[:3].clone(), ints([8], torch.int64), ints([0]).view(1, 1)
    metadata = DecodeMetadata(*(ints(values) for values in ([4, -1], [0, 0], [-1, -1], [1, 1], [0, 0])))
    found = decode_inputs(metadata, last_tokens, embedding, random(8).abs(), tables, BLOCK, rows[3:])
    assert torch.equal(rows[:3], others) and found.embeds.data_ptr() == rows[3:].data_ptr()
    assert torch.equal(rows[3:, :40], embedding[[4, 8]]) and not rows[3:, 40:].any()


def test_a_decode_step_begins_with_embeddings_angles_and_tables() -> None:
    tokens, positions, rows = ints([4, -1, 0]), ints([0, 700, 31]), ints([2, 0, 1])
    embedding, frequencies = random(9, 40, dtype=torch.bfloat16), random(8).abs()
    tables = torch.arange(3 * 600, dtype=torch.int32, device=DEVICE).view(3, 600)
    last_tokens, slots, seq_lens = (
        ints([8, 7, 7], torch.int64),
        ints([-1, -1, 9000 * BLOCK]),
        ints([1, 600 * BLOCK, 49]),
    )
    metadata = DecodeMetadata(tokens, positions, slots, seq_lens, rows)
    expected = tables.clone()
    expected[1, 3] = 9000  # the block of the new token's slot
    found = decode_inputs(metadata, last_tokens, embedding, frequencies, tables, BLOCK)
    cos, sin = cos_sin(positions[:, None].float() * frequencies, torch.bfloat16)
    assert torch.equal(found.embeds, embedding[[4, 8, 0]])
    assert torch.equal(tables, expected)
    for row, blocks, of in ((0, 1, 2), (1, 600, 0), (2, 4, 1)):  # as many as the context has
        assert torch.equal(found.tables[row, :blocks], expected[of, :blocks])
    assert_close(found.cos, cos)
    assert_close(found.sin, sin)
