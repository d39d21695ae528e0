"""Errors of the interface: one readable sentence each, with values and what to change; checks of values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


class RequestError(ValueError):
    """The client's mistake. It ends one request and nothing else."""

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, key: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code  # one of OpenAI's error codes, where one fits
        self.param = param  # the part of the request at fault, such as "messages[2].content[1].image_url"
        self.key = key  # content key of the image at fault, from the engine, which knows no `param`

    def renamed(self, param: str) -> RequestError:
        """The same, about a part as the client calls it."""
        message = self.message
        if self.param is not None and message.startswith(self.param):
            message = param + message.removeprefix(self.param)
        return RequestError(message, code=self.code, param=param)

    def about(self, param: str | None) -> RequestError:
        """The same, about this part unless it names one itself."""
        return RequestError(self.message, code=self.code, param=self.param or param)

    def located(self, where: Mapping[bytes, str]) -> RequestError:
        """The same, with the part in which a request has the picture."""
        if self.key is None or self.key not in where:
            return self
        return self.renamed(where[self.key])


class ConfigError(ValueError):
    """The operator's mistake: a setting or a checkpoint that cannot work."""


class UsageError(ConfigError):
    """An option that does not exist, or whose value cannot be: nothing was looked at yet."""


class EngineUnavailable(Exception):
    """The engine starts, restarts, drains or died. Nothing is wrong with the request."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after  # seconds after which it may be worth another try


def reason_of(error: Exception) -> str:
    """In words: errors of the system have them apart, and some have none."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_int_within(value: object, low: float = -math.inf, high: float = math.inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number_within(value: object, low: float = -math.inf, high: float = math.inf) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_list_of(value: object, kind: type, low: int = 0, high: float = math.inf) -> TypeGuard[Sequence[Any]]:
    """`low` and `high`: how many."""
    if not isinstance(value, (list, tuple)):
        return False
    return low <= len(value) <= high and all(isinstance(entry, kind) for entry in value)


def member(value: Any, name: str) -> Any:
    """What an object has under a name. None: nothing, or it is no object."""
    return value.get(name) if isinstance(value, Mapping) else None


def is_text(value: object) -> TypeGuard[str]:
    """A string that is not empty."""
    return isinstance(value, str) and value != ""


def quoted(value: object, maximum: int = 80) -> str:
    """A client's value as an error repeats it: recognisable, and short however long the value is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = maximum
    short.maxlevel = 2
    text = short.repr(value)
    return text if len(text) <= maximum else f"{text[: maximum - 3]}..."
