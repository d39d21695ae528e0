"""Numbers of the command line, as argparse types: what is out of range is a usage error."""

from __future__ import annotations

import argparse

_LARGEST = 1e9  # of any number of an argument


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {_LARGEST:g}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    try:
        return count(width), count(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no size such as 1280x720") from None


def whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value
