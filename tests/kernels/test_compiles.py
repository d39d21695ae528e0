"""Every kernel compiles for every GPU that it is launched on, as the host code launches it, and could start there.

The language of the Hopper kernels is experimental: names change, and a device would then go on without them, slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOPPER = ["90"]
OTHERS = ["80", "89", "100", "120"]  # a launch that several of them share is compiled for the first


def compiled(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.helpers.kernels.compile_kernels", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    return done


@pytest.mark.compiles
@pytest.mark.parametrize("archs", [HOPPER, OTHERS], ids=["hopper", "others"])
def test_all_kernels_compile_and_fit_the_gpu(archs: list[str], tmp_path: Path) -> None:
    done = compiled(*archs, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_no_interpreter_runs_compiles_as_far_as_its_layouts(tmp_path: Path) -> None:
    """The kernels in Gluon. Those in Triton are run by the interpreter in tests of their own."""
    done = compiled("--layouts", cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
