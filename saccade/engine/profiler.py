"""Profiles of the engine's process, by torch: what the host and the device did between start and stop."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import torch

from saccade.errors import ConfigError

_SAFE = re.compile(r"[\w.-]{1,64}")


class Profiler:
    """One profile at a time, written as a Chrome trace into `folder`; without one, nothing is profiled."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._running: torch.profiler.profile | None = None
        self._prefix = ""

    def start(self, prefix: str | None = None) -> None:
        if self._folder is None:
            raise ConfigError("profiles need a folder: give profile_dir (--profile-dir)")
        if self._running is not None:
            raise ConfigError("a profile is running; stop it first")
        if prefix is None:
            prefix = "saccade"
        if not _SAFE.fullmatch(prefix):
            raise ConfigError(f"the prefix of a profile has letters, digits, _ . and -, not {prefix[:80]!r}")
        self._folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=activities)
        running.start()
        self._running = running
        self._prefix = prefix

    def stop(self) -> Path:
        """The file that was written."""
        if self._running is None or self._folder is None:
            raise ConfigError("no profile is running; start one first")
        running = self._running
        self._running = None
        running.stop()
        file = self._folder / f"{self._prefix}-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        try:
            running.export_chrome_trace(str(file))
        except OSError as error:
            file.unlink(missing_ok=True)
            raise ConfigError(f"the profile cannot be written to {file}: {error.strerror}") from None
        return file
