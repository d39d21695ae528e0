"""Families of the zoo answer about videos as Transformers does, or say why they read none."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from tests.helpers.conformance.video_list import READ, names_in
from tests.helpers.conformance.videos import compare, libraries
from tests.helpers.families.zoo import ZOO
from tests.helpers.families.zoo.videos import VIDEOS, VideoEntry, add_video
from tests.helpers.media.videos import film

pytestmark = pytest.mark.transformers
A_FEW = {
    "glm4v": "times between frames, RoPE positions on three axes",
    "internvl": "frames as pictures, with text between them",
}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
REFUSED = [name for name, video in VIDEOS.items() if video.refusal is not None]


def _case(name: str) -> object:
    return name if name in A_FEW else pytest.param(name, marks=pytest.mark.conformance)


@pytest.mark.parametrize("name", [_case(name) for name in READ])
def test_a_family_answers_about_videos_as_transformers_does(name: str, tmp_path: Path) -> None:
    result = compare(name, ZOO[name], VIDEOS[name], tmp_path)
    assert len(result.prompts) >= 3 and not result.differences


def test_the_page_lists_every_family_that_reads_videos() -> None:
    assert names_in(PAGE) == set(READ)


COMPRESSED = VIDEOS["video_llama_3"]._replace(
    settings={"size": {"shortest_edge": 3136, "longest_edge": 50_000}},
    refusal="how many tokens a video takes depends on what it shows",
)


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("name", "entry"), [("video_llama_3", COMPRESSED), *((name, VIDEOS[name]) for name in REFUSED)]
)
def test_a_family_that_reads_no_videos_says_why(name: str, entry: VideoEntry, tmp_path: Path) -> None:
    assert entry.refusal is not None
    with libraries(name, entry):
        add_video(entry, ZOO[name].build(tmp_path) and tmp_path)
        processor = Processor(open_checkpoint(str(tmp_path)), MediaPolicy.of(Options(model=str(tmp_path))))
        with pytest.raises(RequestError, match=entry.refusal):
            processor.from_prompt({"prompt": entry.video, "multi_modal_data": {"video": film(8)}})
        processor.close()
