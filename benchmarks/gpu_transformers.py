"""The rows of `benchmarks.gpu` that Transformers' own `generate` can run: `python -m benchmarks.gpu_transformers ...`

The same shape with random weights in bfloat16, eager, attention by PyTorch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import inspect
import io
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from benchmarks.gpu_shapes import SHAPES, Shape
from benchmarks.gpu_work import MAX_PIXELS, attempt, photo, say

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Transformers:
    def __init__(self, shape: Shape, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = AutoModelForImageTextToText.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self.is_square = shape.config["model_type"] == "llava"
        limits = {} if self.is_square else {"size": {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}}
        self.images = AutoImageProcessor.from_pretrained(folder, **limits)
        self.image_token = shape.config.get("image_token_id", shape.config.get("image_token_index"))
        self._takes_types = "mm_token_type_ids" in inspect.signature(self.model.forward).parameters
        self._random = np.random.default_rng(0)

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        return torch.from_numpy(self._random.integers(1000, 30000, (batch, tokens))).to(DEVICE)

    def photo(self, width: int, height: int) -> bytes:
        return photo(self._random, width, height)

    def prepared(self, images: list[bytes]) -> dict[str, Any]:
        bitmaps = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
        batch = self.images(bitmaps, return_tensors="pt").to(DEVICE)
        pixels = {"pixel_values": batch["pixel_values"].to(torch.bfloat16)}
        if not self.is_square:
            pixels["image_grid_thw"] = batch["image_grid_thw"]
        return pixels

    def about(self, data: bytes) -> dict[str, Any]:
        """An image between sixteen tokens of text."""
        inputs = self.prepared([data])
        slots = 576 if self.is_square else int(inputs["image_grid_thw"].prod()) // 4
        ids = self.ids(1, slots + 16)
        ids[0, 8 : 8 + slots] = self.image_token
        if self._takes_types:
            inputs["mm_token_type_ids"] = (ids == self.image_token).int()
        return {"input_ids": ids, **inputs}

    @torch.inference_mode()
    def generate(self, tokens: int, **inputs: Any) -> None:
        mask = torch.ones_like(inputs["input_ids"])
        self.model.generate(
            **inputs, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        self.wait()

    @torch.inference_mode()
    def encode(self, inputs: dict[str, Any]) -> None:
        self.model.get_image_features(**inputs)
        self.wait()

    def wait(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()


def median_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def decode_steps(side: Transformers, repeats: int) -> None:
    for batch in (1, 32, 128):
        ids = side.ids(batch, 1000)
        short, long = (median_ms(lambda n=n, ids=ids: side.generate(n, input_ids=ids), repeats) for n in (2, 18))
        say(**{f"decode_{batch}": (long - short) / 16})


def encodes(side: Transformers, repeats: int) -> None:
    sizes = {"1288x952": (1, 1288, 952), "644x476": (1, 644, 476), "8x644x476": (8, 644, 476)}
    for name, (count, width, height) in sizes.items():
        inputs = side.prepared([side.photo(width, height) for _ in range(count)])
        say(**{f"encode_{name}": median_ms(lambda i=inputs: side.encode(i), 2 * repeats)})


def first_tokens(side: Transformers, repeats: int) -> None:
    for tokens in (64, 1600):
        say(**{f"text_{tokens}": median_ms(lambda n=tokens: side.generate(1, input_ids=side.ids(1, n)), 2 * repeats)})
    for width, height in ((644, 476), (1280, 960), (2560, 1440)):
        photos = [side.photo(width, height) for _ in range(repeats + 1)]  # a new one each time
        say(**{f"new_{width}x{height}": median_ms(lambda p=photos: side.generate(1, **side.about(p.pop())), repeats)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    side = Transformers(SHAPES[args.model], args.folder)
    for part in (decode_steps, encodes, first_tokens):
        attempt(part.__name__, partial(part, side, 1 if args.quick else 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
