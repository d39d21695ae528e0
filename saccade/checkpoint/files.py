"""Reads files of a checkpoint folder. The folder is input: size and depth have limits, names lead nowhere else.

Names in its files are plain names below it. Links are followed, because the hub's cache is made of them and operators
make their own; `links_out` tells those that lead elsewhere. Knows JSON, not what a value means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.errors import ConfigError

SETTINGS_BYTES = 8 << 20  # published ones have at most a tenth of it
INDEX_BYTES = 64 << 20  # of the largest models with experts: 10 MB
TOKENIZER_BYTES = 128 << 20  # the largest vocabularies: 35 MB
TEMPLATE_BYTES = 1 << 20
HEADER_BYTES = 100_000_000  # of a weight file, by the rule of its format
_MAX_LEVELS = 64
_MAX_NAME = 255
_SHOWN = 100


def read_text(file: Path, maximum: int = SETTINGS_BYTES) -> str:
    """A whole file; ConfigError if it is larger, no plain file, or not UTF-8."""
    try:
        return _bytes(file, maximum).decode()
    except ValueError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}); download it again") from None


def _bytes(file: Path, maximum: int) -> bytes:
    try:
        if not file.is_file():
            raise ConfigError(f"{file} is missing or no plain file; download it again")
        with file.open("rb") as stream:
            data = stream.read(maximum + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); check its permissions") from None
    if len(data) > maximum:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes, and at most {maximum} are read of such a file")
    return data


def read_json(file: Path, maximum: int = SETTINGS_BYTES) -> dict[str, Any]:
    return parse_json(read_text(file, maximum), file)


def read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def parse_json(text: str, file: Path) -> dict[str, Any]:
    """The object in a text that came from `file`, no deeper than whoever walks through it can go."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from None
    except RecursionError:
        raise _too_deep(file) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} cannot be read: it holds {type(value).__name__}, not an object; download it again")
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise _too_deep(file)
    return value


def _inner(value: Any) -> list[Any]:
    """What is nested in a value and may itself hold something."""
    values = value.values() if isinstance(value, dict) else value
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _too_deep(file: Path) -> ConfigError:
    return ConfigError(f"{file} is nested more than {_MAX_LEVELS} levels deep; download it again")


def weight_files(index: Path) -> list[str]:
    """The files that a model.safetensors.index.json names, whether they are there or not."""
    try:
        given = read_json(index, INDEX_BYTES).get("weight_map")
    except ConfigError as error:
        raise ConfigError(f"{index} is not a readable list of weight files: {error}") from None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given.values()):
        raise ConfigError(f"{index} is not a readable list of weight files: it has no weight_map from tensors to files")
    return sorted({plain_name(name, index) for name in given.values()})


def check_named_files(settings: Mapping[str, Any], file: Path) -> None:
    """What settings name as files (`vocab_file`, `fast_tokenizer_files`), for libraries that open them."""
    for key, value in settings.items():
        if key.endswith(("_file", "_files")):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    plain_name(name, file)


def plain_name(name: str, file: Path) -> str:
    """The name, if it stays below the folder of the file it stands in."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and 0 < len(name) <= _MAX_NAME
    if not is_plain or path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"{file} names the file {name[:_SHOWN]!r}; names must stay inside the folder, without .. or a leading /"
        )
    return name


def links_out(folder: Path) -> list[str]:
    """Files that are links to outside of the folder, or of the hub's cache of this model where it is a part of one."""
    home = Path(os.path.realpath(folder))
    if home.parent.name == "snapshots":  # models--owner--name/snapshots/commit, with links to models--owner--name/blobs
        home = home.parent.parent
    links = (file for file in sorted(folder.iterdir()) if file.is_symlink())
    return [file.name for file in links if not Path(os.path.realpath(file)).is_relative_to(home)]
