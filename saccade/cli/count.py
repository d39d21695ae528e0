"""`saccade count`: the bill of images, videos and PDFs, from their headers. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from saccade import costs
from saccade.cli.option_flags import chosen_options
from saccade.errors import RequestError
from saccade.media.documents import Document, is_pdf, load_document
from saccade.media.load import load_image
from saccade.media.video_probe import is_video_file
from saccade.media.video_sources import Video
from saccade.options.engine import MediaPolicy, Options
from saccade.processor import families
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families.base import Family
from saccade.processor.images import ImageLimits, Images, limits_among, page_size
from saccade.processor.video import Videos, video_bill_item
from saccade.processor.whole_videos import WholeVideos, videos_for
from saccade.types.media import MediaItem, Size
from saccade.types.prompt import VideoRun
from saccade.util.plain_files import open_plain

_RULES = "counted by the rules of Qwen2-VL; --model names another, saccade-builtin the built-in one"


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


def add(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Print the bill of each picture, video and page. Loads no weights and decodes nothing."
    )
    command.epilog = "Example: saccade count --model Qwen/Qwen2-VL-2B-Instruct --max-pixels 1003520 *.jpg"
    add = command.add_argument
    add("files", nargs="+", metavar="FILE", help="pictures, videos and PDFs")
    add("--model", help="folder, hub id or saccade-builtin, whose rules apply; nothing: those of Qwen2-VL")
    add("--min-pixels", type=int, help="smaller pictures are enlarged to this")
    add("--max-pixels", type=int, help="larger pictures are reduced to this, frames of videos too")
    add("--video-pruning", type=float, default=0.0, help="share of static video tokens to drop")
    add("--together", action="store_true", help="as one prompt: some models shrink many images")
    add("--json", action="store_true", help="print a JSON list instead of a table")
    add("--debug", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Unreadable files are reported on stderr and make the exit status 1."""
    options = Options(**chosen_options(args, Options))  # checks the values
    rows, errors = count_files(args.files, options, together=args.together)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        if args.model is None:
            rules = (
                "counted by the rules of Qwen2-VL; --model names another, saccade-builtin the built-in one"
            )
            print(f"saccade: {rules}", file=sys.stderr)
        print(table(rows))
    for error in errors:
        print(f"saccade: {error}", file=sys.stderr)
    return int(bool(errors))


def count_files(
    files: Sequence[str], options: Options, *, together: bool = False
) -> tuple[list[Count], list[RequestError]]:
    """The bill of each file, and an error for each that has none. `together`: all files are in one prompt."""
    family, slot_bytes = _family(options.model)
    limits = ImageLimits(*family.policy(options.min_pixels, options.max_pixels))
    policy = MediaPolicy.of(options)
    documents, errors = _documents(files, policy)
    if together:
        num_images = sum(len(documents[file].pages) if file in documents else 1 for file in files)
        limits = limits_among(family, limits, num_images)
    prices = _Prices(family, limits, slot_bytes)
    counts: list[Count] = []
    for file in files:
        try:
            if file in documents:
                counts += _count_pages(file, documents[file], prices, policy)
            elif file not in errors:
                counts.append(_count_file(file, options, prices))
        except RequestError as error:
            errors[file] = error
    problems = [RequestError(f"{file}: {error.message}", code=error.code) for file, error in errors.items()]
    return counts, problems


def _documents(
    files: Sequence[str], policy: MediaPolicy
) -> tuple[dict[str, Document], dict[str, RequestError]]:
    """The PDFs among the files, and what is wrong with some."""
    documents = {}
    errors = {}
    for file in files:
        if not is_pdf(_start(file)):
            continue
        try:
            documents[file] = load_document(Path(file), policy)
        except RequestError as error:
            errors[file] = error
    return documents, errors


def _family(model: str | None) -> tuple[Family, int]:
    """The family of the model, and the bytes of one embedding."""
    if model is None:
        return families.default_family(), 0
    checkpoint = open_checkpoint(model, weights=False, on_paper=True)
    config = checkpoint.config
    family = families.family_for(config).from_checkpoint(checkpoint)
    return family, costs.embedding_bytes_per_slot(config.text, config.dtype)


class _Prices(NamedTuple):
    """What an image of a size costs."""

    family: Family
    limits: ImageLimits
    slot_bytes: int

    def of(self, file: str, size: Size) -> Count:
        geometry = self.family.geometry(size, self.limits.min_pixels, self.limits.max_pixels)
        is_kept = self.family.expand(geometry).is_cross_attended
        return Count(
            file=file,
            width=size.width,
            height=size.height,
            resized_width=geometry.resized.width,
            resized_height=geometry.resized.height,
            tokens=geometry.tokens,
            kv_blocks=costs.blocks_for(geometry.tokens, Options().block_size),
            encoder_cache_bytes=geometry.slots * self.slot_bytes if is_kept else 0,
        )


def _count_file(file: str, options: Options, prices: _Prices) -> Count:
    if is_video_file(_start(file)):
        return _count_video(file, options)
    return prices.of(file, load_image(Path(file), MediaPolicy.of(Options())).header.size)


def _count_pages(file: str, document: Document, prices: _Prices, policy: MediaPolicy) -> list[Count]:
    """The bill of each page, named as browsers do. The size is that of the rendered page."""
    sizes = [page_size(page, prices.family, policy, prices.limits) for page in document.pages]
    return [prices.of(f"{file}#page={number}", size) for number, size in enumerate(sizes, 1)]


def _start(file: str) -> bytes:
    try:
        with open_plain(file) as stream:
            return stream.read(1024)
    except OSError:
        return b""  # reading it as an image reports the error


def _count_video(file: str, options: Options) -> Count:
    """The bill with the default frames."""
    items, run = _video_items(Video(Path(file), file), options)
    bill = video_bill_item(items, run, options.block_size)
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


def _video_items(video: Video, options: Options) -> tuple[Sequence[MediaItem], VideoRun]:
    policy = MediaPolicy.of(options)
    videos: Videos | WholeVideos | None = Videos(families.default_video_rules(), policy, b"")
    if options.model is not None:
        checkpoint = open_checkpoint(options.model, weights=False)
        videos = videos_for(checkpoint, policy, Images(checkpoint, policy))
    if videos is None:
        raise RequestError("this model takes no videos", code="unsupported")
    if isinstance(videos, WholeVideos):
        item = videos.resolve(video, videos.options({}), b"")
        return (item,), VideoRun(0, 1, item.num_frames, item.key)
    groups = videos.resolve(video, videos.options({}), b"")
    return groups.items, VideoRun(0, len(groups.items), groups.frames, groups.key)


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
