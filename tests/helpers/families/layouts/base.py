"""A small checkpoint in the layout of remote code, and the same model in Transformers' own layout.

Names and fields are written as they are published, apart from the table that reads them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from saccade.checkpoint import hf_processor
from tests.helpers.conformance.theirs import Theirs

Weights = dict[str, torch.Tensor]
Names = Iterable[tuple[str, str]]


class Published(NamedTuple):
    original: Callable[[Path], Path]  # fills a folder
    config: Callable[[Any], dict[str, Any]]  # config.json, of Transformers' config
    weights: Callable[[Weights, Any], Weights]
    image: str  # what a raw prompt says where an image goes
    files: Mapping[str, Mapping[str, Any]] = {}  # others
    stored: bool = False  # `weights` takes them by the names of the original's file
    copied: tuple[str, ...] = ()  # files of the original
    theirs: type[Theirs] = Theirs
    is_named: bool = False  # the tokenizer's config has names for the processor's tokens
    large: tuple[int, int] | None = None  # a picture beyond the sizes that are asked of all
    shrunk: Callable[[], AbstractContextManager[Any]] = nullcontext  # around its use: sizes that no config says

    def write(self, original: Path, folder: Path) -> Path:
        kind, config = hf_processor.model_class(original, "any")
        by_name = load_file(original / "model.safetensors")
        if not self.stored:
            by_name = dict(kind.from_pretrained(original, dtype=torch.float32).state_dict())
        weights = self.weights(by_name, config)
        folder.mkdir()
        for name in ("tokenizer.json", *self.copied):
            shutil.copy(original / name, folder)
        named = json.loads((original / "tokenizer_config.json").read_text())
        plain = {key: named[key] for key in named if self.is_named or key in ("eos_token", "pad_token", "bos_token")}
        remote = {"AutoConfig": "configuration_remote.Config", "AutoModel": "modeling_remote.Model"}
        for name, fields in {
            "config.json": {**self.config(config), "auto_map": remote, "torch_dtype": "float32"},
            "tokenizer_config.json": {**plain, "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 8192},
            **self.files,
        }.items():
            (folder / name).write_text(json.dumps(fields))
        (folder / "modeling_remote.py").write_text("raise SystemExit('code of a checkpoint was run')")
        save_file({name: weight.contiguous().clone() for name, weight in weights.items()}, folder / "model.safetensors")
        return folder


def renamed(weights: Weights, names: Names) -> Weights:
    """By whole names; `#` is a layer's number. What has no other name keeps its own."""
    patterns = [(re.compile(re.escape(ours).replace(r"\#", r"(\d+)")), theirs) for ours, theirs in names]
    return {_renamed(name, patterns): weight for name, weight in weights.items()}


def _renamed(name: str, patterns: list[tuple[re.Pattern[str], str]]) -> str:
    stem, _, end = name.rpartition(".")
    for pattern, theirs in patterns:
        for whole, rest in ((name, ""), (stem, f".{end}")):
            if match := pattern.fullmatch(whole):
                return theirs.replace("#", (match.groups() or ("",))[0]) + rest
    return name


def unchanged(weights: Weights, config: Any) -> Weights:
    return weights
