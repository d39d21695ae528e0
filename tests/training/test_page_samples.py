"""What the page and the examples show is small, can be read, and is drawn by one script."""

from __future__ import annotations

from pathlib import Path

import av
from PIL import Image

from training.page_samples import CLIP, EXAMPLES, LANDSCAPE, PAGE, RECEIPT, draw_frames, write

MOST_BYTES = 16_000  # each, in the wheel


def test_the_samples_are_in_the_package_and_small() -> None:
    assert all(0 < (PAGE / name).stat().st_size < MOST_BYTES for name in (RECEIPT, CLIP, LANDSCAPE))


def test_the_examples_show_what_the_page_shows() -> None:
    for name in (RECEIPT, CLIP):
        assert (EXAMPLES / name).read_bytes() == (PAGE / name).read_bytes()


def test_the_script_draws_samples_of_the_same_sizes(tmp_path: Path) -> None:
    write(tmp_path)
    for name in (RECEIPT, LANDSCAPE):
        with Image.open(tmp_path / name) as new, Image.open(PAGE / name) as old:
            assert new.size == old.size
    assert frames(tmp_path) == frames(PAGE) == [(192, 160)] * len(draw_frames())


def frames(folder: Path) -> list[tuple[int, int]]:
    with av.open(str(folder / CLIP)) as container:
        return [(frame.width, frame.height) for frame in container.decode(video=0)]
