"""A checkpoint's tokenizer in the words of tokenizer.json: that file, or made from a tiktoken file. Encodes no text.

A tiktoken file is a list of byte strings with their ranks. Where text is cut before they apply, and which control
tokens stand behind them, is written in no file: it is here, under the name of the file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from saccade.checkpoint.files import TOKENIZER_BYTES, read_json, read_text
from saccade.errors import ConfigError

Ranks = dict[bytes, int]
_MAX_BYTES = 1024  # of a token: finding the pair it is made from takes their square


class Conventions(NamedTuple):
    """What a tiktoken file leaves unsaid."""

    cut: str  # expression for the pieces that text is cut into; nothing merges across them
    control: tuple[str, ...]  # behind the ranks, in this order
    marks: tuple[str, ...]  # in models that see, behind those: markup that clients and answers may contain
    images: tuple[str, ...]  # and what stands for pictures


_KNOWN: Mapping[str, Conventions] = {
    "qwen.tiktoken": Conventions(
        cut=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
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
    for name, conventions in _KNOWN.items():
        if (folder / name).is_file():
            return _made_from(folder / name, conventions, sees=_sees(folder))
    raise ConfigError(f"{file} is missing; save the tokenizer in its fast form (tokenizer.json)")


def added_tokens(file: Path) -> dict[str, int]:
    """What a tokenizer.json adds to its vocabulary, for those who need an id and no tokenizer."""
    tokenizer = read_json(file, TOKENIZER_BYTES)
    try:
        return {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens") or ()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer ({error}); download it again") from None


def as_markup(spec: str, names: Collection[str]) -> str:
    """The same tokenizer.json, in which these tokens are plain words: sent by clients, shown in answers."""
    tokenizer = json.loads(spec)
    for token in tokenizer.get("added_tokens") or ():
        token["special"] = token.get("special", False) and token["content"] not in names
    return json.dumps(tokenizer)


def _sees(folder: Path) -> bool:
    """Checkpoints of one name have a tower or none, and only the former know tokens for pictures."""
    config = folder / "config.json"
    return config.is_file() and bool(read_json(config).get("visual"))


def _made_from(file: Path, conventions: Conventions, *, sees: bool) -> str:
    ranks = _ranks(file)
    shown = conventions.marks if sees else ()
    added = (*conventions.control, *shown, *(conventions.images if sees else ()))
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [_added(token, len(ranks) + i, token not in shown) for i, token in enumerate(added)],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": _cutting(conventions.cut),
            "post_processor": None,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "vocab": {_spelled(token): rank for token, rank in ranks.items()},
                "merges": [[_spelled(left), _spelled(right)] for left, right in merges_of(ranks)],
                "ignore_merges": True,  # a piece that is a token is not put together from its bytes
            },
        }
    )


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _cutting(expression: str) -> dict[str, Any]:
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
    """Control tokens count on behind the last rank, and text without a token for one of its bytes would lose it."""
    longest = max(map(len, ranks), default=0)
    if longest > _MAX_BYTES:
        raise ConfigError(f"{file} has a token of {longest} bytes; at most {_MAX_BYTES} are taken: download it again")
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        highest = max(ranks.values(), default=None)
        raise ConfigError(
            f"{file} cannot be read as ranks of tokens: it has {len(ranks)} of them, the last ranked {highest}, and "
            f"lacks {missing} of the 256 bytes; ranks count from 0, none twice: download it again"
        )


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Which pair each token is made from, in the order of ranks.

    A token that comes from no pair is never reached by merging; only a whole piece can be one.
    """
    pairs = (_pair(token, ranks, rank) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    return [pair for pair in pairs if pair]


def _pair(token: bytes, ranks: Ranks, rank: int) -> tuple[bytes, bytes] | None:
    """The last two parts that lower ranks leave of it. Most tokens have one pair of tokens to choose from."""
    cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    if len(cuts) == 1:
        return token[: cuts[0]], token[cuts[0] :]
    parts = _parts(token, ranks, rank) if cuts else []
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _parts(token: bytes, ranks: Ranks, below: int) -> list[bytes]:
    """The token merged as far as ranks below its own go, the lowest one first and the leftmost of equals."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, below) for left, right in pairwise(parts)]
        lowest = min(pairs)
        if lowest >= below:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters() -> dict[int, str]:
    """Byte-level vocabularies are written in letters: a byte that prints is itself, the others follow behind 255."""
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_LETTERS = str.maketrans({chr(byte): letter for byte, letter in _letters().items()})


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_LETTERS)
