"""Videos of a model that runs through Transformers' code: what is counted, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.checkpoint import hf_video
from saccade.cli.count import count_files
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.types.prompt import Prompt
from tests.helpers.families import family_fallback
from tests.helpers.families.zoo import stand_in_videos
from tests.helpers.families.zoo.videos import VIDEOS, add_video
from tests.helpers.media.videos import film, frames

pytestmark = pytest.mark.transformers
FRAME = len("Frame1: ") + 6 + 1  # tokens of a frame: its number by letters, two marks around four, a line's end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = family_fallback.internvl(tmp_path_factory.mktemp("internvl"))
    add_video(VIDEOS["internvl"], made)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> Iterator[Processor]:
    with stand_in_videos.provided("InternVLVideoProcessor"):
        made = processor_of(folder)
        yield made
        made.close()


def processor_of(folder: Path, **options: Any) -> Processor:
    return Processor(open_checkpoint(str(folder)), MediaPolicy.of(Options(model=str(folder), **options)))


def asked(video: Any, **kwargs: Any) -> dict[str, Any]:
    return {"prompt": "<video> a", "multi_modal_data": {"video": video}, "mm_processor_kwargs": kwargs or None}


def tokens(prompt: Prompt) -> int:
    (span,) = prompt.spans
    return span.length


def test_frames_of_a_file_are_taken_at_the_rate_of_the_deployment(processor: Processor) -> None:
    prompt = processor.from_prompt(asked(film(20, fps=10)))  # two seconds
    assert prompt.items[0].num_frames == 4 and tokens(prompt) == 4 * FRAME - 1
    assert prompt.items[0].geometry.clip is not None and prompt.items[0].geometry.clip.indices == (2, 7, 12, 17)


def test_a_request_takes_fewer_frames(processor: Processor) -> None:
    slow = processor.from_prompt(asked(film(20, fps=10), fps=1))
    two = processor.from_prompt(asked(film(20, fps=10), num_frames=2))
    assert tokens(slow) == tokens(two) == 2 * FRAME - 1
    with pytest.raises(RequestError, match=r"fps is 4, but at most 2 are taken here \(video_fps\)"):
        processor.from_prompt(asked(film(20, fps=10), fps=4))


def test_all_frames_of_a_list_are_taken(processor: Processor) -> None:
    assert tokens(processor.from_prompt(asked(frames(5)))) == 5 * FRAME - 1


def test_a_video_is_one_item_of_the_bill(processor: Processor) -> None:
    bill = processor.bill(processor.from_prompt(asked(film(20, fps=10))), 16)
    (item,) = bill.items
    assert (item.kind, item.frames, item.tokens, bill.video_tokens) == ("video", 4, 4 * FRAME - 1, 4 * FRAME - 1)


def test_equal_videos_have_one_key_and_others_their_own(processor: Processor) -> None:
    def key(video: Any, **kwargs: Any) -> bytes:
        return processor.from_prompt(asked(video, **kwargs)).items[0].key

    clip = film(20, fps=10)
    assert key(clip) == key(bytes(clip)) != key(clip, num_frames=2)
    assert key(frames(4)) == key(frames(4)) != key(frames(4, seed=1))


def test_more_frames_than_allowed_are_refused_with_both_numbers(folder: Path) -> None:
    with stand_in_videos.provided("InternVLVideoProcessor"):
        processor = processor_of(folder, max_video_frames=3)
        with pytest.raises(RequestError, match=r"4 frames .* at most 3 are allowed \(max_video_frames\)"):
            processor.from_prompt(asked(film(20, fps=10)))
        processor.close()


def test_frames_of_more_pixels_than_a_request_may_have_are_refused(folder: Path) -> None:
    with stand_in_videos.provided("InternVLVideoProcessor"):
        processor = processor_of(folder, max_request_pixels=10_000)
        with pytest.raises(RequestError, match=r"18816 pixels, and at most 10000 are allowed .*max_request_pixels"):
            processor.from_prompt(asked(film(20, fps=10)))
        processor.close()


def test_what_its_own_processor_chooses_cannot_be_asked_for(processor: Processor) -> None:
    with pytest.raises(RequestError, match="video_pruning must be left out"):
        processor.from_prompt(asked(film(8), video_pruning=0.5))


def test_without_torchvision_pictures_are_served_and_a_video_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoVideoProcessor", None, raising=False)
    monkeypatch.setattr(hf_video, "find_spec", lambda name: None)
    processor = processor_of(folder)
    with pytest.raises(RequestError, match=r"needs torchvision, .* \(pip install torchvision\); send pictures"):
        processor.from_prompt(asked(film(8)))
    assert processor.takes_images
    processor.close()


def test_a_model_without_videos_says_so(tmp_path: Path) -> None:
    processor = processor_of(family_fallback.deepseek_vl(tmp_path))
    with pytest.raises(RequestError, match="this model takes no videos; send pictures"):
        processor.from_prompt({"prompt": "a", "multi_modal_data": {"video": film(8)}})
    processor.close()


def test_a_file_is_priced_without_a_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "film.mp4"
    file.write_bytes(film(20, fps=10))
    with stand_in_videos.provided("InternVLVideoProcessor"):
        ((priced,), errors) = count_files([str(file)], Options(model=str(folder)))
    assert not errors and priced.tokens == 4 * FRAME - 1
