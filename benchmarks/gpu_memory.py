"""Memory on a GPU: planned against measured, an image that finds no room, 64 large images in one request.

`python -m benchmarks.gpu_memory MODEL FOLDER`; `benchmarks.gpu` runs it. Formulas are checked with work that fills
them: a full pass through the tower, drawing for all places.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_shapes import SHAPES
from benchmarks.gpu_work import MEMORY_SHARE, Side, attempt, say
from saccade import costs
from saccade.types.media import Grid

LONG = 320_000  # tokens: 64 images of 2560x1440 and a question
PLACES = 64


def peak_over(call: Callable[[], object]) -> int:
    """Bytes allocated at most while it runs, beyond what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def parts(side: Side) -> None:
    """What was planned for each part, and what it took."""
    runner = side.llm.engine.core.runner
    text = runner.model.config.text
    vision = runner.model.config.vision
    sizes = {name: dict(part) for name, part in side.llm.stats()["memory"].items()}
    grids = _full_pass(runner)
    patches = sum(grid.patches for grid in grids)
    sizes["tower"] = {
        "planned": patches * costs.encode_bytes_per_patch(vision, text, "bfloat16"),
        "measured": peak_over(lambda: _encode(runner.model, grids)),
    }
    # Of all ways to draw the one that takes most, and so many tokens that all are drawn together in the end.
    drawn = side.sampling(temperature=1.0, top_p=0.9, presence_penalty=0.5, max_tokens=16, ignore_eos=True)
    short = [side.text(16) for _ in range(PLACES)]
    sizes["drawing"] = {
        "planned": PLACES * costs.sampling_bytes_per_row(text),
        "measured": peak_over(lambda: side.llm.generate(short, drawn, use_tqdm=False)),
    }
    say(parts=sizes)


def _full_pass(runner: Any) -> list[Grid]:
    """As many images of one size as a pass takes."""
    square = runner.model.config.vision.image_size
    grid = Grid(1, square // 14, square // 14) if square else Grid(1, 64, 64)
    return [grid] * (runner.encoder.max_patches // grid.patches)


@torch.inference_mode()
def _encode(model: Any, grids: list[Grid]) -> None:
    vision = model.config.vision
    shape = (sum(grid.patches for grid in grids), vision.patch_dim)
    layers = model.encode(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), grids)
    for _ in layers:
        pass


def no_room(side: Side) -> None:
    """With the work memory taken away, a large image ends alone; text and a small image are answered."""
    torch.cuda.empty_cache()
    ballast = _fill_up(leave=96 << 20)
    for _ in range(2):  # what the second time leaves behind, every time would
        before = torch.cuda.memory_allocated()
        large = side.about([side.photo(2560, 1440)])
        small = side.about([side.photo(336, 336)])
        outputs = side.llm.generate([large, side.text(64), small], side.greedy(8), use_tqdm=False)
        leak = torch.cuda.memory_allocated() - before
    errors = [output.error and str(output.error) for output in outputs]
    lengths = [len(output.outputs[0].token_ids) if output.outputs else 0 for output in outputs]
    del ballast
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    after = side.generate(side.about([side.photo(2560, 1440)]), 8)[1][0]
    say(no_room={"errors": errors, "answered": lengths, "next_large_picture": after.error is None,
                 "left_behind_bytes": leak})  # fmt: skip


def _fill_up(leave: int) -> list[torch.Tensor]:
    """Take all that the allocator has cached but `leave`, and let it take no more from the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total + leave / total)
    blocks: list[torch.Tensor] = []
    size = 1 << 30
    while size >= 16 << 20:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    gap = 0
    while blocks and gap < leave:
        gap += blocks.pop().numel()
    return blocks


def many_large(side: Side) -> None:
    """One image and 64 of them: the time of the latter, and the most memory each takes beyond what is held."""
    one = peak_over(lambda: side.generate(side.about([side.photo(2560, 1440)]), 1))
    prompt = side.about([side.photo(2560, 1440) for _ in range(64)], "Compare.")
    elapsed = [0.0]

    def ask() -> None:
        elapsed[0], outputs = side.generate(prompt, 1)
        say(tokens_64x2560x1440=len(outputs[0].prompt_token_ids))

    many = peak_over(ask)
    say(many_64x2560x1440=elapsed[0], peak_of_1_mib=one / 2**20, peak_of_64_mib=many / 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true", help="without the 64 large images, which take half a minute")
    args = parser.parse_args()
    side = Side("saccade", SHAPES[args.model], args.folder, max_model_len=LONG, max_num_seqs=PLACES)
    side.generate(side.about([side.photo(640, 480)]), 4)
    for part in (parts, no_room, *(() if args.quick else (many_large,))):
        attempt(part.__name__, partial(part, side))
    return 0


if __name__ == "__main__":
    sys.exit(main())
