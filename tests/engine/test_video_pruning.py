"""Pruned videos: what is counted before a frame is decoded, which tokens stay, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from saccade import LLM
from saccade.costs import kept_tokens
from saccade.errors import ConfigError
from saccade.media import video_reader
from saccade.media.decode import decode_item
from saccade.media.video_pruning import changes, kept_of, top_changed
from saccade.media.video_reader import VideoReaders
from saccade.options.engine import MediaPolicy, Options, options
from saccade.processor.families.frame_groups import published
from saccade.processor.input_processor import Processor
from saccade.runner.batch import RequestState
from saccade.types.media import Size
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from saccade.types.step import Admission
from tests.helpers.engine.async_engine import overlapped
from tests.helpers.media.images import png
from tests.helpers.media.prompts import POLICY, make, refusal
from tests.helpers.media.videos import GREEDY, VIDEO, answers, film, frames

pytestmark = pytest.mark.transformers

ARRAY = frames(10, 112, 84)  # groups of 4 x 3 tokens
CELLS = Size(5, 4)  # of the videos with a square
FILM = film(30, images=frames(30, 112, 84, seed=3), size=(112, 84))


@pytest.fixture(scope="module")
def qwen(qwen2_vl_folder: Path) -> Processor:
    return make(qwen2_vl_folder)


def asked(video: Any, pruning: float | None = None, text: str = "what happens?", **kwargs: Any) -> dict[str, Any]:
    kwargs |= {} if pruning is None else {"video_pruning": pruning}
    return {"prompt": f"Look: {VIDEO}{text}", "multi_modal_data": {"video": video}, "mm_processor_kwargs": kwargs}


def same(one: Prompt, other: Prompt) -> bool:
    return (
        one.token_ids == other.token_ids
        and one.spans == other.spans
        and one.identity == other.identity
        and np.array_equal(one.positions, other.positions)
        and one.next_position == other.next_position
    )


# --- what is known beforehand -------------------------------------------------------------------------------------


@example(tokens=100, thousandths=290)  # 0.29 is stored as a little less, 0.7 of 10 as a little more than they say
@example(tokens=10, thousandths=700)
@given(tokens=st.integers(1, 20_000), thousandths=st.integers(0, 999))
def test_the_share_that_stays_is_rounded_up_and_never_nothing(tokens: int, thousandths: int) -> None:
    kept = kept_tokens(tokens, thousandths / 1000)
    assert kept == -(-(1000 - thousandths) * tokens // 1000) >= 1


@given(
    width=st.integers(20, 1500),
    height=st.integers(20, 1500),
    hundredths=st.integers(0, 99),
)
def test_a_group_of_any_size_keeps_as_many_tokens_as_the_formula_says(width: int, height: int, hundredths: int) -> None:
    rules = published()
    whole = rules.geometry(Size(width, height), 8, rules.limits(None))
    pruned = rules.pruned(whole, hundredths / 100)
    assert pruned.tokens == pruned.slots == -(-(100 - hundredths) * whole.tokens // 100)
    assert pruned.grid == whole.grid and pruned.resized == whole.resized
    assert pruned.cells in (None, Size(whole.resized.width // 28, whole.resized.height // 28))
    assert (pruned.cells is None) == (pruned.tokens == whole.tokens)


@pytest.mark.parametrize("video", [ARRAY, FILM], ids=["frames", "file"])
@pytest.mark.parametrize("pruning", [0.25, 0.5, 0.9])
def test_every_group_but_the_first_is_pruned_and_the_bill_says_so(qwen: Processor, video: Any, pruning: float) -> None:
    whole, pruned = qwen.from_prompt(asked(video)), qwen.from_prompt(asked(video, pruning))
    groups = len(whole.spans)
    assert [span.length for span in whole.spans] == [12] * groups
    assert [span.length for span in pruned.spans] == [12] + [kept_tokens(12, pruning)] * (groups - 1)
    bill, before = qwen.bill(pruned, 16), qwen.bill(whole, 16)
    assert bill.items[0].pruned == len(whole) - len(pruned) == (groups - 1) * (12 - kept_tokens(12, pruning))
    assert bill.items[0].tokens + bill.items[0].pruned == before.items[0].tokens and before.items[0].pruned == 0
    assert bill.prompt_tokens == len(pruned) and bill.items[0].grid == before.items[0].grid


def test_without_pruning_a_prompt_is_what_it_was(qwen2_vl_folder: Path, qwen: Processor) -> None:
    for video in (ARRAY, FILM):
        plain = qwen.from_prompt(asked(video))
        zero = make(qwen2_vl_folder, video=replace(POLICY.video, pruning=0.0)).from_prompt(asked(video, 0))
        assert same(plain, zero)
        assert [item.num_frames for item in zero.items] == [2] * len(zero.items)


def test_the_first_group_keeps_its_key_and_the_others_are_known_by_what_stays(qwen: Processor) -> None:
    keys = [[s.key for s in qwen.from_prompt(asked(ARRAY, q)).spans] for q in (0.0, 0.5, 0.75)]
    assert len({row[0] for row in keys}) == 1
    assert len({row[1] for row in keys}) == 3
    assert keys[1] == [s.key for s in qwen.from_prompt(asked(ARRAY, 0.51)).spans]  # 6 of 12 tokens stay either way


def test_a_group_is_known_by_the_frame_before_it_and_by_nothing_later(qwen: Processor) -> None:
    base = [s.key for s in qwen.from_prompt(asked(ARRAY, 0.5)).spans]
    longer = [s.key for s in qwen.from_prompt(asked(np.concatenate([ARRAY, ARRAY]), 0.5)).spans]
    assert longer[: len(base)] == base
    changed = ARRAY.copy()
    changed[3] = 255 - changed[3]  # the second frame of the second group
    other = [s.key for s in qwen.from_prompt(asked(changed, 0.5)).spans]
    assert [one == two for one, two in zip(base, other, strict=True)] == [True, False, False, True, True]


def test_text_behind_a_pruned_video_stands_where_it_would_stand_behind_the_whole(qwen: Processor) -> None:
    whole, pruned = qwen.from_prompt(asked(ARRAY)), qwen.from_prompt(asked(ARRAY, 0.75))
    behind = whole.spans[-1].end - len(whole)
    assert np.array_equal(whole.positions[:, behind:], pruned.positions[:, behind:])
    assert whole.next_position == pruned.next_position
    for one, two in zip(whole.spans, pruned.spans, strict=True):
        assert whole.positions[0, one.start] == pruned.positions[0, two.start], "the time axis is the group's"


def test_a_request_may_prune_more_than_the_deployment_and_never_less(qwen2_vl_folder: Path) -> None:
    held = make(qwen2_vl_folder, video=replace(POLICY.video, pruning=0.5))
    assert held.from_prompt(asked(ARRAY)).spans[1].length == 6
    assert held.from_prompt(asked(ARRAY, 0.75)).spans[1].length == 3
    for wrong in (0.25, 1, -0.1, True, "0.7", float("nan")):
        error = refusal(held, asked(ARRAY, wrong))
        assert "video_pruning must be a number below 1 and at least 0.5" in error.message
        assert error.param == "mm_processor_kwargs.video_pruning"


def test_the_option_reaches_the_policy_and_is_checked() -> None:
    assert options(mm_processor_kwargs={"video_pruning": 0.5}) == Options(video_pruning=0.5)
    assert MediaPolicy.of(Options(video_pruning=0.5)).video.pruning == 0.5
    for wrong in (1.0, -0.5):
        with pytest.raises(ConfigError, match="video_pruning must be at least 0 and below 1"):
            Options(video_pruning=wrong)


def test_the_frame_before_counts_for_what_is_in_memory_at_once(qwen2_vl_folder: Path) -> None:
    held = make(qwen2_vl_folder, max_image_pixels=2 * 112 * 84)
    assert held.from_prompt(asked(ARRAY)).spans
    assert "3 frames of 112x84" in refusal(held, asked(ARRAY, 0.5)).message
    for nothing_is_pruned in (asked(ARRAY[:2], 0.5), asked(ARRAY[:1], 0.5), asked(ARRAY, 0.01)):
        assert held.from_prompt(nothing_is_pruned).spans


def test_a_compressed_frame_that_is_decoded_twice_counts_twice_for_the_request(qwen2_vl_folder: Path) -> None:
    shown = [[png(Image.fromarray(frame)) for frame in ARRAY[:6]]]
    held = make(qwen2_vl_folder, max_request_pixels=7 * 112 * 84)
    assert held.from_prompt(asked(shown)).spans
    assert "8 frames of 112x84" in refusal(held, asked(shown, 0.5)).message


# --- which tokens stay --------------------------------------------------------------------------------------------


def square_at(*corners: tuple[int, int], side: int = 28) -> np.ndarray:
    """[frames, H, W, 3]: a white square of one cell on a still background, its upper left corner in cells."""
    still = frames(1, CELLS.width * side, CELLS.height * side)[0] // 2
    shown = np.stack([still] * len(corners))
    for frame, (row, column) in zip(shown, corners, strict=True):
        frame[row * side : (row + 1) * side, column * side : (column + 1) * side] = 255
    return shown


def test_the_cells_a_square_leaves_and_enters_stay() -> None:
    changed = changes(square_at((1, 1), (1, 2), (2, 2)), CELLS)
    assert np.flatnonzero(changed).tolist() == [6, 7, 12]
    assert top_changed(changed, 3).tolist() == [6, 7, 12]


def test_what_moved_only_before_the_group_does_not_stay() -> None:
    """The frame before the group shows it where it rests already, and that group has kept it."""
    shown = square_at((0, 0), (3, 4), (3, 4), (3, 4), (0, 1))
    assert not changes(shown[1:4], CELLS).any()


def test_of_cells_that_changed_alike_the_first_ones_stay() -> None:
    assert top_changed(np.array([0, 3, 0, 3, 0]), 4).tolist() == [0, 1, 2, 3]


def test_frames_that_are_no_whole_number_of_cells_are_cut_where_the_tower_cuts_them() -> None:
    shown = np.zeros((2, 50, 70, 3), np.uint8)
    shown[1, 25:, 35:] = 200  # the lower right quarter
    assert np.flatnonzero(changes(shown, Size(4, 4))).tolist() == [10, 11, 14, 15]


@pytest.mark.parametrize("as_file", [False, True], ids=["frames", "file"])
def test_a_group_is_compared_with_the_frame_before_it(qwen: Processor, as_file: bool) -> None:
    path = [(0, 0), (0, 0), (0, 0), (2, 3), (2, 3), (3, 1)]
    shown = square_at(*path)
    video = film(6, images=shown, size=(140, 112), fps=2) if as_file else shown
    items = qwen.from_prompt(asked(video, 0.9, **({} if as_file else {"fps": 2}))).items
    readers = VideoReaders()
    kept = [kept_of(item, decode_item(item, readers)) for item in items]
    readers.close()
    assert [item.num_frames for item in items] == [2, 3, 3]
    assert kept[0] is None
    assert kept[1] is not None and kept[1].tokens.tolist() == [0, 13]
    assert kept[1].cells.tolist() == [[0, 2], [0, 3]]
    assert kept[2] is not None and kept[2].tokens.tolist() == [13, 16]


def test_groups_that_share_a_frame_are_decoded_side_by_side(qwen: Processor) -> None:
    """The last frame of a group is the one before the next, and its reader goes from thread to thread."""
    items, readers = qwen.from_prompt(asked(FILM, 0.5)).items, VideoReaders()
    expected = [decode_item(item, readers) for item in items]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            found = list(pool.map(lambda item: decode_item(item, readers), items))
            assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
    readers.close()
    for one, two in pairwise(expected):
        assert np.array_equal(one[-1], two[0])


def test_a_frame_is_never_converted_once_its_reader_may_have_another_owner(
    qwen: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two frames have one time the same frame is found twice: whoever comes next begins with it."""
    fast = film(8, container="matroska", fps=10, stamps=[0, 1, 2, 2, 3, 4, 5, 6], b_frames=0)
    items, readers = qwen.from_prompt(asked(fast, 0.5, num_frames=8)).items, VideoReaders()
    assert [item.stamps for item in items[:3]] == [(0, 100), (100, 200, 200), (200, 300, 400)]
    convert, given_away = video_reader._upright, []

    def noted(frame: Any, item: Any) -> Any:
        given_away.append(any(frame is reader._current for reader in readers._idle))
        return convert(frame, item)

    monkeypatch.setattr(video_reader, "_upright", noted)
    shown = [decode_item(item, readers) for item in items]
    readers.close()
    assert given_away and not any(given_away)
    assert np.array_equal(shown[1][1], shown[1][2]) and np.array_equal(shown[1][2], shown[2][0])


# --- through the engine -------------------------------------------------------------------------------------------


def prompts(pruning: float | None) -> list[dict[str, Any]]:
    return [asked(ARRAY[:5], pruning), asked(FILM, pruning), asked(ARRAY, pruning), asked(ARRAY, pruning, "how many?")]


def run(folder: Path, pruning: float | None = 0.5, **given: Any) -> list[list[int]]:
    return answers(folder, prompts(pruning), **given)


@pytest.fixture(scope="module")
def alone(qwen2_vl_folder: Path) -> list[list[int]]:
    return run(qwen2_vl_folder, together=False, enable_prefix_caching=False, encoder_cache_gb=0.0)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16"),
        pytest.param({"max_num_batched_tokens": 5, "encoder_cache_gb": 0.0}, id="chunks of 5, no encoder cache"),
        pytest.param({"encode_layers_per_step": 1, "max_num_batched_tokens": 32}, id="sliced"),
        pytest.param({"kv_cache_gb": 0.0001, "block_size": 4, "max_model_len": 80}, id="preempted"),
    ],
)
def test_answers_about_pruned_videos_do_not_depend_on(
    given: dict[str, Any], qwen2_vl_folder: Path, alone: list[list[int]]
) -> None:
    assert run(qwen2_vl_folder, **given) == alone


def test_kernels_and_launching_ahead_give_the_same_answers_about_pruned_videos(
    qwen2_vl_folder: Path, alone: list[list[int]]
) -> None:
    """Positions are settled between encoding and computing on a device too: in Triton's interpreter without a GPU."""
    llm = overlapped(qwen2_vl_folder, max_num_batched_tokens=24)
    (out,) = llm.generate(prompts(0.5)[:1], replace(GREEDY, max_tokens=2), use_tqdm=False)
    llm.close()
    assert out.outputs[0].token_ids == alone[0][:2]


def test_with_nothing_pruned_answers_are_what_they_were(qwen2_vl_folder: Path) -> None:
    assert run(qwen2_vl_folder, 0.0) == run(qwen2_vl_folder, None)


@pytest.fixture
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), use_tqdm=False, max_model_len=512, kv_cache_gb=0.02, video_pruning=0.5)
    yield made
    made.close()


def ask(llm: LLM, video: Any, text: str = "what happens?") -> Any:
    return llm.generate(asked(video, text=text), GREEDY, use_tqdm=False)[0]


def test_a_growing_video_decodes_and_encodes_only_its_new_groups(llm: LLM) -> None:
    seen = []
    for count in (4, 6, 10):
        ask(llm, ARRAY[:count])
        stats = llm.stats()["encoder"]
        seen.append((stats["decoded"], stats["encoded"]))
    assert seen == [(2, 2), (3, 3), (5, 5)]


def test_a_growing_pruned_video_prefills_only_what_is_new(llm: LLM) -> None:
    array = frames(24, 112, 84)
    ask(llm, array[:20])
    assert ask(llm, array).num_cached_tokens >= 64  # of 12 + 9 * 6 tokens in the old groups and 7 in front


def test_only_the_rows_that_stay_are_kept(llm: LLM) -> None:
    out = ask(llm, ARRAY)
    core = llm.engine.core
    assert sorted(len(rows) for rows in core.runner.embeddings.values()) == [6, 6, 6, 6, 12]
    assert core.scheduler.stats()["encoder_cache"]["slots_used"] == 36
    assert out.bill.video_tokens == 36 and out.bill.items[0].pruned == 24


def test_a_window_whose_tokens_have_no_places_is_an_error_and_not_a_wrong_answer(qwen: Processor) -> None:
    prompt = qwen.from_prompt(asked(ARRAY, 0.5))
    admission = Admission(Request("r", prompt, GREEDY, 8, frozenset(), 0), (), ())
    whole, pruned = prompt.spans[:2]
    assert np.array_equal(
        RequestState(admission).positions(0, whole.end), prompt.positions[:, : whole.end].astype(np.int64)
    )
    with pytest.raises(KeyError):
        RequestState(admission).positions(0, pruned.start + 1)
    places = {pruned.key: np.array([[0, 0, 1, 1, 2, 2], [0, 3, 1, 2, 0, 1]])}
    placed = RequestState(admission, coordinates=places).positions(pruned.start + 2, pruned.end)
    corner = prompt.positions[1:, pruned.start : pruned.start + 1]
    assert np.array_equal(placed[1:] - corner, places[pruned.key][:, 2:])


def test_places_go_with_the_embeddings_they_belong_to(qwen2_vl_folder: Path) -> None:
    sizes = {"max_model_len": 512, "kv_cache_gb": 0.02, "encoder_cache_gb": 0.0, "video_pruning": 0.5}
    llm = LLM(model=str(qwen2_vl_folder), use_tqdm=False, **sizes)
    for text in ("one?", "two?"):
        ask(llm, ARRAY, text)
    ask(llm, ARRAY[:1], "three?")
    assert not llm.engine.core.runner._coordinates
    llm.close()


def test_a_pruned_video_that_breaks_off_ends_only_its_own_request(llm: LLM) -> None:
    broken = bytearray(FILM)
    start, end = broken.index(b"mdat"), broken.index(b"moov")
    broken[(start + end) // 2 : end - 8] = bytes(end - 8 - (start + end) // 2)
    bad, good = llm.generate([asked(bytes(broken)), asked(FILM)], GREEDY, use_tqdm=False)
    assert bad.error is not None and "damaged or cut short" in bad.error.message
    assert good.error is None and len(good.outputs[0].token_ids) == 8
    llm.engine.core.scheduler.check()
