"""Every example runs as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.images import make_photo

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_example_runs(path: Path, qwen2_vl_folder: Path, tmp_path: Path) -> None:
    image = tmp_path / "photo.png"
    make_photo(224, 168).save(image)
    done = subprocess.run(
        [sys.executable, path, qwen2_vl_folder, image], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
