"""Filling a model's tensors from safetensors files or from a random generator. Knows names and shapes, not what they do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from saccade.config import ConfigError

_INDEX = "model.safetensors.index.json"
_SHOWN = 5  # names listed in an error before it only counts


@dataclass(frozen=True, slots=True)
class Rule:
    """A checkpoint's name -> ours. `{}` is a layer number, a final `*` the last part of the name (weight or bias).

    Without a target the tensor is known and not needed.
    """

    source: str
    target: str | None

    def match(self, name: str) -> tuple[str, ...] | None:
        """What stands for `{}` and `*` in this name, or None when the rule is not about it."""
        pattern = re.escape(self.source).replace(r"\{\}", r"(\d+)").replace(r"\*", r"(\w+)")
        found = re.fullmatch(pattern, name)
        return found.groups() if found else None


def under(rules: Iterable[Rule], sources: Sequence[str], target: str) -> tuple[Rule, ...]:
    """The same rules one level deeper. Checkpoints of different ages put a part at different places: all `sources`."""
    return tuple(
        Rule(source + rule.source, None if rule.target is None else target + rule.target)
        for rule in rules
        for source in sources
    )
