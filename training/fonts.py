"""The fonts that text is drawn with: DejaVu where it is installed, and the font that Pillow carries."""

from __future__ import annotations

import importlib.util
import os
from functools import cache, lru_cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont

BUILT_IN = ""  # the name of Pillow's own font
WANTED = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
)


@cache
def font_names() -> tuple[str, ...]:
    """Paths of the fonts found, in a fixed order; Pillow's own comes first and is always there."""
    found = [
        next((str(f / f"{name}.ttf") for f in _folders() if (f / f"{name}.ttf").exists()), None) for name in WANTED
    ]
    return (BUILT_IN, *(path for path in found if path))


@lru_cache(maxsize=4096)
def font(name: str, size: int) -> Font:
    if name == BUILT_IN:
        built_in = ImageFont.load_default(size)
        assert isinstance(built_in, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
        return built_in
    return ImageFont.truetype(name, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1 << 16)
def advance(face: Font, char: str) -> float:
    """Pixels from a letter to the next; kerning is left out."""
    return face.getlength(char)


def _folders() -> list[Path]:
    folders = [Path(given) for given in os.environ.get("SACCADE_FONTS", "").split(os.pathsep) if given]
    folders += [Path("/usr/share/fonts/truetype/dejavu"), Path("/usr/share/fonts/dejavu-sans-fonts")]
    spec = importlib.util.find_spec("matplotlib")
    if spec and spec.origin:
        folders.append(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf")
    return folders
