"""`saccade count`: the bill of image and video files, from their headers. Loads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade import costs
from saccade.errors import RequestError
from saccade.media.load import load_image
from saccade.media.video_probe import is_video_file
from saccade.media.video_sources import Video
from saccade.options import MediaPolicy, Options
from saccade.processor import families
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families.base import Family
from saccade.processor.images import Limits, limits_among
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
    encoder_cache_bytes: int  # with cross-attention, in the checkpoint's dtype; otherwise 0
    pruned: int = 0  # tokens of a video


def count_files(
    files: Sequence[str], options: Options, *, together: bool = False
) -> tuple[list[Count], list[RequestError]]:
    """The bill of each file, and an error for each that has none. `together`: all files are in one prompt."""
    family, slot_bytes = _family(options.model)
    limits = Limits(*family.policy(options.min_pixels, options.max_pixels))
    if together:
        limits = limits_among(family, limits, len(files))
    counts = []
    errors = []
    for file in files:
        try:
            if _is_video(file):
                counts.append(_count_video(file, options))
            else:
                counts.append(_count_image(file, family, limits, slot_bytes))
        except RequestError as error:
            errors.append(RequestError(f"{file}: {error.message}", code=error.code))
    return counts, errors


def _family(model: str | None) -> tuple[Family, int]:
    """The family of the model, and the bytes of one embedding."""
    if model is None:
        return families.default_family(), 0
    checkpoint = open_checkpoint(model, weights=False)
    config = checkpoint.config
    family = families.family_for(config).from_checkpoint(checkpoint)
    return family, costs.embedding_bytes_per_slot(config.text, config.dtype)


def _count_image(file: str, family: Family, limits: Limits, slot_bytes: int) -> Count:
    options = Options()
    size = load_image(Path(file), MediaPolicy.of(options)).header.size
    geometry = family.geometry(size, limits.min_pixels, limits.max_pixels)
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
        return False  # reading it as an image reports the error


def _count_video(file: str, options: Options) -> Count:
    """With the default frames."""
    checkpoint = open_checkpoint(options.model, weights=False) if options.model is not None else None
    rules = families.video_rules_for(checkpoint) if checkpoint else families.default_video_rules()
    if rules is None:
        raise RequestError("this model takes no videos", code="unsupported")
    videos = Videos(rules, MediaPolicy.of(options), b"")
    groups = videos.resolve(Video(Path(file), file), videos.options({}), b"")
    run = VideoRun(0, len(groups.items), groups.frames, groups.key)
    bill = video_bill_item(groups.items, run, options.block_size)
    return Count(
        file=file,
        width=bill.width,
        height=bill.height,
        resized_width=bill.resized_width,
        resized_height=bill.resized_height,
        tokens=bill.tokens,
        kv_blocks=bill.kv_blocks,
        encoder_cache_bytes=0,
        pruned=bill.pruned,
    )


def table(counts: Sequence[Count]) -> str:
    """Columns for people. The last line is a total if there is more than one file."""
    rows = list(counts)
    if len(counts) > 1:
        summed = ("tokens", "kv_blocks", "encoder_cache_bytes", "pruned")
        sums = [sum(getattr(count, name) for count in counts) for name in summed]
        rows.append(Count("total", 0, 0, 0, 0, *sums))
    columns = {
        "file": [row.file for row in rows],
        "size": [_size(row.width, row.height) for row in rows],
        "resized": [_size(row.resized_width, row.resized_height) for row in rows],
        "tokens": [f"{row.tokens:,}" for row in rows],
        "KV blocks": [f"{row.kv_blocks:,}" for row in rows],
    }
    if any(row.pruned for row in rows):
        columns["pruned"] = [f"{row.pruned:,}" for row in rows]
    if any(row.encoder_cache_bytes for row in rows):
        columns["encoder cache"] = [f"{row.encoder_cache_bytes / 1e6:,.1f} MB" for row in rows]
    aligned = []
    for title, cells in columns.items():
        width = max(map(len, [title, *cells]))
        align = str.ljust if title == "file" else str.rjust
        aligned.append([align(cell, width) for cell in [title, *cells]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def _size(width: int, height: int) -> str:
    return f"{width}x{height}" if width else ""
