"""tokenizer.json of a checkpoint: read, or converted from a tiktoken file.

A tiktoken file is a list of byte strings with their ranks. Its pre-tokenizer pattern and control tokens are
in no file of the checkpoint, so they are here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from saccade.checkpoint.files import TOKENIZER_BYTES, read_json, read_optional, read_text
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError

Ranks = dict[bytes, int]
_MAX_BYTES = 1024  # of a token: finding its merge takes quadratic time


class Conventions(NamedTuple):
    """What a tiktoken file lacks."""

    pattern: str  # of the pre-tokenizer
    control: tuple[str, ...]  # ids after the ranks, in this order
    marks: tuple[str, ...]  # then, for models with a tower: markup in prompts and outputs
    images: tuple[str, ...]  # and image tokens


_TIKTOKEN_FILES: Mapping[str, Conventions] = {
    "qwen.tiktoken": Conventions(
        pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        control=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        marks=("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>"),
        images=("<img>", "</img>", "<imgpad>"),
    )
}


def read_tokenizer(folder: Path) -> str:
    """The text of a tokenizer.json."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return read_text(file, TOKENIZER_BYTES)
    for name, conventions in _TIKTOKEN_FILES.items():
        if (folder / name).is_file():
            return _converted(folder / name, conventions, has_tower=_has_tower(folder))
    raise ConfigError(f"{file} is missing; save the tokenizer in its fast form (tokenizer.json)")


def added_tokens(file: Path) -> dict[str, int]:
    """Ids of the added tokens of a tokenizer.json."""
    return _ids(file, has_vocabulary=False)


def all_tokens(file: Path) -> dict[str, int]:
    """Ids of its vocabulary too, if that is one by name."""
    return _ids(file, has_vocabulary=True)


def _ids(file: Path, *, has_vocabulary: bool) -> dict[str, int]:
    tokenizer = read_json(file, TOKENIZER_BYTES)
    try:
        added = {token["content"]: int(token["id"]) for token in setting(tokenizer, "added_tokens", ())}
        vocabulary = tokenizer["model"]["vocab"] if has_vocabulary else {}
        return {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer ({error}); download it again") from None


def as_markup(spec: str, names: Collection[str]) -> str:
    """The same tokenizer.json with these tokens not special: clients and outputs may contain them."""
    tokenizer = json.loads(spec)
    for token in setting(tokenizer, "added_tokens", ()):
        token["special"] = token.get("special", False) and token["content"] not in names
    return json.dumps(tokenizer)


def _has_tower(folder: Path) -> bool:
    """Whether the checkpoint has a vision tower, and so tokens for images."""
    return bool(read_optional(folder / "config.json").get("visual"))


def _converted(file: Path, conventions: Conventions, *, has_tower: bool) -> str:
    ranks = _ranks(file)
    marks = conventions.marks if has_tower else ()
    tokens = (*conventions.control, *marks, *(conventions.images if has_tower else ()))
    model = {
        "type": "BPE",
        "vocab": {_spelled(token): rank for token, rank in ranks.items()},
        "merges": [[_spelled(head), _spelled(tail)] for head, tail in merges_of(ranks)],
        "ignore_merges": True,  # a whole piece that is a token needs no merges
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [_added(token, len(ranks) + i, token not in marks) for i, token in enumerate(tokens)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _pre_tokenizer(conventions.pattern),
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": model,
    }
    return json.dumps(tokenizer)


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _pre_tokenizer(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]}


def _added(content: str, token_id: int, is_special: bool) -> dict[str, Any]:
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": is_special, **whole}


def _ranks(file: Path) -> Ranks:
    """Lines of a token in base64 and its rank."""
    try:
        lines = (line.split() for line in read_text(file, TOKENIZER_BYTES).splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ConfigError:
        raise
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as ranks of tokens ({error}); download it again") from None
    _check_whole(ranks, file)
    return ranks


def _check_whole(ranks: Ranks, file: Path) -> None:
    """Ranks must be contiguous, as control tokens follow them, and include all 256 bytes."""
    longest = max(map(len, ranks), default=0)
    if longest > _MAX_BYTES:
        message = f"{file} has a token of {longest} bytes; at most {_MAX_BYTES} are taken: download it again"
        raise ConfigError(message)
    num_absent = sum(bytes([byte]) not in ranks for byte in range(256))
    if num_absent or sorted(ranks.values()) != list(range(len(ranks))):
        highest = max(ranks.values(), default=None)
        ranks_there = f"it has {len(ranks)} of them, the last ranked {highest}"
        rule = f"and lacks {num_absent} of the 256 bytes; ranks count from 0, none twice"
        raise ConfigError(
            f"{file} cannot be read as ranks of tokens: {ranks_there}, {rule}: download it again"
        )


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The merge of each token, in the order of ranks. A token without one is only used for a whole piece."""
    pairs = (_pair(token, ranks, rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    return [pair for pair in pairs if pair]


def _pair(token: bytes, ranks: Ranks, rank: int) -> tuple[bytes, bytes] | None:
    """The two parts that lower ranks merge a token into. For nearly all tokens there is one candidate."""
    cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    if len(cuts) == 1:
        return token[: cuts[0]], token[cuts[0] :]
    if cuts:
        match _parts(token, ranks, rank):
            case [head, tail]:
                return head, tail
    return None


def _parts(token: bytes, ranks: Ranks, below: int) -> list[bytes]:
    """The token after all merges of ranks below its own, lowest and leftmost first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(head + tail, below) for head, tail in pairwise(parts)]
        lowest = min(pairs)
        if lowest >= below:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters() -> dict[int, str]:
    """GPT-2's byte-to-unicode table: a printable byte is itself, the others start at 256."""
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    unprintable = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}


_LETTERS = str.maketrans({chr(byte): letter for byte, letter in _letters().items()})


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_LETTERS)
