"""The language of these kernels is experimental: names change, and a device would then go on without them, slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["decode", "linear", "prefill", "qkv", "stream", "vit", "vit_parted"])
def test_this_triton_compiles_the_kernel_for_a_hopper_gpu(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.helpers.compile_hopper", name]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
