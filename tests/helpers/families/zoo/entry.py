"""What the zoo says of a family: how its small checkpoint is made, and what a prompt says where an image goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

BUDGET = 128  # tokens that an indexer selects: a context of more is not served


class Entry(NamedTuple):
    build: Callable[[Path], Path]  # fills the folder with a random checkpoint of a few layers
    image: str  # what a raw prompt says where an image goes, as its processor expects it
    options: Mapping[str, Any] = MappingProxyType({})  # of `LLM`, beside those of every family
    pads_together: bool = False  # Transformers pads images of a prompt to one size, and convolutions see the edge
    refusal: str | None = None  # of a family that is not served: a part of the sentence
