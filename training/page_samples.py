"""Draws the samples that the page at `/` and the examples show: `python -m training.page_samples`.

They are files, since print and videos come out differently in each browser. All is drawn here, under our licence.
"""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from random import Random

import av
from PIL import Image, ImageDraw

from training.fonts import Font, font, font_names
from training.palette import COLORS
from training.textures import landscape

ROOT = Path(__file__).parents[1]
PAGE, EXAMPLES = ROOT / "saccade" / "server" / "static", ROOT / "examples"
RECEIPT, CLIP, LANDSCAPE = "receipt.png", "clip.webm", "landscape.jpg"
LINES = (("Date", "2026-05-14"), ("Bread", "2.40"), ("Milk", "1.15"), ("Honey", "6.90"), ("Total", "10.45"))
_PAPER, _INK = (252, 251, 246), (24, 24, 32)
_FRAMES, _FRAMES_PER_SECOND = 8, 2
_FINER = 4  # shapes are drawn so many times as large, for smooth edges
_SEED = 1365  # of a landscape in colours that could be real


def draw_receipt() -> Image.Image:
    wide, high, margin = 224, 176, 8
    image = Image.new("RGB", (wide, high), _PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((wide / 2, 10), "Corner Shop", _INK, _face("DejaVuSans-Bold", 20), anchor="ma")
    face, y = _face("DejaVuSans", 16), 38
    for name, value in LINES:
        pen.text((margin, y), name, _INK, face)
        pen.text((wide - margin, y), value, _INK, face, anchor="ra")
        y += 26
    return image


def draw_frames() -> list[Image.Image]:
    """A red circle that goes to the right, above a blue square that stays."""
    frames = []
    for index in range(_FRAMES):
        image = Image.new("RGB", (192 * _FINER, 160 * _FINER), "white")
        pen = ImageDraw.Draw(image)
        pen.rectangle(_box(140, 122, 24), COLORS["blue"])
        pen.ellipse(_box(34 + index * 124 / (_FRAMES - 1), 48, 26), COLORS["red"])
        frames.append(image.resize((192, 160), Image.Resampling.LANCZOS))
    return frames


def draw_landscape() -> Image.Image:
    return landscape(Random(f"page/{_SEED}"), (256, 192))


def write(folder: Path) -> None:
    """All samples into a folder."""
    draw_receipt().save(folder / RECEIPT, optimize=True)
    draw_landscape().save(folder / LANDSCAPE, quality=80)
    _write_video(folder / CLIP, draw_frames())


def _face(name: str, size: int) -> Font:
    return font(next((path for path in font_names() if Path(path).stem == name), ""), size)


def _box(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    left, top, right, bottom = (_FINER * side for side in (x - radius, y - radius, x + radius, y + radius))
    return left, top, right, bottom


def _write_video(path: Path, frames: list[Image.Image]) -> None:
    with av.open(str(path), "w", container_options={"fflags": "+bitexact"}) as container:  # no random ids
        stream = container.add_stream("libvpx-vp9", rate=Fraction(_FRAMES_PER_SECOND))
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "20", "b": "0", "threads": "1"}
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


if __name__ == "__main__":
    write(PAGE)
    for name in (RECEIPT, CLIP):
        shutil.copy(PAGE / name, EXAMPLES)
