"""The language of these kernels is experimental: names change, and a device would then go on without them, slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIANTS = [
    "decode.bf16.2.6.8.16.3.4", "linear.fp16.2.True", "prefill.16", "qkv.16", "stream.128", "stream.128.gated",
    "vit.80", "vit_parted",
]  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_this_triton_compiles_the_kernel_for_a_hopper_gpu(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.helpers.compile_hopper", name]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
