"""What a picture costs in a model that runs through Transformers, without torch: `counting_table.json`.

    size ──cut──► tiles and an overview ──layout──► runs of tokens, and the text before each

A row says which image processor a model type has, how many tokens stand for a tile and what is around.
Settings are those of the checkpoint's files; a row has the defaults of Transformers' class.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from saccade.checkpoint.layouts import processor_settings
from saccade.errors import ConfigError, RequestError
from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.processor.families.counting import CUTS, MERGES, Cut, Settings, frames_of, refused, unpadded
from saccade.processor.families.qwen2_vl import fit, pixel_limits
from saccade.types.media import Size

TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("counting_table.json").read_text("utf-8"))
_MARK = re.compile(r"<[^<>\n]+>|\n+|[^<\n]+")
_ORDINARY = Size(512, 384)
_KEPT = 4096  # sizes
_MAX_TILES = 1000
_TILES = ("dynamic_hd", "max_patches", "max_slice_nums", "max_tiles")  # settings
MAX_PIXELS = 25_000_000
"""Of a picture: where no rule counts, a blank one of its size does."""


class Run(NamedTuple):
    text: str  # before the tokens
    tokens: int


class RuledImage(NamedTuple):
    """What a size becomes."""

    resized: Size
    area: int  # pixels that the tower reads
    runs: tuple[Run, ...]
    end: str  # text after the last run

    @property
    def texts(self) -> tuple[str, ...]:
        return (*(run.text for run in self.runs), self.end)


class Rule:
    """Of one checkpoint. ConfigError, in a sentence, if the table does not know its settings."""

    def __init__(self, files: Files) -> None:
        kind = files.config.model_type
        self.row = _row("models", kind)
        settings = dict(processor_settings(files.path) or files.processor)
        images = settings.pop("image_processor", None) or files.image_processor
        whole_name = str(images.get("image_processor_type") or self.row["images"])
        name = whole_name.removesuffix("Fast").removesuffix("Pil")
        if name not in TABLE["image_processors"]:
            raise ConfigError(f"image processor {whole_name!r} has no counting rule (model_type {kind!r})")
        processors = self.row.get("processors", ())
        if processors and (other := settings.get("processor_class", processors[0])) not in processors:
            raise ConfigError(f"processor {other!r} has no counting rule (model_type {kind!r})")
        self.images = _image_settings(_row("image_processors", name), images, self.row.get("fixed", {}))
        changes = {name: value for name, value in settings.items() if name in self.row and value is not None}
        self.settings = {**self.images, **self.row, **changes}
        self._cut = CUTS[self.images["cut"]]
        self._made = lru_cache(_KEPT)(self._image_of)
        try:
            self(_ORDINARY)
        except (LookupError, TypeError, AttributeError) as error:
            reason = f"the image processor's settings are not those that {name} has ({error!r})"
            raise ConfigError(f"{reason}; download preprocessor_config.json again") from None

    def __call__(self, size: Size) -> RuledImage:
        """RequestError for a size that the model's own processor does not take."""
        base.check_aspect_ratio(size)
        try:
            return self._made(size)
        except (ArithmeticError, ValueError):
            raise refused(size) from None

    @cached_property
    def side(self) -> int:
        """Pixels along one side of the square that becomes one token."""
        return math.prod(_number(self.settings, name) for name in self.settings["side"])

    @property
    def patch_size(self) -> int | None:
        return self.images["patch_size"] if self.images["cut"] == "rounded" else None

    @property
    def limits(self) -> tuple[int, int] | None:
        """Of pixels, where the processor keeps to such; for one frame."""
        if self.images["cut"] != "rounded":
            return None
        frames = frames_of(self.images)
        return -(-self.images["min_pixels"] // frames), self.images["max_pixels"] // frames

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The deployment's limits within the processor's own."""
        if self.limits is None:
            return 1, MAX_PIXELS
        lowest, highest = self.limits
        low, high = base.limits(min_pixels, max_pixels, lowest, highest)
        if high < lowest or low > highest:
            limits = f"this model's image processor makes {lowest} to {highest} pixels of a picture"
            raise ConfigError(f"{limits}, and {low} to {high} are asked for; change the limits")
        return max(low, lowest), min(high, highest)

    def limited(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        """What a picture is resized to before the processor sees it: itself within the limits."""
        if self.limits is None:
            return size
        lowest, highest = self.limits
        resized = self(size).resized
        if (lowest, highest) == (min_pixels, max_pixels):
            return size
        if min_pixels <= resized.width * resized.height <= max_pixels:
            return size
        return fit(size, self.side, max(lowest, min_pixels), min(highest, max_pixels))

    def _image_of(self, size: Size) -> RuledImage:
        cut = self._cut(size, self.images)
        if cut.columns * cut.rows > _MAX_TILES:
            raise refused(size)
        if total := self.settings.get("total"):
            return RuledImage(cut.resized, cut.area, (Run("", _TOTALS[total](self, cut, size)),), "")
        layout = dict(self.settings)
        if cut.overview is None:
            layout |= layout.get("single", {})
        return RuledImage(cut.resized, cut.area, *_joined(self._pieces(layout, cut)))

    def _pieces(self, layout: Settings, cut: Cut) -> Iterator[str | int]:
        def text(name: str, **numbers: int) -> str:
            words = str(layout.get(name, ""))
            for place, number in numbers.items():
                words = words.replace(f"{{{place}}}", str(number))
            return words

        each = self.tokens(cut.tile)
        whole: list[str | int] = []
        if cut.overview is not None:
            whole = [text("overview"), self.tokens(cut.overview), text("overview_end")]
        yield text("start")
        if layout.get("overview_first"):
            yield from whole
            whole = []
        for row in range(1, cut.rows + 1):
            for column in range(1, cut.columns + 1):
                number = (row - 1) * cut.columns + column
                yield from (text("tile", row=row, column=column, number=number), each, text("tile_end"))
                if column < cut.columns:
                    yield text("between")
            if row < cut.rows + int(layout.get("ends_last_row", False)):
                yield text("row_end")
        yield from (*whole, text("end"))

    def tokens(self, size: Size) -> int:
        settings = self.settings
        if name := settings.get("each"):
            return int(int(settings[name]) ** int(settings.get("power", 1)))
        if name := settings.get("whole"):
            size = Size(settings[name], settings[name])
        return math.prod(length // self.side for length in size)


def _joined(pieces: Iterator[str | int]) -> tuple[tuple[Run, ...], str]:
    """Runs that nothing stands between are one."""
    runs: list[Run] = []
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        elif runs and not text:
            runs[-1] = Run(runs[-1].text, runs[-1].tokens + piece)
        else:
            runs.append(Run(text, piece))
            text = ""
    return tuple(runs), text


def _with_line_ends(rule: Rule, cut: Cut, size: Size) -> int:
    return cut.tile.height // rule.side * (cut.tile.width // rule.side + 1) + 2


def _and_separator(rule: Rule, cut: Cut, size: Size) -> int:
    if cut.overview is None:
        return rule.tokens(cut.tile) + 1
    return rule.tokens(cut.overview) + cut.columns * cut.rows * rule.tokens(cut.tile) + 1


def _in_lines(rule: Rule, cut: Cut, size: Size) -> int:
    """The overview, then the lines of all tiles."""
    overview = (cut.overview or cut.tile).width // rule.side
    tokens = overview * (overview + 1) + 1
    if cut.overview:
        side = cut.tile.width // rule.side
        tokens += cut.rows * side * (cut.columns * side + 1)
    return tokens


def _without_padding(rule: Rule, cut: Cut, size: Size) -> int:
    """The overview, every second patch of the crops that shows the picture, and ends of lines."""
    patch = int(rule.images["patch_size"])
    shown = unpadded(size, cut.resized)
    lengths = zip(cut.resized, shown, strict=True)
    columns, rows = ((whole // patch - (whole - part) // patch + 1) // 2 for whole, part in lengths)
    return 256 + 1 + columns * rows + rows + 16


_TOTALS: Mapping[str, Callable[[Rule, Cut, Size], int]] = {
    "and_separator": _and_separator,
    "in_lines": _in_lines,
    "with_line_ends": _with_line_ends,
    "without_padding": _without_padding,
}


def has_rule(model_type: str) -> bool:
    return model_type in TABLE["models"]


def marks_in(text: str) -> list[str]:
    """A text around pictures in pieces, of which those in angle brackets are one token each."""
    return _MARK.findall(text)


def rule_of(files: Files) -> Rule | None:
    """None: the table has no such model, or does not know its settings."""
    if not has_rule(files.config.model_type):
        return None
    try:
        return Rule(files)
    except (ConfigError, RequestError):
        return None


def _row(part: str, name: str) -> dict[str, Any]:
    row = dict(TABLE[part][name])
    like = row.pop("like", None)
    return row if like is None else {**_row(part, like), **row}


def _image_settings(row: Settings, settings: Settings, fixed: Settings) -> dict[str, Any]:
    """Of the checkpoint's files, but for what the whole processor asks its image processor for."""
    merged = {**row, **{name: value for name, value in settings.items() if value is not None}, **fixed}
    for name, values in row.get("known", {}).items():
        if (value := merged.get(name, values[0])) not in values:
            raise ConfigError(f"the image processor says {name}={value}, for which there is no counting rule")
    for name in _TILES:
        if row["cut"] != "padded" and isinstance(tiles := merged.get(name), int) and tiles > _MAX_TILES:
            raise ConfigError(
                f"the image processor says {name}={tiles}, and at most {_MAX_TILES} are counted"
            )
    if settings.get("do_resize") is False:
        raise ConfigError("the image processor says do_resize=false, for which there is no counting rule")
    if row["cut"] == "rounded":
        limits = pixel_limits(settings, row["min_pixels"], row["max_pixels"])
        merged["min_pixels"], merged["max_pixels"] = limits
    return merged


def _number(settings: Settings, name: str) -> int:
    """A setting, or `1/` one that is a share."""
    if name.startswith("1/"):
        return round(1 / float(settings[name[2:]]))
    value = settings[name]
    return int(MERGES.get(value) or value)
