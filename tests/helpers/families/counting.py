"""Checkpoints of the zoo beside their counting rules: with the small settings they have, and with published ones."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.checkpoint import hf_processor
from saccade.checkpoint.hf_shapes import SizeRuns
from saccade.errors import RequestError
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import counting_proof
from saccade.processor.families.counting_proof import Counted, Written
from saccade.processor.families.counting_rules import TABLE, Rule
from saccade.processor.families.fallback import counted_from
from saccade.types.media import Size
from tests.helpers.families.family_fallback import tokenizer_with
from tests.helpers.families.zoo import ZOO

NAMES = [name for name in ZOO if name in TABLE["models"]]
STANDING_IN = ("lfm2_vl", "llama4", "unlimited_ocr")  # whose zoo entry has another family's processor
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {  # what published files say beyond the defaults of classes
    "lighton_ocr": {"patch_size": 14, "spatial_merge_size": 2, "image_processor": {"patch_size": 28}},
    "llama4": {"processor_class": "Llama4Processor"},
    "paligemma": {"image_processor": {"image_seq_length": 256}},
}
_LLAMA4 = ("image", "patch", "image_start", "image_end", "tile_x_separator", "tile_y_separator")


class Pair(NamedTuple):
    """A rule, and its checkpoint's own processor."""

    rule: Rule
    runs: SizeRuns
    frame: hf_processor.Frame
    image_ids: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path) -> Pair:
        checkpoint = open_checkpoint(str(folder), weights=False)
        config = checkpoint.config
        processor = hf_processor.load_processor(folder, config.model_type)
        place = hf_processor.placeholder(processor, config)
        ids = [config.image_token_id, processor.tokenizer.convert_tokens_to_ids(place.token)]
        if config.model_type == "llama4":
            ids = processor.tokenizer.convert_tokens_to_ids(["<|patch|>"])
        runs, frame = SizeRuns(processor, place.written), hf_processor.frame_of(processor, place)
        return cls(Rule(checkpoint), runs, frame, tuple(token for token in ids if token is not None))

    def counted(self, size: Size) -> Counted | None:
        try:
            return counted_from(self.runs(size), self.frame)
        except Exception:  # it takes no such size
            return None

    def differences(self, sizes: Iterator[Size]) -> list[str]:
        written = Written(self.rule, self.image_ids, frozenset())
        return [text for size in sizes if (text := self._difference(written, size))]

    def _difference(self, written: Written, size: Size) -> str:
        counted = self.counted(size)
        try:
            picture = self.rule(size)
        except RequestError:
            return "" if counted is None else f"{size}: the rule refuses it"
        if counted is None:
            return f"{size}: the processor refuses it"
        return "" if written.learn(picture, counted) else f"{size}: {len(counted.token_ids)} tokens, not {picture}"


def sizes(number: int, longest: float = 12.0) -> Iterator[Size]:
    """Those that are tried at start, then random ones; powers of two bound the sides."""
    yield from (Size(*sides) for sides in counting_proof.PROBES)
    generator = random.Random(number)
    for _ in range(number):
        width, height = (int(2 ** generator.uniform(2, longest)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            yield Size(width, height)


def published(folder: Path, name: str, to: Path) -> Path:
    """The same checkpoint with the settings of its processor's classes."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    file = to / "processor_config.json"
    kind = json.loads(file.read_text())["processor_class"]
    row = TABLE["models"][name]
    while "images" not in row:
        row = TABLE["models"][row["like"]]
    more = dict(_PUBLISHED.get(name, {}))
    images = {"image_processor_type": row["images"], **more.pop("image_processor", {})}
    file.write_text(json.dumps({"processor_class": kind, "image_processor": images, **more}))
    if name == "llama4":
        _with_tokens_of_llama4(to)
    return to


def _with_tokens_of_llama4(folder: Path) -> None:
    tokenizer_with(*(f"<|{name}|>" for name in _LLAMA4)).save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("extra_special_tokens", None)
    file.write_text(json.dumps({key: value for key, value in settings.items() if "image" not in key}))
