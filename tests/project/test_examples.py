"""Every example runs as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.media.images import make_photo

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_example_runs_without_arguments(path: Path, tmp_path: Path) -> None:
    assert run(path, cwd=tmp_path)


def test_an_example_takes_a_model_and_a_picture(qwen2_vl_folder: Path, tmp_path: Path) -> None:
    image = tmp_path / "photo.png"
    make_photo(224, 168).save(image)
    assert "photo.png: 224x168" in run(EXAMPLES[0], "--model", qwen2_vl_folder, image, cwd=tmp_path)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
