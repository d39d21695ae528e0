"""Models to plan for: cards of published sizes, folders, hub ids in the local cache. Reads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.processor.checkpoint_files import Checkpoint, on_paper_config, open_checkpoint, overridden

_CARDS = Path(__file__).with_name("model_cards.json")
_SUFFIX = r"(-(instruct|thinking|chat|hf|ov|base|\d{4}))*"  # of published names that share a size


def find_model(name: str) -> Checkpoint:
    """A folder, else a card, else a hub id whose small files are in the local cache."""
    card = None if Path(name).expanduser().is_dir() else _card_named(name)
    if card is not None:
        return read_card(card)
    try:
        return open_checkpoint(name, weights=False, is_local=True, on_paper=True)
    except ConfigError as error:
        raise ConfigError(f"{error}; `saccade plan` alone lists the built-in cards") from None


def card_names() -> list[str]:
    return list(_cards()["cards"])


def read_card(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Checkpoint:
    """A card as a checkpoint without files. `changes` to its config.json give shapes beside the published."""
    card = _cards()["cards"][name]
    family = _cards()["families"][card["family"]]
    raw = overridden(overridden(family["config"], card["config"]), changes)
    return Checkpoint(
        path=Path(name),
        config=on_paper_config(raw, {}) or model_config(raw),
        image_processor=family["image_processor"],
        video_processor=family.get("video_processor", {}),
        processor=family.get("processor", {}),
        tokenizer_config={},
        tokenizer_path=Path(name),
        chat_template=None,
        generation={},
        fingerprint=b"",
    )


def _card_named(name: str) -> str | None:
    """Names are compared without case and suffixes such as -Instruct; the owner may be left out."""
    for card in card_names():
        owner, _, short = card.rpartition("/")
        pattern = f"({re.escape(owner)}/)?{re.escape(short)}{_SUFFIX}"
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return card
    return None


@cache
def _cards() -> dict[str, Any]:
    cards: dict[str, Any] = json.loads(_CARDS.read_text("utf-8"))
    return cards
