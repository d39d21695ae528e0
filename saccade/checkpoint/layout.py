"""What is known of a published layout: a row of `layout_table.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Fields = Mapping[str, Any]


class Split(NamedTuple):
    """A weight that is several in the class: parts of its rows, one after the other."""

    part: str  # of its name
    becomes: tuple[str, ...]
    in_groups: bool = False  # heads of queries, the key and the value of a group lie together


class Layout(NamedTuple):
    words: Callable[[Fields], dict[str, Any]]  # config.json as the class has it; may raise ConfigError
    processor: Callable[[Fields, Fields], dict[str, Any]] | None = (
        None  # from that and preprocessor_config.json
    )
    image: str | None = None  # token for a picture, where config.json does not say its number
    written: str = ""  # what a chat has for a picture, where the checkpoint's template leaves that to code
    between: str = ""  # parts of a message, in that case
    takes_texts: bool = False  # the template frames texts alone, although it writes pictures
    tokens: Mapping[str, str] = {}  # by the names that the processor asks the tokenizer for
    renames: tuple[tuple[str, str], ...] = ()  # of weights, one after the other: pattern, replacement
    splits: tuple[Split, ...] = ()
    left_out: tuple[str, ...] = ()  # beginnings of names of weights that are not served
    unread: str = ""  # part of the names of the class's weights that stay random, as none runs
    patch: int | None = None  # pixels: tiles of the processor become patches with grids
    adapter: str | None = None  # field of config.json with the rank of a LoRA that is added to the weights


_OF_CODE = ("_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map")


def without_code(fields: Fields) -> dict[str, Any]:
    """A config without what is said to the code that it was published for."""
    return {name: value for name, value in fields.items() if name not in _OF_CODE}


def picked(fields: Fields, *same: str, **names: str) -> dict[str, Any]:
    """What is there; some by the class's names for the layout's."""
    wanted = {**{name: name for name in same}, **names}
    return {ours: fields[theirs] for ours, theirs in wanted.items() if fields.get(theirs) is not None}
