"""Recorded blocks of a vision tower against launched ones: on a CPU a recording runs its kernels in the interpreter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from saccade import vision_graph_sizes
from saccade.checkpoint.config import model_config
from saccade.kernels.attention.vit import PassLimits, ScheduledVit, TiledVit, VisionHeads, num_tiles
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops import vit_elementwise
from saccade.models.cuda import vision_graphs
from saccade.models.cuda.vision import FusedVision, _FusedPass
from saccade.models.families.llava import Llava
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.vision.backend import TorchVision, run_blocks
from saccade.models.vision.blocks import grid_positions
from saccade.runner.encoder import graph_capture
from saccade.runner.encoder.graph_capture import capture_tower, run_tower
from saccade.types.media import Grid
from tests.helpers.families.family_checks import finish
from tests.helpers.families.vision_towers import LLAVA, QWEN, encode, model, random
from tests.helpers.kernels.compiling import compiling_on_the_cpu
from tests.helpers.kernels.vit_attention import attend


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_graph_sizes, "SIZES", (16, 32))
    for module in (vision_graph_sizes, vision_graphs):
        monkeypatch.setattr(module, "IMAGES", 3)
    monkeypatch.setattr(graph_capture, "_ROWS", 2)


@cache  # of all tests: the sizes are the same in each
def recorded() -> Qwen2VL | Llava:
    made = model(QWEN, FusedVision(), Qwen2VL)
    capture_tower(made)
    return made


def patches(grids: Sequence[Grid]) -> Tensor:
    return random(sum(grid.patches for grid in grids), 24)


@pytest.mark.parametrize(
    "grids",
    [[Grid(1, 4, 4)], [Grid(1, 4, 6)], [Grid(1, 2, 2), Grid(1, 4, 6), Grid(1, 2, 2)], [Grid(1, 2, 2)] * 4],
    ids=["a size itself", "between sizes", "several pictures", "too many pictures"],
)
def test_embeddings_are_those_of_the_plain_tower(grids: list[Grid]) -> None:
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches(grids), grids)
    for one, other in zip(encode(recorded(), patches(grids), grids), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_compiling_ahead_leaves_nothing_in_the_tower() -> None:
    made, grids = model(QWEN, FusedVision(), Qwen2VL), [Grid(1, 4, 4), Grid(1, 2, 6)]
    with compiling_on_the_cpu() as passes:
        run_tower(made)
    assert passes
    capture_tower(made)
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches(grids), grids)
    for one, other in zip(encode(made, patches(grids), grids), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_blocks_recorded_together_are_those_of_the_tower(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_graph_sizes, "SIZES", (32,))
    monkeypatch.setattr(vision_graphs, "BLOCKS_PER_GRAPH", together)
    raw, grids = {**QWEN, "vision_config": {**QWEN["vision_config"], "depth": 4}}, [Grid(1, 4, 6)]
    made = model(raw, FusedVision(), Qwen2VL)
    capture_tower(made)
    assert list(made.encode(patches(grids), grids)) == {1: [1, 1, 1, 1], 2: [2, 2], 3: [3, 1]}[together]
    expected = encode(model(raw, TorchVision(), Qwen2VL), patches(grids), grids)
    torch.testing.assert_close(encode(made, patches(grids), grids)[0], expected[0], atol=1e-4, rtol=1e-4)


def test_what_a_larger_pass_left_behind_changes_nothing() -> None:
    made, grids = recorded(), [Grid(1, 4, 4)]
    before = encode(made, patches(grids), grids)
    encode(made, 1e4 * patches([Grid(1, 4, 8)]), [Grid(1, 4, 8)])
    assert torch.equal(encode(made, patches(grids), grids)[0], before[0])


def test_embeddings_stay_what_they_are_when_the_next_pass_runs() -> None:
    made, grids = recorded(), [Grid(1, 4, 4)]
    found = encode(made, patches(grids), grids)[0]
    kept = found.clone()
    encode(made, 3 * patches(grids), grids)
    assert torch.equal(found, kept)


def test_passes_that_take_turns_block_by_block_keep_their_own_images() -> None:
    made = recorded()
    assert isinstance(made, Qwen2VL)
    blocks, x = made.tower.blocks, random(16, 96)
    places = grid_positions([Grid(1, 4, 4)], 48, 1e4, 2, x.device)
    cuts = ([16], [8, 8])
    whole, halves = (made.ops.begin(lengths, places, x.device) for lengths in cuts)
    plain = [
        torch.stack(finish(run_blocks(TorchVision().begin(lengths, places, x.device), blocks, x.clone())))
        for lengths in cuts
    ]
    for run, expected in ((whole, plain[0]), (halves, plain[1]), (whole, plain[0])):
        found, count = run(blocks, x.clone())
        assert count == len(blocks)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_images_of_one_number_of_patches_keep_their_own_places(is_recorded: bool) -> None:
    made = recorded() if is_recorded else model(QWEN, FusedVision(), Qwen2VL)
    plain = model(QWEN, TorchVision(), Qwen2VL)
    for grids in ([Grid(1, 4, 6)], [Grid(1, 6, 4)], [Grid(1, 6, 4)], [Grid(1, 2, 4), Grid(1, 4, 4)], [Grid(1, 4, 6)]):
        expected = torch.cat(encode(plain, patches(grids), grids))
        torch.testing.assert_close(torch.cat(encode(made, patches(grids), grids)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_the_pass_before_had_is_not_made_again(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, grids = recorded() if is_recorded else model(QWEN, FusedVision(), Qwen2VL), [Grid(1, 4, 6)]
    expected = torch.cat(encode(made, patches(grids), grids)).clone()
    for owner, name in ((vit_elementwise, "write_cos_sin"), (vision_graphs._GraphPass, "metadata")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("made again"))
    assert torch.equal(torch.cat(encode(made, patches(grids), grids)), expected)


def test_angles_of_the_pass_before_are_gone_when_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned for those of one pass."""
    made, turn, seen = model(QWEN, FusedVision(), Qwen2VL), vit_elementwise.write_cos_sin, []

    def watched(cells: Tensor, per_axis: Tensor, rotary: Tensor) -> None:
        seen.append(weakref.ref(rotary))
        assert [ref() is None for ref in seen] == [True] * (len(seen) - 1) + [False]
        turn(cells, per_axis, rotary)

    monkeypatch.setattr(vit_elementwise, "write_cos_sin", watched)
    for grids in ([Grid(1, 4, 6)], [Grid(1, 6, 4)], [Grid(1, 4, 6)]):
        encode(made, patches(grids), grids)
    assert len(seen) == 3


def test_a_pass_that_failed_before_its_first_block_finds_nothing_of_another_when_tried_again() -> None:
    made = recorded()
    assert isinstance(made, Qwen2VL)
    encode(made, patches([Grid(1, 2, 8)]), [Grid(1, 2, 8)])
    blocks, x = made.tower.blocks, random(16, 96)
    places = grid_positions([Grid(1, 4, 4)], 48, 1e4, 2, x.device)
    expected = torch.stack(finish(run_blocks(TorchVision().begin([16], places, x.device), blocks, x.clone())))
    run = made.ops.begin([16], places, x.device)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(vision_graphs._StaticBuffers, "write_cos_sin", raise_memory_error)
        run(blocks, x.clone())
    torch.testing.assert_close(run(blocks, x.clone())[0], expected, atol=1e-4, rtol=1e-4)


def raise_memory_error(*_: object) -> None:
    raise MemoryError


def test_a_pass_beyond_the_largest_size_is_launched_as_ever() -> None:
    made, grids = recorded(), [Grid(1, 8, 8)]
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches(grids), grids)
    torch.testing.assert_close(encode(made, patches(grids), grids)[0], expected[0], atol=1e-4, rtol=1e-4)


def test_nothing_is_recorded_once_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorded()
    monkeypatch.setattr(vision_graphs.VisionGraphs, "_capture", lambda *_: pytest.fail("recorded for a request"))
    for grids in ([Grid(1, 2, 4)], [Grid(1, 4, 4)], [Grid(1, 4, 8)]):
        encode(made, patches(grids), grids)


def test_towers_that_keep_several_layers_get_each_as_it_was() -> None:
    grids, given = [Grid(1, 4, 4)] * 2, random(32, 12)
    made = model(LLAVA, FusedVision(), Llava)
    capture_tower(made)
    expected = encode(model(LLAVA, TorchVision(), Llava), given, grids)
    torch.testing.assert_close(torch.stack(encode(made, given, grids)), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_passes_of_equal_images_are_recorded_beyond_the_sizes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_graph_sizes, "MAXIMUM", 64)
    made, grids, given = model(LLAVA, FusedVision(), Llava), [Grid(1, 4, 4)] * 3, random(48, 12)
    capture_tower(made)
    monkeypatch.setattr(FusedVision, "_eager", lambda *_: pytest.fail("launched, not replayed"))
    expected = encode(model(LLAVA, TorchVision(), Llava), given, grids)
    torch.testing.assert_close(torch.stack(encode(made, given, grids)), torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("maximum", "largest"), [(64, 64), (40, 48), (17, 32)])
def test_memory_is_planned_for_the_largest_pass_that_is_recorded(
    maximum: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square is 16 patches and the tower's own token."""
    monkeypatch.setattr(vision_graph_sizes, "MAXIMUM", maximum)
    made = model(LLAVA, FusedVision(), Llava)
    capture_tower(made)
    assert made.config.vision and vision_graph_sizes.largest_pass(made.config.vision) == largest


def test_a_pass_larger_than_the_first_that_was_recorded_is_launched() -> None:
    made, grids = model(QWEN, FusedVision(), Qwen2VL), [Grid(1, 4, 8)]
    assert isinstance(made.ops, FusedVision)
    with made.ops.capturing():
        encode(made, patches([Grid(1, 4, 4)]), [Grid(1, 4, 4)])
        found = encode(made, patches(grids), grids)
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches(grids), grids)
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-4)


def test_tiles_of_any_images_fit_the_recorded_launch() -> None:
    for lengths in ([32, 0, 0], [1, 1, 30], [17, 15, 0], [9, 9, 9]):
        size = next(size for size in vision_graph_sizes.SIZES if size >= sum(lengths))
        Tiles.of(lengths, 8, torch.device("cpu"), capacity=num_tiles(PassLimits(size, 3), 8))


# --- larger pictures another way ----------------------------------------------------------------------------------


@cache
def shared_or_tiled() -> Qwen2VL | Llava:
    """Pictures of 16 patches and more are shared out among three programs."""
    ops = FusedVision()
    shared = ScheduledVit(
        lambda lengths, *_: min(lengths) >= 16, lambda shares: partial(attend, shares), 3, min_patches=16
    )
    ops._graphs = vision_graphs.VisionGraphs(_FusedPass, (shared, TiledVit()), ops._eager)
    made = model(QWEN, ops, Qwen2VL)
    capture_tower(made)
    return made


@pytest.mark.parametrize(
    "grids",
    [[Grid(1, 4, 4)], [Grid(1, 4, 6)], [Grid(1, 4, 4)] * 2, [Grid(1, 2, 2)] * 3, [Grid(1, 4, 4), Grid(1, 2, 2)]],
    ids=["a size itself", "between sizes", "several pictures", "small pictures", "a small one beside a large one"],
)
def test_recorded_passes_go_the_way_that_suits_their_images(grids: list[Grid], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "_SMALL", 8)
    made = shared_or_tiled()
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches(grids), grids)
    for one, other in zip(encode(made, patches(grids), grids), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_both_ways_are_recorded_before_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capture, "_SMALL", 8)
    made = shared_or_tiled()
    monkeypatch.setattr(FusedVision, "_eager", lambda *_: pytest.fail("launched one by one"))
    for grids in ([Grid(1, 4, 4)], [Grid(1, 2, 4)] * 2):
        encode(made, patches(grids), grids)


@pytest.mark.parametrize("lengths", [[2048], [1564], [256] * 8, [300, 1200, 400], [641, 641]], ids=str)
def test_whatever_is_shared_out_has_room_in_a_recording(lengths: list[int]) -> None:
    way = ScheduledVit(lambda *_: True, lambda _: pytest.fail("not asked for"), 132, min_patches=0)
    heads, maximum = VisionHeads(16, 80, torch.bfloat16), PassLimits(2048, 32)
    assert len(way.metadata(lengths, heads, maximum)) <= way.metadata_size(heads, maximum)


@pytest.mark.parametrize("side", [2, 3, 4, 5])
def test_recorded_images_have_whole_tokens_and_no_recording_is_left_out(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_graph_sizes, "SIZES", tuple(range(128, 2049, 128)))
    qwen = model_config(QWEN).vision
    assert qwen
    packings = list(graph_capture._packings(replace(qwen, spatial_merge_size=side)))
    assert all(grid.h % side == grid.w % side == 0 and grid.patches for grids in packings for grid in grids)
    alone = [vision_graph_sizes.size_for(grids[0].patches) for grids in packings if len(grids) == 1]
    assert alone == list(reversed(vision_graph_sizes.SIZES))


def test_packs_of_small_images_are_recorded_beside_one_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_graph_sizes, "SIZES", (128, 256, 2048))
    vision = model_config(QWEN).vision
    assert vision
    assert [[len(grids), sum(grid.patches for grid in grids)] for grids in graph_capture._packings(vision)] == [
        [1, 2048], [16, 2048], [1, 256], [2, 256], [1, 128],
    ]  # fmt: skip
