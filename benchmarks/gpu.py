"""Speed, memory and correctness on one GPU: `python -m benchmarks.gpu`. Tables, then one line of JSON.

Each engine runs in a process of its own with random weights of the model's shape, so nothing is downloaded and nobody
finds the other's memory. docs/benchmarks.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_correct import CHECKS
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_rows import ROWS
from benchmarks.gpu_shapes import SHAPES, write_folder
from benchmarks.results import cell, write_json
from saccade.runner.device_peaks import Peaks, measure_peaks

MODELS = ("qwen2_vl_2b", "qwen2_5_vl_7b", "llava_1_5_7b")
LIMIT_S = 400  # of one process
Record = dict[str, Any]


# --- processes ----------------------------------------------------------------------------------------------------


def run(name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Record:
    """What a process found; also what it had found when it broke."""
    start = time.perf_counter()
    here = str(Path(__file__).parent.parent)
    search_path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search_path, "PYTHONUNBUFFERED": "1", **(variables or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        record = _together(_results(process, start + LIMIT_S))
    if process.returncode:
        record["errors"] = [*record.get("errors", []), f"exit status {process.returncode}"]
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return record


def _together(results: Iterable[Record]) -> Record:
    record: Record = {}
    for result in results:
        for key, value in result.items():  # lists grow, everything else is one value
            record[key] = [*record.get(key, []), *value] if isinstance(value, list) else value
    return record


def _results(process: subprocess.Popen[str], deadline: float) -> Iterator[Record]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))
        if time.perf_counter() > deadline:
            process.kill()


def interpreter(path: str) -> str:
    """Of a virtual environment, or the program itself."""
    inside = Path(path) / "bin" / "python"
    return str(inside if inside.exists() else path)


# --- one model ----------------------------------------------------------------------------------------------------


def measure(model: str, args: argparse.Namespace, peaks: Peaks, root: Path) -> Record:
    """All of it for a model that was asked for; of those beside it speed alone, with fewer repeats."""
    folder = str(write_folder(SHAPES[model], root / model))
    is_beside = args.model == "all" and model != MODELS[0]
    quick = ["--quick"] if args.quick or is_beside else []
    python = [sys.executable, "-m"]
    record: Record = {"floor": dict(Floors(folder, peaks).rows())}
    record["ours"] = run(f"{model}, ours", [*python, "benchmarks.gpu_work", "saccade", model, folder, *quick])
    if args.memory and torch.cuda.is_available() and not is_beside:
        record["ours"] |= run(f"{model}, memory", [*python, "benchmarks.gpu_memory", model, folder, *quick])
    if args.transformers and not is_beside:
        command = [*python, "benchmarks.gpu_transformers", model, folder, *quick]
        record["transformers"] = run(f"{model}, Transformers", command)
    if args.vllm:
        command = [interpreter(args.vllm), "-m", "benchmarks.gpu_work", "vllm", model, folder, *quick]
        record["vllm"] = run(f"{model}, vLLM", command)
    return record


def measure_all(args: argparse.Namespace, peaks: Peaks, record: Record) -> None:
    with tempfile.TemporaryDirectory() as root:
        for model in MODELS if args.model == "all" else (args.model,):
            record[model] = measure(model, args, peaks, Path(root))
            table(model, record[model])
            memory_table(record[model]["ours"])
    if args.correctness:
        record["correctness"] = correctness(args.quick)
        correctness_table(record["correctness"])


def correctness(is_quick: bool) -> Record:
    """All checks at once: they are not timed, and the CPU that they compare with takes most of the time."""
    command = [sys.executable, "-m", "benchmarks.gpu_correct", *(["--quick"] if is_quick else [])]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(CHECKS)))}
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        sides = list(pool.map(lambda name: run(f"correctness, {name}", [*command, name], threads), CHECKS))
    return _together(sides)


# --- tables -------------------------------------------------------------------------------------------------------


def table(model: str, record: Record) -> None:
    """The ratio is ours over the floor, or for rates the floor over ours: 1 is the floor, more is slower."""
    peers = [side for side in ("transformers", "vllm") if side in record]
    titles = {"transformers": "Transformers", "vllm": "vLLM"}
    print(f"\n{model}\n| work | floor | ours | {''.join(titles[o] + ' | ' for o in peers)}ratio |")
    print("| --- " * (4 + len(peers)) + "|")
    for row, title in ROWS.items():
        floor = record["floor"].get(row)
        ours = record["ours"].get(row)
        cells = [cell(record[side].get(row)) for side in peers]
        ratio = None
        if floor and ours:
            ratio = floor / ours if "images/s" in title else ours / floor
        print(f"| {' | '.join([title, cell(floor), cell(ours), *cells, cell(ratio)])} |")


def memory_table(ours: Mapping[str, Any]) -> None:
    if "parts" in ours:
        print("\n| memory | planned, MiB | measured, MiB | ratio |\n| --- | --- | --- | --- |")
        for name, sizes in ours["parts"].items():
            planned, measured = (sizes[key] / 2**20 for key in ("planned", "measured"))
            if planned:  # there are none of some parts in some models
                print(f"| {name} | {planned:.1f} | {measured:.1f} | {measured / planned:.3f} |")
    if "memory" in ours:
        before = ours["memory"]["before"]
        after = ours["memory"]["after"]
        print(
            f"\nover the whole run {after['allocations'] - before['allocations']:.0f} allocations from the device; "
            f"{after['peak_reserved_gib']:.2f} GiB reserved at most ({before['reserved_gib']:.2f} after the start), "
            f"{after['allowed_gib']:.2f} allowed; {after['outside_gib']:.2f} GiB beside the allocator"
        )
    if "peak_of_1_mib" in ours:
        print(f"beyond what is held, 1 / 64 images of 2560x1440 take at most {ours['peak_of_1_mib']:.0f} / "
              f"{ours['peak_of_64_mib']:.0f} MiB")  # fmt: skip
    if "no_room" in ours:
        print(f"without room (a large image, text, a small image): {json.dumps(ours['no_room'])}")


def correctness_table(record: Record) -> None:
    print("\n| correctness against float32 on the CPU | measured | allowed |\n| --- | --- | --- |")
    for one in record.get("numbers", []):
        for what in ("logits", "embeddings"):
            print(f"| {what}, {one['shape']}, {one['dtype']} | {one[what]:.1e} | {one['allowed']:.0e} |")
    for one in record.get("texts", []):
        print(f"| equal texts of the built-in model, {one['dtype']} | {one['same']} of {one['of']} | most |")
    for one in record.get("fp8_cache", []):
        print(f"| equal tokens with an FP8 cache, {one['dtype']} | {one['share']:.1%} | {one['allowed']:.0%} |")
    for one in record.get("accuracy", []):
        share = f"{one['right'] / one['of']:.1%}"
        print(f"| accuracy of the built-in model, {one['of']} questions, {one['dtype']} | {share} | {one['cpu']:.1%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=(*MODELS, "tiny", "all"),
        default="all",
        help=f"all: {MODELS[0]}, and in fewer repeats the others; tiny tries the script",
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter or virtual environment that has vLLM")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a tenth of the questions")
    for part in ("correctness", "transformers", "memory"):
        parser.add_argument(f"--{part}", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE", help="also write the JSON there, with the commit")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    peaks = measure_peaks(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the processes that follow want all of it
    print(f"{device}, torch {torch.__version__}: {peaks.bytes_per_s / 1e12:.2f} TB/s, {peaks.flops / 1e12:.0f} TFLOP/s")
    record: Record = {"device": device, "peaks": vars(peaks)}
    try:
        measure_all(args, peaks, record)
    finally:  # what was measured is printed whatever happens then
        print(json.dumps(record))
        if args.json:
            write_json(args.json, record)
    broken = [side["errors"] for side in _sides(record) if side.get("errors")]
    return 1 if broken else 0


def _sides(record: Record) -> Iterator[Record]:
    for value in record.values():
        if isinstance(value, dict):
            yield value
            yield from (side for side in value.values() if isinstance(side, dict))


if __name__ == "__main__":
    sys.exit(main())
