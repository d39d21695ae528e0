"""A profile is written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from saccade.engine.profiler import Profiler
from saccade.errors import ConfigError


def test_a_profile_that_finds_no_place_leaves_no_file_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: torch.profiler.profile, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    profiler = Profiler(str(tmp_path))
    profiler.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", full)
        with pytest.raises(ConfigError, match=": No space left on device"):
            profiler.stop()
    assert not list(tmp_path.iterdir())
    profiler.start()
    assert profiler.stop().exists()
