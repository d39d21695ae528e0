"""Small checkpoints that are made once for all tests and workers of a run. Each test gets a copy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = "CHECKPOINTS_OF_TESTS"  # the variable with the folder of this run; without it each is made anew


def made_once(build: Callable[..., Path]) -> Callable[..., Path]:
    """`build(folder, ...)` fills a folder; with the same arguments it writes the same files."""

    @wraps(build)
    def copied(folder: Path, *given: Any, **named: Any) -> Path:
        if FOLDER not in os.environ:
            return build(folder, *given, **named)
        case = json.dumps([build.__module__, build.__qualname__, given, named], sort_keys=True, default=repr)
        kept = Path(os.environ[FOLDER]) / hashlib.sha256(case.encode()).hexdigest()[:16]
        if not kept.exists():
            _make(kept, lambda made: build(made, *given, **named))
        shutil.copytree(kept, folder, copy_function=_replace, dirs_exist_ok=True)
        return folder

    return copied


def _replace(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)  # a model may have its weights mapped from there
    shutil.copyfile(source, target)


def _make(kept: Path, build: Callable[[Path], Path]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=kept.parent))
    made.chmod(0o755)
    build(made)
    try:
        made.rename(kept)  # whole, or not at all
    except OSError:  # another worker was quicker
        shutil.rmtree(made)
