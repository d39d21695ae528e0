"""The workloads of `benchmarks.gpu` on one engine: `python -m benchmarks.gpu_work saccade|vllm MODEL FOLDER [--quick]`

Prints a line of JSON per result, so that a run that breaks keeps what it had. Everything goes through the calls that
both engines offer (generate, add_request, step); Saccade's own numbers of encoding and memory come on top.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu_shapes import ANSWER, QUESTION, SHAPES, Shape

MAX_PIXELS = 2560 * 1440
MODEL_LEN = 131072
STEP_TOKENS = 8192
MEMORY_SHARE = 0.6
MAX_IMAGES = 64
BATCHES = (1, 32, 100, 128)  # of decode steps; 100 requests fill no graph
STREAMS = 32
STREAM_TOKENS = 600
REST_S = 0.05  # of a device between two encodings
IMAGES = 40
IMAGE_EVERY_S = 0.06
TOKENS_BESIDE = 1500  # so many tokens last as long as the images come
Prompt = dict[str, Any]


def say(**record: Any) -> None:
    print("RESULT " + json.dumps(record), flush=True)


def attempt(name: str, work: Callable[[], object]) -> bool:
    """Whether it went well. One broken row must not cost the others."""
    start = time.perf_counter()
    try:
        work()
        return True
    except Exception:
        traceback.print_exc()
        say(errors=[name])
        return False
    finally:
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def make_engine(kind: str, folder: str, **more: Any) -> tuple[Any, Any, Any]:
    """The engine, its steps by hand, its sampling parameters."""
    if kind == "vllm":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        from vllm import LLM, SamplingParams
    else:
        from saccade import LLM, SamplingParams

        more = {"use_tqdm": False, **more}
    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        gpu_memory_utilization=MEMORY_SHARE,
        max_num_batched_tokens=STEP_TOKENS,
        limit_mm_per_prompt={"image": MAX_IMAGES},
        seed=0,
        **{"max_model_len": MODEL_LEN, **more},
    )
    return llm, llm.llm_engine if kind == "vllm" else llm.engine, SamplingParams


def photo(colours: np.random.Generator, width: int, height: int) -> bytes:
    small = colours.integers(0, 255, (height // 40 + 1, width // 40 + 1, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


class Inputs:
    """Prompts of one model, the same for every run."""

    def __init__(self, kind: str, shape: Shape) -> None:
        self.kind = kind
        self.shape = shape
        self._colours = np.random.default_rng(0)
        self._ids = random.Random(0)

    def photo(self, width: int, height: int) -> bytes:
        """A smooth random image as JPEG bytes."""
        return photo(self._colours, width, height)

    def opened(self, data: bytes) -> Image.Image:
        """As callers hand a file over. vLLM wants its pixels; decoding them is part of its time as of ours."""
        image = Image.open(io.BytesIO(data))
        return image if self.kind == "saccade" else image.convert("RGB")

    def text(self, tokens: int) -> Prompt:
        return {"prompt_token_ids": [self._ids.randrange(1000, 30000) for _ in range(tokens)]}

    def about(self, images: list[bytes], question: str = "Describe this.") -> Prompt:
        files = [self.opened(data) for data in images]
        return {"prompt": self.shape.image * len(images) + question, "multi_modal_data": {"image": files}}


class Side(Inputs):
    """One engine with a model in it, and the ways to ask it."""

    def __init__(self, kind: str, shape: Shape, folder: str, **more: Any) -> None:
        super().__init__(kind, shape)
        if shape.config["model_type"] != "llava":  # which knows one size alone
            more["mm_processor_kwargs"] = {"max_pixels": MAX_PIXELS}
        self.llm, self.engine, self.sampling = make_engine(kind, folder, **more)

    def greedy(self, tokens: int) -> Any:
        return self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True)

    def generate(self, prompts: Any, tokens: int) -> tuple[float, list[Any]]:
        """Milliseconds, and the outputs."""
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, self.greedy(tokens), use_tqdm=False)
        return (time.perf_counter() - start) * 1e3, outputs


# --- decoding and first tokens ------------------------------------------------------------------------------------


def decode_steps(side: Side, repeats: int) -> None:
    """A step's time is the difference between long and short answers to the same prompts."""
    long, short = (137, 9) if repeats > 1 else (73, 9)
    for batch in BATCHES:
        prompts = [side.text(1000) for _ in range(batch)]
        side.generate(prompts, 1)
        times = [statistics.median(side.generate(prompts, n)[0] for _ in range(max(2, repeats))) for n in (short, long)]
        say(**{f"decode_{batch}": (times[1] - times[0]) / (long - short)})


def first_tokens(side: Side, repeats: int) -> None:
    for tokens in (64, 1600):
        say(**{f"text_{tokens}": median(lambda n=tokens: side.generate(side.text(n), 1)[0], 4 * repeats)})
    for width, height in ((644, 476), (1280, 960), (2560, 1440)):
        new = []
        again = []
        prompt_tokens = 0
        for _ in range(3 + 2 * repeats):
            data = side.photo(width, height)
            elapsed, outputs = side.generate(side.about([data]), 1)
            new.append(elapsed)
            again.append(side.generate(side.about([data]), 1)[0])
            prompt_tokens = len(outputs[0].prompt_token_ids)
        name = f"{width}x{height}"
        say(**{f"new_{name}": statistics.median(new), f"again_{name}": statistics.median(again),
               f"tokens_{name}": prompt_tokens})  # fmt: skip


def encodes(side: Side, repeats: int) -> None:
    """The tower alone, over patches that are on the device: again and again, and each time after a rest.

    A device that works without a pause lowers its clock to stay within its power.
    """
    if side.kind != "saccade":
        return
    import torch

    from saccade.types.media import Size

    model = side.engine.core.runner.model
    images = side.engine.processor.images
    limits = images.limits.min_pixels, images.limits.max_pixels
    for name, count, size in (
        ("encode_1288x952", 1, Size(1288, 952)),
        ("encode_644x476", 1, Size(644, 476)),
        ("encode_8x644x476", 8, Size(644, 476)),
    ):
        grids = [images.family.geometry(size, *limits).grid] * count
        like = model.decoder.table
        patches = torch.randn(sum(grid.patches for grid in grids), model.config.vision.patch_dim).to(like)
        for suffix, rest_s in (("", 0.0), ("_rested", REST_S)):
            times = [_encode_ms(model, patches, grids, rest_s) for _ in range(3 + 2 * repeats)]
            say(**{name + suffix: statistics.median(times[1:])})


def _encode_ms(model: Any, patches: Any, grids: list[Any], rest_s: float) -> float:
    import torch

    wait = torch.cuda.synchronize if patches.is_cuda else lambda: None
    wait()
    time.sleep(rest_s)
    start = time.perf_counter()
    with torch.inference_mode():
        for _ in model.encode(patches.clone(), grids):
            pass
    wait()
    return (time.perf_counter() - start) * 1e3


def median(call: Callable[[], float], repeats: int) -> float:
    return statistics.median(call() for _ in range(repeats))


# --- many images ------------------------------------------------------------------------------------------------


def throughput(side: Side, repeats: int) -> None:
    rates = []
    for _ in range(min(repeats, 2)):
        prompts = [side.about([side.photo(1280, 720)]) for _ in range(64)]
        rates.append(64e3 / side.generate(prompts, 32)[0])
    say(throughput_64x720p=max(rates))


def conversations(side: Side, repeats: int) -> None:
    """A new image and question a turn, everything before it again."""
    for name, (width, height) in {"720p": (1280, 720), "1080p": (1920, 1080)}.items():
        text = ""
        images = []
        times = []
        for turn in range(8):
            text += side.shape.image + QUESTION.format(turn) + side.shape.turn_end
            images.append(side.photo(width, height))
            files = [side.opened(data) for data in images]
            times.append(side.generate({"prompt": text, "multi_modal_data": {"image": files}}, 1)[0])
            text += ANSWER + side.shape.answer_end
        say(**{f"turn2_{name}": times[1], f"turn8_{name}": times[7]})


def many_images(side: Side, repeats: int) -> None:
    elapsed, outputs = side.generate(side.about([side.photo(1280, 720) for _ in range(8)], "Compare."), 1)
    say(many_8x720p=elapsed, tokens_8x720p=len(outputs[0].prompt_token_ids))


# --- streams ------------------------------------------------------------------------------------------------------


def streams(side: Side, repeats: int) -> None:
    for name, has_images in (("alone", False), ("pictures", True)):
        gaps = np.array(list(_gaps(side, has_images))[STREAMS:])
        say(**{f"stream_{name}_{q}": float(np.percentile(gaps, p)) for q, p in (("p50", 50), ("p99", 99))})


def _gaps(side: Side, has_images: bool) -> Iterator[float]:
    """Milliseconds between the tokens of each text stream; with images, from the first on: they come by the clock."""
    photos = []
    tokens = STREAM_TOKENS
    if has_images:
        photos = [side.photo(1280, 960) for _ in range(IMAGES)]
        tokens = TOKENS_BESIDE
    arrivals = _Arrivals(side, photos)
    for index in range(STREAMS):
        side.engine.add_request(f"text{has_images}{index}", side.text(500), side.greedy(tokens))
    latest: dict[str, tuple[float, int]] = {}
    while side.engine.has_unfinished_requests():
        arrivals.add_due()
        for output in side.engine.step():
            now = time.perf_counter()
            if not output.request_id.startswith("text"):
                arrivals.note(output.request_id, now)
                continue
            count = len(output.outputs[0].token_ids)
            before = latest.get(output.request_id)
            if before and count > before[1] and (arrivals.at or not has_images):
                yield (now - before[0]) / (count - before[1]) * 1e3
            latest[output.request_id] = (now, count)
    if arrivals.waited:
        say(stream_picture_first=statistics.median(arrivals.waited))


class _Arrivals:
    """Pictures that come by the clock, and how long each waited for its first token."""

    def __init__(self, side: Side, photos: list[bytes]) -> None:
        self._side = side
        self._photos = photos
        self._due = time.perf_counter() + 1.0
        self.at: dict[str, float] = {}
        self.waited: list[float] = []  # ms

    def add_due(self) -> None:
        now = time.perf_counter()
        if self._photos and now > self._due:
            name = f"picture{len(self._photos)}"
            self.at[name] = now
            self._side.engine.add_request(name, self._side.about([self._photos.pop()], "What?"), self._side.greedy(4))
            self._due = now + IMAGE_EVERY_S

    def note(self, name: str, now: float) -> None:
        if start := self.at.get(name):
            self.waited.append((now - start) * 1e3)
            self.at[name] = 0.0  # only its first token counts


# --- memory -------------------------------------------------------------------------------------------------------


def device_memory(side: Side) -> dict[str, float]:
    import torch

    if side.kind != "saccade" or not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    (free, total) = torch.cuda.mem_get_info()
    return {
        "allocations": stats["num_device_alloc"],
        "reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "outside_gib": (total - free - torch.cuda.memory_reserved()) / 2**30,
        "allowed_gib": MEMORY_SHARE * total / 2**30,
    }


PARTS = (decode_steps, first_tokens, encodes, throughput, conversations, streams, many_images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("saccade", "vllm"))
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    repeats = 1 if args.quick else 3
    started = time.perf_counter()
    side = Side(args.kind, SHAPES[args.model], args.folder)
    say(start_s=time.perf_counter() - started)
    side.generate([side.text(64) for _ in range(4)], 8)
    side.generate(side.about([side.photo(640, 480)]), 4)
    gc.collect()
    before = device_memory(side)
    for part in PARTS:
        if not attempt(part.__name__, partial(part, side, repeats)):
            for request_id in list(getattr(side.engine, "_open", ())):
                side.engine.abort_request(request_id)
    if before:
        say(memory={"before": before, "after": device_memory(side), "parts": side.llm.stats()["memory"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
