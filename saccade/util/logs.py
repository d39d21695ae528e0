"""The form of log lines in every process: text or JSON, with time and level. Knows nothing of their content.

A record may carry `extra={"fields": {...}}`: JSON has these beside the message, text only the message.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any

LEVEL_VARIABLE = "SACCADE_LOG_LEVEL"
FORMAT_VARIABLE = "SACCADE_LOG_FORMAT"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def set_up(level: str, form: str, name: str = "") -> None:
    """Log to stderr. `name` says which process this is, where there are several."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(name) if form == "json" else _Text(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_up_worker(name: str) -> None:
    """Logs as the server's process, which starts this one; its variables tell how.

    Warnings and errors only: reasons for automatic values reach the server in a message, and it logs them.
    """
    level = os.environ.get(LEVEL_VARIABLE)
    if level not in ("error", "critical"):
        level = "warning"
    set_up(level, os.environ.get(FORMAT_VARIABLE, "text"), name)


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO engine 0: message`; a traceback follows on indented lines.

    What an exception says may be a client's text, and must not look like a line of the log.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = f"{name}: " if name else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname} {self._name}{_escaped(record.message)}"

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


class _Json(logging.Formatter):
    """One object a line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._own = {"process": name} if name else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._own,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _time(record: logging.LogRecord) -> str:
    """UTC, as RFC 3339 writes it."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
