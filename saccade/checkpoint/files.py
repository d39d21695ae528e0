"""File access of a checkpoint folder, which is untrusted: size, depth and names are limited.

Symbolic links are followed, as the hub's cache consists of them; `links_out` lists those that lead elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.errors import ConfigError
from saccade.util.plain_files import open_plain

SETTINGS_BYTES = 8 << 20  # published ones have at most a tenth
INDEX_BYTES = 64 << 20  # the largest MoE models have 10 MB
TOKENIZER_BYTES = 128 << 20  # the largest vocabularies have 35 MB
TEMPLATE_BYTES = 1 << 20
HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_MAX_LEVELS = 64
_MAX_NAME = 255
_SHOWN = 100


def read_text(file: Path, maximum: int = SETTINGS_BYTES) -> str:
    """A whole file; ConfigError if it is larger, not a regular file, or not UTF-8."""
    try:
        if not file.is_file():
            raise ConfigError(f"{file} is missing or no plain file; download it again")
        with open_plain(file) as stream:
            data = stream.read(maximum + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); check its permissions") from None
    if len(data) > maximum:
        message = f"{file} has {file.stat().st_size} bytes, and at most {maximum} are read of such a file"
        raise ConfigError(message)
    try:
        return data.decode()
    except ValueError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}); download it again") from None


def read_json(file: Path, maximum: int = SETTINGS_BYTES) -> dict[str, Any]:
    return parse_json(read_text(file, maximum), file)


def read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def parse_json(text: str, file: Path) -> dict[str, Any]:
    """Parse the text of `file`, with a limit on nesting so that recursion over it is safe."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from None
    except RecursionError:
        raise _too_deep(file) from None
    if not isinstance(value, dict):
        message = f"{file} cannot be read: it holds {type(value).__name__}, not an object; download it again"
        raise ConfigError(message)
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise _too_deep(file)
    return value


def _inner(value: Any) -> list[Any]:
    """The containers inside a container."""
    values = value.values() if isinstance(value, dict) else value
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _too_deep(file: Path) -> ConfigError:
    return ConfigError(f"{file} is nested more than {_MAX_LEVELS} levels deep; download it again")


def weight_files(index: Path) -> list[str]:
    """The files that a model.safetensors.index.json names, whether they exist or not."""
    try:
        weight_map = read_json(index, INDEX_BYTES).get("weight_map")
    except ConfigError as error:
        raise ConfigError(f"{index} is not a readable list of weight files: {error}") from None
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        reason = "it has no weight_map from tensors to files"
        raise ConfigError(f"{index} is not a readable list of weight files: {reason}")
    return sorted({checked_name(name, index) for name in weight_map.values()})


def check_named_files(settings: Mapping[str, Any], file: Path) -> None:
    """Check file names in settings (`vocab_file`, `fast_tokenizer_files`), which libraries open."""
    for key, value in settings.items():
        if key.endswith(("_file", "_files")):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    checked_name(name, file)


def checked_name(name: str, file: Path) -> str:
    """The name, if it stays inside the folder of the file that contains it."""
    path = PurePosixPath(name)
    is_valid = name.isprintable() and "\\" not in name and 0 < len(name) <= _MAX_NAME
    if not is_valid or path.is_absolute() or ".." in path.parts:
        rule = "names must stay inside the folder, without .. or a leading /"
        raise ConfigError(f"{file} names the file {name[:_SHOWN]!r}; {rule}")
    return name


def links_out(folder: Path) -> list[str]:
    """Links to outside of the folder or, for a folder in the hub's cache, of the model's cache."""
    home = Path(os.path.realpath(folder))
    if home.parent.name == "snapshots":  # models--owner--name/snapshots/commit, linked to its blobs
        home = home.parent.parent
    links = (file for file in sorted(folder.iterdir()) if file.is_symlink())
    return [file.name for file in links if not Path(os.path.realpath(file)).is_relative_to(home)]
