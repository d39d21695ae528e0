"""Phone photos (12 megapixels) on the CPU: decoded whole, then resized; resized while decoded; at a lower scale.

Ratios within one run: the three ways take turns, and a ratio is the median over the rounds. First come decoding
and resizing alone, checked to be equal, then first tokens of a random checkpoint of 120 million parameters: one
photo, ten in one request, and eight requests with one each. `saccade bench --workload image --image-size
4032x3024` measures the same over HTTP.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
from PIL import Image

from benchmarks.models import qwen2_vl_120m
from benchmarks.results import write_rows
from saccade import LLM, SamplingParams
from saccade.media.decode import decode
from saccade.media.jpeg_stream import StreamedJpeg
from saccade.media.probe import probe
from saccade.models.vision.preprocess import resize
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.images import jpeg_reduction
from saccade.runner.encoder import encoder_runner
from saccade.runner.replica_placement import decode_threads
from saccade.types.media import Geometry, Grid, MediaItem, Size

PHOTO = Size(4032, 3024)
TARGETS = {"0.1 MP": Size(364, 280), "1 MP": Size(1148, 868)}
MAX_PIXELS = 102_400  # in the engine
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
Row = tuple[str, float, str]
Ways = Mapping[str, Callable[[], object]]


def photo(orientation: int = 1) -> bytes:
    """Smooth colours with a camera's grain: 4.6 MB."""
    random = np.random.default_rng(0)
    small = random.integers(0, 255, (48, 64, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize(PHOTO, Image.Resampling.BICUBIC))
    grain = random.normal(0, 9, (PHOTO.height, PHOTO.width, 1))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    pixels = (smooth + grain).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG", quality=90, exif=exif)
    return stream.getvalue()


def item_of(data: bytes, size: Size) -> MediaItem:
    geometry = Geometry(size, Grid(1, size.height // 14, size.width // 14), 1, 1)
    header = probe(data, MediaPolicy.of(Options()))
    return MediaItem(bytes(32), "image", data, header, geometry)


def take_turns(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each way, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def rows_of(what: str, times: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """The median of the first way, and how many times faster the others were."""
    first, *others = times
    yield f"{what}: {first}, ms", median(times[first]), ""
    for name in others:
        pairs = zip(times[first], times[name], strict=True)
        yield f"{what}: {name}, ms", median(times[name]), ""
        yield f"{what}: {name}, times faster", median(before / after for before, after in pairs), ""


def decoding(rounds: int) -> Iterator[Row]:
    photos = {"landscape": photo(), "portrait": photo(orientation=6)}
    with ThreadPoolExecutor(decode_threads()) as threads:
        for (shape, data), (target, wide) in ((p, t) for p in photos.items() for t in TARGETS.items()):
            size = wide if shape == "landscape" else Size(wide.height, wide.width)
            item = item_of(data, size)
            scaled = replace(item, reduction=jpeg_reduction(item.header, size))
            ways = {
                "whole": lambda item=item, size=size: resize(decode(item), size),
                "streamed": lambda item=item, size=size: StreamedJpeg(item, threads).resized(size, 3),
                "scaled": lambda item=scaled, size=size: StreamedJpeg(item, threads).resized(size, 3),
            }
            assert np.array_equal(ways["whole"](), ways["streamed"]()), "the pixels differ from Pillow's"
            yield from rows_of(f"decode + resize, {shape}, {target}", take_turns(ways, rounds))


def first_tokens(folder: Path, rounds: int) -> Iterator[Row]:
    options = {"max_pixels": MAX_PIXELS, "max_model_len": 2048, "kv_cache_gb": 0.5, "use_tqdm": False}
    data = photo()
    count = iter(range(sys.maxsize))

    def prompt(photos: int) -> dict[str, object]:
        """Bytes after the end of a JPEG make it another image to the caches."""
        images = [data + b"%d" % next(count) for _ in range(photos)]
        text = "<|vision_start|><|image_pad|><|vision_end|>" * photos
        return {"prompt": text + "What is this?", "multi_modal_data": {"image": images}}

    loads = {"1 photo": [1], "10 photos in a request": [10], "8 requests of a photo": [1] * 8}
    with ExitStack() as stack:
        whole, scaled = (LLM(model=str(folder), scaled_jpeg=is_scaled, **options) for is_scaled in (False, True))
        for llm in (whole, scaled):
            stack.callback(llm.close)

        def ask(llm: LLM, load: Sequence[int], is_streamed: bool = True) -> None:
            prompts = [prompt(photos) for photos in load]
            with ExitStack() as without:
                if not is_streamed:
                    without.enter_context(patch.object(encoder_runner, "is_streamed", lambda item: False))
                found = llm.generate(prompts, ONE_TOKEN, use_tqdm=False)
            assert all(len(out.outputs[0].token_ids) == 1 for out in found), "a request failed"

        for llm in (whole, scaled):
            ask(llm, [1])
        for name, load in loads.items():
            ways = {
                "whole": lambda load=load: ask(whole, load, is_streamed=False),
                "streamed": lambda load=load: ask(whole, load),
                "scaled": lambda load=load: ask(scaled, load),
            }
            yield from rows_of(f"first tokens, {name}", take_turns(ways, rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("build/bench-qwen2-vl-120m")
    parser.add_argument("--model-dir", type=Path, default=default, help="made when it is missing")
    parser.add_argument("--rounds", type=int, default=7, help="repeats of each way")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    args = parser.parse_args()
    folder = qwen2_vl_120m(args.model_dir)
    rows: list[Row] = []
    for part in (decoding(args.rounds), first_tokens(folder, max(1, args.rounds // 3))):
        for name, value, goal in part:
            print(f"{name:62} {value:9.2f}", flush=True)
            rows.append((name, value, goal))
    print(json.dumps({name: round(value, 4) for name, value, _ in rows}))
    if args.json:
        write_rows(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
