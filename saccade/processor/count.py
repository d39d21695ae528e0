"""Prices picture files: what `saccade count` prints. Reads headers and the checkpoint's small files, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade import costs
from saccade.config import MediaPolicy, Options
from saccade.processor.checkpoint import open_checkpoint
from saccade.processor.families import Family, default_family, family_for
from saccade.processor.media import load_image
from saccade.types import RequestError


@dataclass(frozen=True, slots=True)
class Count:
    file: str
    width: int
    height: int
    resized_width: int
    resized_height: int
    tokens: int
    kv_blocks: int


def count_files(
    files: Sequence[str], model: str | None, min_pixels: int | None, max_pixels: int | None
) -> tuple[list[Count], list[RequestError]]:
    """The bill of each file, and an error for each that has none."""
    options = Options(min_pixels=min_pixels, max_pixels=max_pixels)  # checks them
    family = _family(model)
    limits = family.policy(options.min_pixels, options.max_pixels)
    counts, errors = [], []
    for file in files:
        try:
            counts.append(_count(file, family, limits))
        except RequestError as error:
            errors.append(RequestError(f"{file}: {error.message}", code=error.code))
    return counts, errors


def _family(model: str | None) -> Family:
    if model is None:
        return default_family()
    checkpoint = open_checkpoint(model, weights=False)
    return family_for(checkpoint.config).from_checkpoint(checkpoint)


def _count(file: str, family: Family, limits: tuple[int, int]) -> Count:
    options = Options()
    policy = MediaPolicy({}, None, None, options.max_image_bytes, options.max_image_pixels)
    size = load_image(Path(file), policy).header.size
    geometry = family.geometry(size, *limits)
    return Count(
        file=file,
        width=size.width,
        height=size.height,
        resized_width=geometry.resized.width,
        resized_height=geometry.resized.height,
        tokens=geometry.tokens,
        kv_blocks=costs.blocks_for(geometry.tokens, options.block_size),
    )


def table(counts: Sequence[Count]) -> str:
    """Columns for people; the last line adds up when there is more than one picture."""
    rows = [("file", "size", "resized", "tokens", "KV blocks")]
    for c in counts:
        sizes = (f"{c.width}x{c.height}", f"{c.resized_width}x{c.resized_height}")
        rows.append((c.file, *sizes, f"{c.tokens:,}", f"{c.kv_blocks:,}"))
    if len(counts) > 1:
        rows.append(("total", "", "", f"{sum(c.tokens for c in counts):,}", f"{sum(c.kv_blocks for c in counts):,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(_align(cell, widths[i], i) for i, cell in enumerate(row)).rstrip() for row in rows)


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
