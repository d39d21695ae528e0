"""Which frames are taken of a video, what they cost, and what is refused: nothing here runs a model."""

from __future__ import annotations

import base64
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from saccade.cli.count import count_files
from saccade.errors import ConfigError, RequestError
from saccade.media import video_reader
from saccade.media.decode import decode_item
from saccade.media.video_file import open_video
from saccade.media.video_probe import probe_video
from saccade.media.video_reader import VideoReaders
from saccade.options.engine import MediaPolicy, Options, VideoPolicy, options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import video_rules_for
from saccade.processor.families.frame_groups import Sampling, VideoRules
from saccade.processor.input_processor import Processor
from saccade.types.media import MediaItem, Size
from saccade.types.prompt import Prompt
from tests.helpers.families.families import FAMILIES as ALL
from tests.helpers.media.images import make_photo, png
from tests.helpers.media.prompts import POLICY, make, refusal
from tests.helpers.media.videos import FAMILIES, VIDEO, brightness_of, film, frames, sound, video_processor

pytestmark = pytest.mark.transformers

IS_X86 = platform.machine() == "x86_64"
FILMS = {name: film(container=name) for name in ("mp4", "mov", "webm", "matroska", "avi")}


@pytest.fixture(scope="module")
def qwen(qwen2_vl_folder: Path) -> Processor:
    return make(qwen2_vl_folder)


def ask(video: Any, **kwargs: Any) -> dict[str, Any]:
    return {"prompt": f"a {VIDEO} b", "multi_modal_data": {"video": video}, "mm_processor_kwargs": kwargs}


def refused_clip(data: bytes, **policy: Any) -> str:
    with pytest.raises(RequestError) as caught:
        probe_video(data, replace(POLICY, video=replace(POLICY.video, **policy)))
    return caught.value.message


def rules_of(name: str, tmp_path_factory: pytest.TempPathFactory) -> VideoRules:
    rules = video_rules_for(open_checkpoint(str(ALL[name].build(tmp_path_factory.mktemp(name)))))
    assert rules is not None
    return rules


@pytest.fixture(scope="module", params=FAMILIES)
def rules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[VideoRules, Any]:
    """Ours and Transformers' with the same settings."""
    ours, limits = rules_of(request.param, tmp_path_factory), {"shortest_edge": 4096, "longest_edge": 200_000}
    ours = replace(ours, min_pixels=limits["shortest_edge"], max_pixels=limits["longest_edge"])
    return ours, video_processor(request.param, size=limits)


# --- which frames -------------------------------------------------------------------------------------------------


@example(total=62, rate=62 / 7, fps=2.0)  # 14 frames; the eighth is 7 * 62 / 14 = 31 and no hair less
@given(total=st.integers(2, 5000), rate=st.floats(1, 120), fps=st.floats(0.1, 60))
def test_frames_are_chosen_as_in_transformers(
    rules: tuple[VideoRules, Any], total: int, rate: float, fps: float
) -> None:
    ours, theirs = rules
    expected = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=fps)
    found = ours.choose(total, rate, Sampling(fps, ours.max_frames)).tolist()
    assert found == inside(expected, total) or (not IS_X86 and is_tie(found, inside(expected, total), total))


@given(total=st.integers(4, 500), count=st.integers(2, 500))
def test_a_number_of_frames_is_spread_as_in_transformers(rules: tuple[VideoRules, Any], total: int, count: int) -> None:
    ours, theirs = rules
    count = min(count, total) // 2 * 2
    expected = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=24.0), num_frames=count)
    assert ours.choose(total, 24.0, Sampling(2.0, 768, count)).tolist() == inside(expected, total)


def is_tie(found: list[int], expected: list[int], total: int) -> bool:
    """Whether they differ only where a step ends at a frame exactly: PyTorch rounds it by the width of its vectors,
    and we round as on x86 on every machine, so that servers agree on what a video costs."""
    step = total / len(found)
    ends = [index * step for index in range(len(found))]
    near = [abs(end - round(end)) < 1e-6 * max(end, 1) for end in ends]
    pairs = zip(found, expected, near, strict=True)
    return all(ours == theirs or (is_near and abs(ours - theirs) == 1) for ours, theirs, is_near in pairs)


def inside(indices: Any, total: int) -> list[int]:
    """Where a step is rounded down, Transformers names one frame more than there are, and would fail on it."""
    return [index for index in indices.tolist() if index < total]


@given(total=st.integers(1, 300), rate=st.floats(0.5, 240), fps=st.floats(0.01, 100), maximum=st.integers(1, 50))
def test_no_more_frames_than_allowed_and_none_twice(
    rules: tuple[VideoRules, Any], total: int, rate: float, fps: float, maximum: int
) -> None:
    chosen = rules[0].choose(total, rate, Sampling(fps, maximum)).tolist()
    assert 1 <= len(chosen) <= max(maximum, 1)
    assert chosen == sorted(set(chosen)) and chosen[-1] < total


# --- what they cost -----------------------------------------------------------------------------------------------


@given(width=st.integers(8, 1500), height=st.integers(8, 1500), count=st.integers(2, 60))
def test_tokens_equal_transformers(rules: tuple[VideoRules, Any], width: int, height: int, count: int) -> None:
    ours, theirs = rules
    geometry = ours.geometry(Size(width, height), count, ours.limits(None))
    groups = -(-count // 2)
    assert geometry.grid.patches * groups == theirs.get_num_of_video_patches(count, height, width, {})


@given(width=st.integers(8, 1500), height=st.integers(8, 1500), count=st.integers(2, 60))
def test_tokens_with_a_share_per_frame_equal_transformers(
    rules: tuple[VideoRules, Any], width: int, height: int, count: int
) -> None:
    ours, theirs = rules
    capped = replace(ours, frame_tokens=theirs.max_video_tokens)
    geometry = capped.geometry(Size(width, height), count, capped.limits(None))
    theirs.cap_pixels_per_frame = True
    try:
        expected = theirs.get_num_of_video_patches(count, height, width, {})
    finally:
        theirs.cap_pixels_per_frame = None
    assert geometry.grid.patches * -(-count // 2) == expected


@given(
    width=st.integers(16, 3000),
    height=st.integers(16, 3000),
    count=st.integers(1, 60),
    maximum=st.integers(10_000, 900_000),
)
def test_no_group_has_more_tokens_than_the_largest(
    rules: tuple[VideoRules, Any], width: int, height: int, count: int, maximum: int
) -> None:
    ours, _ = rules
    limits = ours.limits(maximum)
    assert ours.geometry(Size(width, height), count, limits).tokens <= ours.largest(limits).tokens


def test_a_video_is_one_line_of_the_bill(qwen: Processor) -> None:
    image = {"image": make_photo(56, 56), "video": FILMS["mp4"]}
    prompt = qwen.from_prompt({"prompt": f"{VIDEO} and <|image_pad|>", "multi_modal_data": image})
    bill = qwen.bill(prompt, 16)
    video, still = bill.items
    assert (video.kind, video.frames, video.grid, video.tokens) == ("video", 4, (2, 4, 6), 12)
    assert (still.kind, still.frames, still.tokens) == ("image", 1, 4)
    assert (bill.video_tokens, bill.image_tokens) == (12, 4)
    assert bill.prompt_tokens == len(prompt)
    assert len(video.groups) == 2


def test_two_seconds_at_the_default_rate_are_four_frames(qwen: Processor) -> None:
    """20 frames at 10 a second, 2 taken of each: every fifth."""
    prompt = qwen.from_prompt(ask(FILMS["mp4"]))
    assert [item.stamps for item in prompt.items] == [(0, 5120), (10240, 15360)]


def test_files_are_counted_without_a_model_loaded(qwen2_vl_folder: Path, llava_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(FILMS["mp4"])
    for model in (None, str(qwen2_vl_folder)):
        (count,), errors = count_files([str(path)], Options(model=model))
        assert (count.width, count.height, count.tokens, errors) == (84, 56, 12, [])
    assert "takes no videos" in str(count_files([str(path)], Options(model=str(llava_folder)))[1][0])


# --- requests and policy ------------------------------------------------------------------------------------------


def test_a_request_may_ask_for_less_and_never_for_more(qwen2_vl_folder: Path) -> None:
    qwen = make(qwen2_vl_folder, video=replace(POLICY.video, fps=2.0, max_frames=8))
    film = FILMS["mp4"]
    assert qwen.from_prompt(ask(film, num_frames=2)).videos[0].frames == 2
    assert qwen.from_prompt(ask(film, fps=2.0, max_frames=2)).videos[0].frames == 2
    assert "at most 2 are taken here (video_fps)" in refusal(qwen, ask(film, fps=3)).message
    assert "from 1 to 8" in refusal(qwen, ask(film, num_frames=9)).message
    assert "from 1 to 8" in refusal(qwen, ask(film, max_frames=9)).message
    assert "either fps or num_frames" in refusal(qwen, ask(film, fps=1, num_frames=2)).message
    assert "above 0" in refusal(qwen, ask(film, fps=0)).message


def test_a_request_may_lower_the_pixels_of_its_videos(qwen: Processor) -> None:
    large = film(4, size=(224, 168))
    whole, small = qwen.from_prompt(ask(large)), qwen.from_prompt(ask(large, max_video_pixels=28 * 28 * 4))
    assert qwen.bill(small, 16).video_tokens < qwen.bill(whole, 16).video_tokens


def test_fewer_pixels_for_images_mean_fewer_for_frames(qwen2_vl_folder: Path) -> None:
    lowered = make(qwen2_vl_folder, max_pixels=28 * 28 * 4)
    assert lowered.from_prompt(ask(film(4, size=(224, 168)))).items[0].geometry.tokens <= 4
    largest = lowered.largest_item()
    assert largest is not None and largest.tokens <= 40  # a strip may have more than a square of as many pixels
    own = make(qwen2_vl_folder, max_pixels=28 * 28 * 4, video=replace(POLICY.video, max_pixels=28 * 28 * 40))
    assert own.from_prompt(ask(film(4, size=(224, 168)))).items[0].geometry.tokens > 16


def test_more_given_frames_than_allowed_are_refused(qwen2_vl_folder: Path) -> None:
    qwen = make(qwen2_vl_folder, video=replace(POLICY.video, max_frames=4))
    assert "5 frames, and at most 4" in refusal(qwen, ask(frames(5))).message
    assert qwen.from_prompt(ask(frames(5), num_frames=4)).videos[0].frames == 4


def test_more_videos_than_allowed_are_refused(qwen: Processor) -> None:
    two = {"prompt": VIDEO * 2, "multi_modal_data": {"video": [frames(2), frames(2)]}}
    assert "at most 1 videos" in refusal(qwen, two).message


def test_options_for_video_are_checked() -> None:
    with pytest.raises(ConfigError, match="video_fps"):
        Options(video_fps=0)
    assert options(mm_processor_kwargs={"fps": 1.5, "max_frames": 6}) == Options(video_fps=1.5, max_video_frames=6)
    policy = MediaPolicy.of(Options(video_fps=1.0, max_video_frames=9, max_video_seconds=5))
    assert policy.video == replace(VideoPolicy.of(Options()), fps=1.0, max_frames=9, max_seconds=5)


# --- forms a video may have ---------------------------------------------------------------------------------------


def same_groups(one: Prompt, other: Prompt) -> bool:
    return [item.key for item in one.items] == [item.key for item in other.items]


def test_a_path_and_its_bytes_are_the_same_video(qwen: Processor, tmp_path: Path) -> None:
    path = tmp_path / "a.webm"
    path.write_bytes(FILMS["mp4"])  # the name claims another format; only the bytes count
    assert same_groups(qwen.from_prompt(ask(path)), qwen.from_prompt(ask(FILMS["mp4"])))
    assert same_groups(qwen.from_prompt(ask(str(path))), qwen.from_prompt(ask(FILMS["mp4"])))


def test_an_array_and_its_frames_are_the_same_video(qwen: Processor) -> None:
    array = frames(4)
    assert same_groups(qwen.from_prompt(ask(array)), qwen.from_prompt(ask(list(array))))
    assert same_groups(qwen.from_prompt(ask(array)), qwen.from_prompt(ask([make_photo(84, 56, i) for i in range(4)])))


def test_compressed_frames_stay_compressed(qwen: Processor) -> None:
    stills = [png(make_photo(84, 56, i)) for i in range(3)]
    prompt = qwen.from_prompt(ask([stills]))
    assert [item.data for item in prompt.items] == [stills[0] + stills[1], stills[2]]


def test_frames_in_a_data_url_are_a_video(qwen: Processor) -> None:
    stills = [base64.b64encode(png(make_photo(84, 56, i))).decode() for i in range(3)]
    part = {"type": "video_url", "video_url": {"url": "data:video/png;base64," + ",".join(stills)}}
    prompt = qwen.from_chat([{"role": "user", "content": [part]}])
    assert prompt.videos[0].frames == 3


def test_a_chat_takes_videos_among_images(qwen: Processor) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(FILMS["mp4"]).decode()
    parts = [
        {"type": "image", "image": make_photo(56, 56)},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "image", "image": make_photo(84, 84)},
    ]
    prompt = qwen.from_chat([{"role": "user", "content": parts}])
    assert [item.kind for item in prompt.items] == ["image", "video", "video", "image"]
    image, video = (qwen.tokenizer.token_id(f"<|{kind}_pad|>") for kind in ("image", "video"))
    for span, token in zip(prompt.spans, (image, video, video, image), strict=True):
        assert prompt.token_ids[span.start : span.end] == [token] * span.length


# --- identity -----------------------------------------------------------------------------------------------------


def test_a_growing_list_of_frames_keeps_the_keys_of_its_whole_groups(qwen: Processor) -> None:
    array = frames(7)
    short, long = (qwen.from_prompt(ask(array[:count])) for count in (5, 7))
    assert [i.key for i in short.items[:2]] == [i.key for i in long.items[:2]]
    assert short.items[2].key != long.items[2].key


def test_equal_groups_at_other_times_share_embeddings_and_not_kv(qwen: Processor) -> None:
    still = np.repeat(frames(1), 4, axis=0)
    prompt = qwen.from_prompt(ask(still))
    first, second = prompt.spans
    assert first.key == second.key and prompt.items[0] is prompt.items[1]
    records = [prompt.identity[40 * span.start : 40 * span.end] for span in (first, second)]
    assert records[0] != records[1]


def test_the_key_depends_on_the_size_and_the_tenant(qwen: Processor) -> None:
    asked = ask(film(2, size=(224, 168)))
    small = {**asked, "mm_processor_kwargs": {"max_video_pixels": 5000}}
    prompts = [qwen.from_prompt(asked), qwen.from_prompt(small), qwen.from_prompt(asked, salt=b"t")]
    assert len({prompt.items[0].key for prompt in prompts}) == 3


# --- decoding -----------------------------------------------------------------------------------------------------


def brightnesses(item: MediaItem, readers: VideoReaders) -> list[int]:
    return [round(float(frame[40:, 50:].mean())) for frame in decode_item(item, readers)]


@pytest.mark.parametrize("container", FILMS)
def test_every_container_gives_the_frames_that_were_chosen(qwen: Processor, container: str) -> None:
    prompt = qwen.from_prompt(ask(FILMS[container], num_frames=20))
    readers = VideoReaders()
    found = [level for item in prompt.items for level in brightnesses(item, readers)]
    assert found == pytest.approx([brightness_of(i) for i in range(20)], abs=4)
    readers.close()


def test_groups_may_be_decoded_in_any_order(qwen: Processor) -> None:
    prompt, readers = qwen.from_prompt(ask(FILMS["mp4"], num_frames=20)), VideoReaders()
    for index in (7, 2, 3, 9, 0):
        expected = [brightness_of(2 * index), brightness_of(2 * index + 1)]
        assert brightnesses(prompt.items[index], readers) == pytest.approx(expected, abs=4)
    readers.close()


def test_frames_of_a_group_that_lie_minutes_apart_are_looked_for_by_key_frames(
    qwen: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 seconds in 20 frames with a key frame every 6: the way to either frame of a group is at most 6 long."""
    slow = film(20, stamps=[100 * i for i in range(20)])
    item = next(item for item in qwen.from_prompt(ask(slow, num_frames=2)).items)
    monkeypatch.setattr(video_reader, "_MAX_PIXELS", 7 * 84 * 56)
    assert brightnesses(item, VideoReaders()) == pytest.approx([brightness_of(0), brightness_of(10)], abs=4)


def test_a_video_with_too_few_key_frames_is_refused_before_an_engine_waits_for_long(
    qwen: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = qwen.from_prompt(ask(film(20, gop=20), num_frames=2)).items[0]
    assert len(decode_item(item, VideoReaders())) == 2
    monkeypatch.setattr(video_reader, "_MAX_PIXELS", 5 * 84 * 56)
    with pytest.raises(RequestError, match="more than 5 frames would have to be decoded"):
        decode_item(item, VideoReaders())


def test_an_odd_frame_stands_alone_in_its_group(qwen: Processor) -> None:
    prompt = qwen.from_prompt(ask(frames(3)))
    assert [decode_item(item, VideoReaders()).shape for item in prompt.items] == [(2, 56, 84, 3), (1, 56, 84, 3)]


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (180, (-1, -1)), (-90, (0, -1))])
def test_a_turned_video_is_shown_upright(qwen: Processor, rotation: int, corner: tuple[int, int]) -> None:
    """The dark corner of the stored frames is at the upper left; counter-clockwise it goes down first."""
    prompt = qwen.from_prompt(ask(film(4, rotation=rotation)))
    frame = decode_item(prompt.items[0], VideoReaders())[0]
    assert frame.shape[:2] == ((84, 56) if rotation % 180 else (56, 84))
    corners = {place: int(frame[place].mean()) for place in ((0, 0), (0, -1), (-1, 0), (-1, -1))}
    assert min(corners, key=corners.__getitem__) == corner


def test_a_variable_rate_counts_as_its_average(qwen: Processor) -> None:
    """Ten frames over 8.1 seconds: 1.2 a second, so all of them are fewer than 2 a second."""
    clip = probe_video(film(10, stamps=[i * i for i in range(10)]), POLICY)
    assert len(clip.stamps) == 10 and clip.rate < 2
    prompt = qwen.from_prompt(ask(film(10, stamps=[i * i for i in range(10)])))
    assert prompt.videos[0].frames == 10


# --- bad videos ---------------------------------------------------------------------------------------------------


def test_a_video_cut_short_is_refused_whatever_is_missing() -> None:
    """MP4 usually has its index at the end; with the index in front the missing frames are counted."""
    streamable = film(index_first=True)
    assert "its header says 20 frames and" in refused_clip(streamable[:-500])
    for name in ("mp4", "avi", "webm"):
        assert "damaged or cut short" in refused_clip(FILMS[name][:200])
    assert "damaged or cut short" in refused_clip(FILMS["mp4"][: len(FILMS["mp4"]) // 2])


@pytest.mark.parametrize("container", FILMS)
def test_damaged_bytes_lead_to_a_sentence_or_to_frames(qwen: Processor, container: str) -> None:
    generator = np.random.default_rng(7)
    for _ in range(40):
        data = bytearray(FILMS[container])
        for place in generator.integers(0, len(data), 8):
            data[place : place + 4] = generator.bytes(int(generator.integers(0, 9)))
        readers = VideoReaders()
        try:
            for item in qwen.from_prompt(ask(bytes(data))).items:
                assert decode_item(item, readers).ndim == 4
        except RequestError as error:
            assert "video" in error.message or "frames" in error.message or "moving pictures" in error.message
        readers.close()


def test_what_is_no_video_is_refused_by_its_bytes(qwen: Processor) -> None:
    assert "unknown format" in refused_clip(b"plain text, whatever its name says")
    assert "still picture" in refused_clip(b"\0\0\0\x1cftypavif" + bytes(100))
    assert "empty (0 bytes)" in refused_clip(b"")
    assert "no moving pictures, but audio" in refused_clip(sound())


def test_limits_are_named_with_their_values() -> None:
    data = FILMS["mp4"]
    assert f"{len(data)} bytes, and at most 100" in refused_clip(data, max_bytes=100)
    assert "lasts 2 s, and at most 1 s" in refused_clip(data, max_seconds=1)


def test_a_rate_or_a_length_beyond_reason_is_refused(qwen: Processor) -> None:
    """A rate that a client names decides positions and times: they must stay numbers."""
    for fps in (10**400, 1e300, float("inf"), float("nan"), -1.0, True, "2"):
        error = refusal(qwen, ask(frames(4), fps=fps))
        assert error.param == "mm_processor_kwargs.fps" and len(error.message) < 200
    for fps in (1e-300, 5e-324, 1e-9):
        assert "at most 3600 s" in refusal(qwen, ask(frames(4), fps=fps)).message


def test_frames_are_counted_before_one_is_looked_at(qwen: Processor) -> None:
    assert "20000 frames, and at most 10000" in refusal(qwen, ask("data:video/jpeg;base64," + "," * 19_999)).message
    assert "2000 frames, and at most 768" in refusal(qwen, ask("data:video/jpeg;base64," + "," * 1999)).message


def test_frames_that_are_not_taken_are_not_looked_at(qwen: Processor) -> None:
    good = png(make_photo(84, 56))
    assert qwen.from_prompt(ask([[good, b"bad", good, b"bad"]], num_frames=2)).videos[0].frames == 2


def test_compressed_frames_together_are_held_to_the_pixels_of_a_request(qwen2_vl_folder: Path) -> None:
    qwen = make(qwen2_vl_folder, max_request_pixels=3 * 84 * 56)
    compressed = [png(make_photo(84, 56, seed=i)) for i in range(4)]
    assert "4 frames of 84x56 have 18816 pixels, and at most 14112" in refusal(qwen, ask([compressed])).message
    assert qwen.from_prompt(ask([compressed[:3]])).videos[0].frames == 3
    assert qwen.from_prompt(ask(frames(4))).videos[0].frames == 4  # nothing is left to decode


def test_opening_a_file_decodes_no_frame_larger_than_expected() -> None:
    for name in ("webm", "avi"):
        for limit, width in ((84 * 56 - 1, 0), (1 << 20, 84)):
            with open_video(FILMS[name], {"webm": "matroska"}.get(name, name), limit) as opened:
                assert opened.streams.video[0].codec_context.width == width


def test_a_group_may_have_as_many_pixels_as_a_image(qwen2_vl_folder: Path) -> None:
    qwen = make(qwen2_vl_folder, max_image_pixels=9000)
    assert "2 frames of 84x56 have 9408 pixels, and at most 9000" in refusal(qwen, ask(FILMS["mp4"])).message


def test_frames_of_two_sizes_are_refused(qwen: Processor) -> None:
    mixed = [make_photo(84, 56), make_photo(56, 84)]
    assert "frame 1 is 84x56 and frame 2 is 56x84" in refusal(qwen, ask(mixed)).message


def test_no_frames_are_no_video(qwen: Processor) -> None:
    assert "no frames" in refusal(qwen, ask(np.zeros((0, 56, 84, 3), np.uint8))).message


@pytest.mark.parametrize("source", [5, np.zeros((4, 4), np.uint8), {"a": 1}, "http://x/a.mp4", "/no/such/file.mp4"])
def test_what_cannot_be_a_video_is_refused_with_its_place(qwen: Processor, source: Any) -> None:
    error = refusal(qwen, ask(source))
    assert error.param == "multi_modal_data.video" and "video" in error.message


def test_a_client_cannot_name_a_file(qwen: Processor, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(FILMS["mp4"])
    for kind in ("video", "video_url"):
        with pytest.raises(RequestError, match="data: URL"):
            qwen.from_chat([{"role": "user", "content": [{"type": kind, kind: str(path)}]}])


def test_without_pyav_a_file_is_refused_with_what_to_install(qwen: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install saccade[video]" in refusal(qwen, ask(FILMS["mp4"])).message
    assert qwen.from_prompt(ask(frames(2))).videos[0].frames == 2


def test_a_frame_that_cannot_be_decoded_is_this_videos_fault_alone(qwen: Processor) -> None:
    data = bytearray(FILMS["webm"])
    prompt = qwen.from_prompt(ask(bytes(data)))
    lie = replace(prompt.items[0], stamps=(10**9,))
    with pytest.raises(RequestError, match="cut short"):
        decode_item(lie, VideoReaders())
