"""Prices files of pictures and videos: what `saccade count` prints. Reads headers and the checkpoint's small files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from saccade import costs
from saccade.errors import RequestError
from saccade.media.load import load_image
from saccade.media.video_probe import is_video_file
from saccade.media.video_sources import Video
from saccade.options import MediaPolicy, Options
from saccade.processor.checkpoint import open_checkpoint
from saccade.processor.families import Family, default_family, default_video_rules, family_for, video_rules_for
from saccade.processor.families.base import ManyImagesPolicy
from saccade.processor.video import Videos, video_bill_item
from saccade.types import VideoRun


@dataclass(frozen=True, slots=True)
class Count:
    file: str
    width: int
    height: int
    resized_width: int
    resized_height: int
    tokens: int
    kv_blocks: int
    encoder_cache_bytes: int  # while answers look at it, in the checkpoint's own type; 0: it lies in KV blocks
    pruned: int = 0  # tokens of a video that are left out


def count_files(
    files: Sequence[str],
    model: str | None,
    min_pixels: int | None,
    max_pixels: int | None,
    video_pruning: float = 0.0,
    *,
    together: bool = False,
) -> tuple[list[Count], list[RequestError]]:
    """The bill of each file, alone or as one of a prompt with all of them, and an error for each that has none."""
    options = Options(min_pixels=min_pixels, max_pixels=max_pixels, video_pruning=video_pruning)  # checks them
    family, slot_bytes = _family(model)
    limits = family.policy(options.min_pixels, options.max_pixels)
    if together and isinstance(family, ManyImagesPolicy):
        limits = (limits[0], family.among(len(files), limits[1]))
    counts, errors = [], []
    for file in files:
        try:
            is_video = _is_video(file)
            counts.append(_video(file, model, options) if is_video else _count(file, family, limits, slot_bytes))
        except RequestError as error:
            errors.append(RequestError(f"{file}: {error.message}", code=error.code))
    return counts, errors


def _family(model: str | None) -> tuple[Family, int]:
    """The rules, and the bytes of one embedding."""
    if model is None:
        return default_family(), 0
    checkpoint = open_checkpoint(model, weights=False)
    config = checkpoint.config
    return family_for(config).from_checkpoint(checkpoint), costs.embedding_bytes_per_slot(config.text, config.dtype)


def _count(file: str, family: Family, limits: tuple[int, int], slot_bytes: int) -> Count:
    options = Options()
    size = load_image(Path(file), MediaPolicy.of(options)).header.size
    geometry = family.geometry(size, *limits)
    return Count(
        file=file,
        width=size.width,
        height=size.height,
        resized_width=geometry.resized.width,
        resized_height=geometry.resized.height,
        tokens=geometry.tokens,
        kv_blocks=costs.blocks_for(geometry.tokens, options.block_size),
        encoder_cache_bytes=geometry.slots * slot_bytes if family.expand(geometry).is_cross_attended else 0,
    )


def _is_video(file: str) -> bool:
    try:
        with open(file, "rb") as stream:
            return is_video_file(stream.read(64))
    except (OSError, ValueError):
        return False  # reading it as a picture says what is wrong


def _video(file: str, model: str | None, options: Options) -> Count:
    """With the frames that are taken where nobody asks for others."""
    rules = default_video_rules() if model is None else video_rules_for(open_checkpoint(model, weights=False))
    if rules is None:
        raise RequestError("this model takes no videos", code="unsupported")
    videos = Videos(rules, MediaPolicy.of(options), b"")
    groups = videos.resolve(Video(Path(file), file), videos.asked({}), b"")
    bill = video_bill_item(groups.items, VideoRun(0, len(groups.items), groups.frames, groups.key), options.block_size)
    sizes = (bill.width, bill.height, bill.resized_width, bill.resized_height)
    return Count(file, *sizes, bill.tokens, bill.kv_blocks, 0, bill.pruned)


def table(counts: Sequence[Count]) -> str:
    """Columns for people; the last line adds up when there is more than one picture."""
    rows: list[tuple[str, ...]] = [("file", "size", "resized", "tokens", "KV blocks", "pruned", "encoder cache")]
    for c in counts:
        sizes = (f"{c.width}x{c.height}", f"{c.resized_width}x{c.resized_height}")
        rows.append((c.file, *sizes, *_costs([c])))
    if len(counts) > 1:
        rows.append(("total", "", "", *_costs(counts)))
    is_shown = (*[True] * 5, any(c.pruned for c in counts), any(c.encoder_cache_bytes for c in counts))
    rows = [tuple(compress(row, is_shown)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(sum(is_shown))]
    return "\n".join("  ".join(_align(cell, widths[i], i) for i, cell in enumerate(row)).rstrip() for row in rows)


def _costs(counts: Sequence[Count]) -> tuple[str, ...]:
    names = ("tokens", "kv_blocks", "pruned", "encoder_cache_bytes")
    tokens, blocks, pruned, kept = (sum(getattr(c, name) for c in counts) for name in names)
    return f"{tokens:,}", f"{blocks:,}", f"{pruned:,}", f"{kept / 1e6:,.1f} MB"


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
