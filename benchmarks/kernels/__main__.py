"""Runs suites of kernels: `python -m benchmarks.kernels [SUITE ...]`. A table, then one line of JSON.

Each way of doing a piece of work is compared with a reference, then timed beside libraries and the device's floor.
Odd sizes are the business of `pytest tests/kernels`, which takes a GPU if there is one; sizes that only the Hopper
kernels know are here. The exit status is 1 if a result is wrong or a launch failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.kernels import attention, delta, gemm, latent, moe, small
from benchmarks.kernels.harness import Case, Row, line_of, rows_of
from benchmarks.results import write_json

SUITES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "decode": attention.decode,
    "prefill": attention.prefill,
    "vit": attention.vit,
    "latent-decode": latent.decode,
    "latent-prefill": latent.prefill,
    "latent-store": latent.store,
    "delta-decode": delta.decode,
    "delta-prefill": delta.prefill,
    "gemm": gemm.decode,
    "gemm-int4": gemm.int4,
    "gemm-act": gemm.activation,
    "gemm-qkv": gemm.qkv_rope,
    "moe": moe.layers,
    "moe-int4": moe.int4,
    "moe-parts": moe.parts,
    "norms": small.elementwise,
    "heads": small.heads,
    "vision": small.vision,
    "images": small.images,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=f"any of {', '.join(SUITES)}; all of them without")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    args = parser.parse_args()
    if unknown := set(args.suites) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; without one, pytest tests/project/test_kernel_benchmarks.py runs small cases")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, file=sys.stderr)
    start = time.perf_counter()
    rows: list[Row] = []
    for suite in args.suites or SUITES:
        rows += run(SUITES[suite]())
    print(f"{time.perf_counter() - start:.0f} s")
    record = {"rows": [row._asdict() for row in rows]}
    if args.json:
        write_json(args.json, record)
    print(json.dumps(record))
    return 0 if all(row.is_right for row in rows) else 1


def run(cases: Iterator[Case]) -> list[Row]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # references are float32
    rows: list[Row] = []
    for case in cases:
        for row in rows_of(case):
            rows.append(row)
            print(line_of(row), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
