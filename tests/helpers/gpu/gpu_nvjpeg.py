"""nvJPEG on a GPU: `python -m tests.helpers.gpu.gpu_nvjpeg FOLDER`. FOLDER: a checkpoint, weights are made up.

Pixels against Pillow's, what a JPEG that is cut shows, times; then first tokens of an engine, the flag's two ways in
turns. Ends with status 1 where pixels differ by more than 4 of 255 or the engine answers wrongly.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from saccade import LLM, SamplingParams
from saccade.media.jpeg_layout import END
from saccade.media.probe import probe
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.images import is_for_gpu
from saccade.runner.encoder.gpu_jpeg import GpuJpegs, check_pixels
from saccade.runner.encoder.nvjpeg import Jpeg, NvJpeg, NvJpegError, load_library
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size

PHOTO, ONE, TURNED = Size(4032, 3024), Size(1152, 864), Size(3024, 4032)
MAX_PIXELS = 1_003_520
TOLERANCE = 4
ROUNDS = 5
DEVICE = "cuda:0"
SECONDS = {"library": 30, "engine": 60}  # that a part may take
PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
faults: list[str] = []


def say(*parts: object) -> None:
    print(*parts, flush=True)


def expect(holds: bool, what: str) -> None:
    if not holds:
        faults.append(what)
        say("  WRONG:", what)


@lru_cache(maxsize=16)
def drawing(size: Size, seed: int = 0, grain: float = 7.7) -> Image.Image:
    """Smooth colours, edges and a camera's grain."""
    random = np.random.default_rng(seed)
    smooth = Image.fromarray(random.integers(0, 255, (48, 64, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(smooth)
    for _ in range(60):
        x, y, r = (int(random.integers(low, high)) for low, high in ((0, size[0]), (0, size[1]), (2, size[1] // 8 + 3)))
        draw.ellipse((x - r, y - r, x + r, y + r), outline=tuple(int(c) for c in random.integers(0, 255, 3)), width=6)
    noise = random.normal(0, grain, (size.height, size.width, 1)).astype(np.float32)
    return Image.fromarray((np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, orientation: int = 1, **how: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image.save(stream, "JPEG", **{"quality": 90, "subsampling": "4:2:0", "exif": exif, **how})
    return stream.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB")).astype(np.int16)


def stored(data: bytes) -> Size:
    with Image.open(io.BytesIO(data)) as image:
        return Size(*image.size)


def ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


# --- the library ---------------------------------------------------------------------------------------------------


def plain(data: bytes) -> bool:
    """As the server judges it, of any size."""
    policy = MediaPolicy.of(Options())
    header = probe(data, policy)
    return is_for_gpu(data, replace(header, size=PHOTO))


def show_pixels(nvjpeg: NvJpeg) -> None:
    say("\npixels against Pillow's                          plain  max  mean")
    files = {f"4032x3024 {kind}": jpeg(drawing(PHOTO), subsampling=kind) for kind in ("4:2:0", "4:2:2", "4:4:4")}
    for size in (Size(1999, 1501), Size(1601, 1203), Size(2049, 1023), Size(1337, 2003)):
        for kind in ("4:2:0", "4:2:2", "4:4:4"):
            files[f"{size.width}x{size.height} {kind}"] = jpeg(drawing(size), subsampling=kind)
    files["1999x1501 grey"] = jpeg(drawing(Size(1999, 1501)).convert("L"))
    files["1999x1501 restart markers"] = jpeg(drawing(Size(1999, 1501)), restart_marker_rows=1)
    files["1999x1501 optimised tables"] = jpeg(drawing(Size(1999, 1501)), optimize=True)
    files["1999x1501 quality 100"] = jpeg(drawing(Size(1999, 1501)), quality=100)
    files["1999x1501 bytes after its end"] = jpeg(drawing(Size(1999, 1501))) + b"more" * 1000
    files["1999x1501 a film after its end"] = jpeg(drawing(Size(1999, 1501))) + b"film\xff\xd9" * 1000
    files["1999x1501 progressive"] = jpeg(drawing(Size(1999, 1501)), progressive=True)
    files["1999x1501 CMYK"] = jpeg(drawing(Size(1999, 1501)).convert("CMYK"))
    for name, data in files.items():
        if not plain(data):
            say(f"{name:48} no     decoded on the CPU")
            continue
        try:
            [out] = nvjpeg.decode([Jpeg.of(data, stored(data))])
        except NvJpegError as error:
            say(f"{name:48} yes    {error}: decoded on the CPU")
            continue
        apart = np.abs(out.cpu().numpy() - pixels_of(data))
        say(f"{name:48} yes  {apart.max():5d} {apart.mean():.4f}")
        expect(int(apart.max()) <= TOLERANCE, f"{name} differs by {apart.max()}")


def show_batch(nvjpeg: NvJpeg) -> None:
    """Different sizes together."""
    sources = [
        jpeg(drawing(size, seed)) for seed, size in enumerate((PHOTO, Size(1999, 1501), TURNED, Size(1601, 1203)))
    ]
    outs = nvjpeg.decode([Jpeg.of(data, stored(data)) for data in sources])
    worst = max(int(np.abs(out.cpu().numpy() - pixels_of(data)).max()) for out, data in zip(outs, sources, strict=True))
    say(f"a batch of four sizes: max {worst}")
    expect(worst <= TOLERANCE, f"a batch differs by {worst}")


def show_cut(nvjpeg: NvJpeg) -> None:
    """White, then a dark one that is cut: how bright is what it shows of the part that it lacks?"""
    white = Jpeg.of(jpeg(Image.new("RGB", PHOTO, "white")), PHOTO)
    dark = jpeg(drawing(PHOTO).point(lambda value: value // 8))
    cut = Jpeg.of(dark[: len(dark) // 2] + END, PHOTO)
    nvjpeg.decode([white])
    found = [int(nvjpeg.decode([*before, cut])[-1][PHOTO.height // 2 + 200 :].max()) for before in ([], [white] * 7)]
    say("a dark JPEG that is cut, after a white one of its size: brightest value of its missing half")
    say(f"alone {found[0]}; in a batch {found[1]} (128: grey)")


def show_times(nvjpeg: NvJpeg, photo: bytes) -> None:
    say("\nms, medians of", ROUNDS)
    one = Jpeg.of(photo, PHOTO)
    row = f"one {ms(lambda: nvjpeg.decode([one])):.2f}"
    for count in (2, 4, 8):
        row += f", batch of {count} {ms(lambda: nvjpeg.decode([one] * count), 3):.2f}"  # noqa: B023 (called here)
    mixed = ms(lambda: [nvjpeg.decode([one] * count) for count in (1, 3, 1, 4)], 3)
    say(f"{row}; batches of 1, 3, 1, 4 {mixed:.2f}")


def show_threads(nvjpeg: NvJpeg, photo: bytes) -> None:
    """As the engine's decoding threads."""
    jpegs = GpuJpegs(nvjpeg)
    for orientation, count in ((1, 1), (1, 4), (1, 8), (6, 1), (6, 4)):
        items = [photo_item(photo, orientation)] * count
        with ThreadPoolExecutor(16) as threads:
            taken = ms(lambda items=items, threads=threads: list(threads.map(lambda item: held(jpegs, item), items)), 3)
        say(f"{count} threads, orientation {orientation}: {taken:.2f} in all")
    jpegs.check_idle()


def photo_item(data: bytes, orientation: int) -> MediaItem:
    size = PHOTO if orientation < 5 else TURNED
    geometry = Geometry(size, Grid(1, 2, 2), 1, 1)
    return MediaItem(b"k", "image", data, Header("jpeg", size, orientation, 1, "RGB"), geometry, gpu_jpeg=True)


def held(jpegs: GpuJpegs, item: MediaItem) -> None:
    with jpegs.pixels(item) as pixels:
        expect(pixels is not None, "nvJPEG refused a photo in a thread")


def library_part(photo: bytes) -> None:
    library = load_library()
    nvjpeg = NvJpeg(library, torch.device(DEVICE))
    say(f"{library._name}; {nvjpeg.engines} engines")
    tried(check_pixels, nvjpeg)
    tried(show_pixels, nvjpeg)
    tried(show_batch, nvjpeg)
    tried(show_cut, nvjpeg)
    tried(show_times, nvjpeg, photo)
    tried(show_threads, nvjpeg, photo)
    nvjpeg.close()


def tried(work: Callable[..., None], *given: Any) -> None:
    try:
        work(*given)
    except Exception as error:
        traceback.print_exc()
        expect(False, f"{work.__name__}: {type(error).__name__}: {error}")


# --- the engine ----------------------------------------------------------------------------------------------------


class Engine:
    def __init__(self, folder: str) -> None:
        begin = time.monotonic()
        self.llm = LLM(
            model=folder, load_format="dummy", dtype="bfloat16", max_model_len=16384, max_num_seqs=16,
            limit_mm_per_prompt={"image": 10}, max_pixels=MAX_PIXELS, gpu_jpeg=True, use_tqdm=False,
        )  # fmt: skip
        self.images = self.llm.engine.processor.images
        self.policy = self.images.policy
        self.number = 0
        say(f"\nengine started in {time.monotonic() - begin:.0f} s")

    def fresh(self, data: bytes) -> bytes:
        """Bytes after its end make it another image to the caches."""
        self.number += 1
        return data + b"%d" % self.number

    def ask(self, requests: Sequence[Sequence[bytes]], on_gpu: bool) -> tuple[float, list[Any]]:
        """Milliseconds until all have their first token. Without the flag items are as in an engine without it."""
        self.images.policy = replace(self.policy, gpu_jpeg=on_gpu)
        prompts = [
            {"prompt": PROMPT * len(images) + "What is this?", "multi_modal_data": {"image": list(images)}}
            for images in requests
        ]
        begin = time.perf_counter()
        outs = self.llm.generate(prompts, ONE_TOKEN, use_tqdm=False)  # type: ignore[arg-type]
        return (time.perf_counter() - begin) * 1e3, outs

    def counters(self) -> dict[str, int]:
        return dict(self.llm.stats()["encoder"])


def logprobs(out: Any) -> dict[int, float]:
    return {token: value.logprob for token, value in (out.outputs[0].logprobs or [{}])[0].items()}


def engine_times(engine: Engine, photo: bytes, one: bytes) -> None:
    loads = {"one 1 MP JPEG": [[one]], "one photo": [[photo]], "one photo, portrait": [[jpeg_turned(photo)]],
             "ten photos in one request": [[photo] * 10], "8 requests of a photo": [[photo]] * 8}  # fmt: skip
    medians: dict[tuple[str, bool], float] = {}
    for name, load in loads.items():
        rounds = ROUNDS if len(load) * len(load[0]) == 1 else 2
        times: dict[bool, list[float]] = {False: [], True: []}
        stages: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds + 1):
            for on_gpu in times:
                taken, outs = engine.ask([[engine.fresh(data) for data in images] for images in load], on_gpu)
                times[on_gpu].append(taken)
                stages[on_gpu].append(outs[0].bill.times_ms["decode"])
        for on_gpu, values in times.items():
            medians[name, on_gpu] = median(values[1:])
        off, on = medians[name, False], medians[name, True]
        decode = [median(stages[way][1:]) for way in (False, True)]
        say(f"{name:28} flag off {off:8.2f} ms, on {on:8.2f} ms; of that decode of the first request's images "
            f"{decode[0]:.2f} and {decode[1]:.2f}")  # fmt: skip
    base = medians["one 1 MP JPEG", False]
    for on_gpu in (False, True):
        say(f"photo / 1 MP, flag {'on' if on_gpu else 'off'}: {medians['one photo', on_gpu] / base:.2f} (1.3 asked)")


def jpeg_turned(photo: bytes) -> bytes:
    """The same scan with orientation 6."""
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes()
    body = body if body.startswith(b"Exif\0\0") else b"Exif\0\0" + body
    start = 2
    while photo[start + 1] in (0xE0, 0xE1):
        start += 2 + int.from_bytes(photo[start + 2 : start + 4], "big")
    return photo[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + photo[start:]


def engine_answers(engine: Engine, photo: bytes) -> None:
    """The same image both ways, then damaged and other files, then a good one."""
    say("\nanswers, flag off and on")
    for name, data in (("photo", photo), ("portrait", jpeg_turned(photo))):
        (_, [off]), (_, [on]) = (engine.ask([[engine.fresh(data)]], way) for way in (False, True))
        both = logprobs(off).keys() & logprobs(on).keys()
        apart = max((abs(logprobs(off)[token] - logprobs(on)[token]) for token in both), default=float("nan"))
        tokens = off.outputs[0].token_ids, on.outputs[0].token_ids
        say(f"{name}: tokens {tokens[0]} {tokens[1]}, log probability differs by {apart:.4f}")
        expect(off.prompt_token_ids == on.prompt_token_ids, f"{name}: another bill")
    middle = len(photo) // 2
    others = {
        "cut": photo[:middle],
        "cut, with an end": photo[:middle] + END,
        "changed": photo[:middle] + bytes(4000) + photo[middle + 4000 :],
        "progressive": jpeg(drawing(Size(1999, 1501)), progressive=True),
        "CMYK": jpeg(drawing(Size(1999, 1501)).convert("CMYK")),
        "grey": jpeg(drawing(Size(1999, 1501)).convert("L")),
    }
    for name, data in others.items():
        before = engine.counters()
        _, [out] = engine.ask([[engine.fresh(data)]], True)
        after = engine.counters()
        counted = {key: after[key] - before[key] for key in ("gpu_jpegs", "gpu_jpeg_fallbacks", "failed")}
        say(f"{name:18} {out.error.message if out.error else out.outputs[0].token_ids}  {counted}")
        expect(counted["gpu_jpegs"] == int(name in ("cut, with an end", "changed")), f"{name}: decoded elsewhere")
    _, [out] = engine.ask([[engine.fresh(photo)]], True)
    expect(out.error is None, "a good photo after damaged ones")
    say("counters:", engine.counters())
    engine.llm.engine.core.runner.encoder.jpegs.check_idle()


def show_memory(when: str) -> None:
    free, total = torch.cuda.mem_get_info()
    outside = (total - free - torch.cuda.memory_reserved()) / 1e6
    say(f"{when}: {torch.cuda.memory_reserved() / 1e9:.2f} GB PyTorch's, {outside:.0f} MB of the device outside of it")


def engine_part(folder: str, photo: bytes, one: bytes) -> None:
    engine = Engine(folder)
    show_memory("memory at start")
    tried(engine_times, engine, photo, one)
    tried(engine_answers, engine, photo)
    show_memory("memory at the end")
    engine.llm.close()


def run_part(part: str, folder: str) -> None:
    photo, one = jpeg(drawing(PHOTO)), jpeg(drawing(ONE))
    say(f"\n=== {part}; photo {len(photo) / 1e6:.2f} MB, 1 MP {len(one) / 1e6:.2f} MB")
    if part == "library":
        library_part(photo)
    else:
        engine_part(folder, photo, one)
    say(f"{part}: {len(faults)} faults {faults}" if faults else f"{part}: no fault")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a checkpoint folder of a Qwen2-VL shape; weights are not read")
    parser.add_argument("--part", choices=SECONDS, help="one of them, in this process")
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.folder)
        return int(bool(faults))
    begin = time.monotonic()
    ended = {}
    for part, seconds in SECONDS.items():  # each in a process of its own: one may die
        command = [sys.executable, "-m", "tests.helpers.gpu.gpu_nvjpeg", args.folder, "--part", part]
        try:
            ended[part] = subprocess.run(command, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            ended[part] = -1
    say(f"\ntook {time.monotonic() - begin:.0f} s; status of each part: {ended} (-1: it took too long)")
    return int(any(ended.values()))


if __name__ == "__main__":
    sys.exit(main())
