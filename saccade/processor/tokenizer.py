"""The tokenizer of a checkpoint (Hugging Face tokenizers), with protection against injected control tokens.

In a raw prompt control tokens count. In a chat only the template may write them. The rendered chat must be
tokenized as one string, or BPE merges across the seams would differ. So client text is *shielded* first: a
marker breaks every control token in it. After the template, whole control tokens are replaced by secret
*aliases*, the markers are removed, and a second tokenizer, which knows only the aliases, encodes the text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing

from saccade.checkpoint.files import read_optional
from saccade.checkpoint.tokenizer_json import as_markup, read_tokenizer
from saccade.errors import ConfigError, RequestError
from saccade.processor.dialects.reader import any_of

_MAX_BYTES = 4  # of a character in UTF-8
_MAX_PIECES = 4096  # cached token texts
_LONG = 1024  # ids: longer ones are decoded as a batch of one, which releases the GIL
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """`protect` names ids that client text must never become, beside special tokens and those that occur in
    `template`, a built-in chat template. Client text may contain the tokens in `markup`."""

    def __init__(
        self, path: Path, *, protect: Iterable[int] = (), template: str = "", markup: Collection[str] = ()
    ) -> None:
        spec = read_tokenizer(path)
        config = read_optional(path / "tokenizer_config.json")
        with _reading(path):
            self._spec = as_markup(spec, markup) if markup else spec
            self._inner = _open(self._spec)
            self._inner.encode("a")  # a file that can be opened may still make every text fail
        self._path = path
        self.named_tokens: Mapping[str, str] = _named_tokens(config)  # by the names that templates use
        _frame_as_asked(self._inner, config, self.named_tokens)
        self.is_bytewise = isinstance(self._inner.decoder, ByteLevel)
        self.piece = lru_cache(_MAX_PIECES)(partial(_piece, self._inner))
        tokens = self._inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in tokens.items() if token.special)
        ids = {token.content: i for i, token in tokens.items()}
        guarded = {*self._special_ids, *protect}
        names = set(self.named_tokens.values())
        self._protected = {t: i for t, i in ids.items() if i in guarded or t in names or t in template}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt: control tokens in the text count, and the tokenizer adds its own."""
        return _encode(self._inner, text, add_special_tokens)

    def encode_text(self, text: str) -> list[int]:
        """The ids without special tokens around them."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) > _LONG:
            return self._inner.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def stream(
        self, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> DecodeStream:
        return DecodeStream(self, skip_special_tokens, shown_ids)

    def token(self, token_id: int) -> str | None:
        return self._inner.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @property
    def eos_token_id(self) -> int | None:
        token = self.named_tokens.get("eos_token")
        return None if token is None else self._inner.token_to_id(token)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Byte-fallback tokens (<0x41>), if the vocabulary has them."""
        ids = [self._inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("A")]
        if letter is None or self._inner.decode([letter]) != "A":
            return frozenset()
        return frozenset(i for i in ids if i is not None)

    def shield(self, text: str) -> str:
        """Client text in which no control token is whole, nor becomes whole with its surroundings."""
        return self._shield(text)

    def unshield(self, rendered: str) -> str:
        """A rendered chat without the markers."""
        return rendered.replace(self._shield.marker, "")

    def encode_template(self, rendered: str) -> list[int]:
        """Ids of a chat rendered from shielded text. BOS is added unless the template wrote it first."""
        bos = self.named_tokens.get("bos_token")
        ids = self._aliased.encode(rendered, self._shield.marker)
        if bos and rendered.startswith(bos):
            return ids
        before, after = self._frame
        return [*before, *ids, *after]

    @cached_property
    def _shield(self) -> _Shield:
        return _Shield(self._protected)

    @cached_property
    def _aliased(self) -> _AliasTokenizer:
        with _reading(self._path):
            return _AliasTokenizer(self._spec, self._inner, self._protected)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after every text."""
        bare = self.encode("a", add_special_tokens=False)
        framed = self.encode("a")
        starts = (at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        at = next(starts, 0)
        return framed[:at], framed[at + len(bare) :]


class _Shield:
    """Breaks control tokens in client text with a secret marker. One of a single character stays whole."""

    def __init__(self, protected: Mapping[str, int]) -> None:
        # Digits between private-use characters: no template filter (case, strip) changes them.
        self.marker = f"\ue0f0{secrets.randbits(128):039d}\ue0f1"
        self._whole = re.compile(f"(?={any_of(protected)})")
        self._heads = {token[:n] for token in protected for n in range(1, len(token))}
        self._tails = {token[n:] for token in protected for n in range(1, len(token))}
        self._longest = max(map(len, protected), default=1) - 1

    def __call__(self, text: str) -> str:
        cuts = self._cuts(text)
        if not cuts:
            return text
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return self.marker.join(pieces)

    def _cuts(self, text: str) -> list[int]:
        """Where markers go: inside control tokens, prefixes of one at the end, suffixes at the start."""
        inside = {match.start() + 1 for match in self._whole.finditer(text)}
        reach = range(1, min(self._longest, len(text)) + 1)
        at_end = {len(text) - n + 1 for n in reach if text[-n:] in self._heads}
        at_start = {n - 1 for n in reach if text[:n] in self._tails}
        return sorted(inside | at_end | at_start)


class _AliasTokenizer:
    """The same tokenizer with every protected token under a secret name; its real name is ordinary text."""

    def __init__(self, spec: str, real: tokenizers.Tokenizer, protected: Mapping[str, int]) -> None:
        """Both share the vocabulary, most of the memory of a tokenizer. `spec` is the tokenizer.json."""
        nonce = f"{secrets.randbits(128):039d}"
        self._aliases = {token: f"\ue0f2{nonce}{i:08d}\ue0f3" for token, i in protected.items()}
        self._written = re.compile(any_of(protected))
        self._names = {i: token for token, i in protected.items()}
        self._inner = self._renamed(real)
        self._real_ids = self._map_ids(real)
        # A real name that still has an id is in the BPE vocabulary. Only the unknown token may be.
        unknown = _unknown_id(spec, real)
        in_vocabulary = {i for token, i in protected.items() if self._inner.token_to_id(token) == i}
        self._forged = frozenset(in_vocabulary - {unknown})

    def _renamed(self, real: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        renamed = tokenizers.Tokenizer(real.model)
        if real.normalizer is not None:
            renamed.normalizer = real.normalizer
        if real.pre_tokenizer is not None:
            renamed.pre_tokenizer = real.pre_tokenizer
        for _, token in sorted(real.get_added_tokens_decoder().items()):
            token.content = self._aliases.get(token.content, token.content)
            (renamed.add_special_tokens if token.special else renamed.add_tokens)([token])
        return renamed

    def _map_ids(self, real: tokenizers.Tokenizer) -> dict[int, int]:
        """Renamed tokens get fresh ids, which also moves the ids of added tokens that kept their names."""
        names = {alias: token for token, alias in self._aliases.items()}
        here = self._inner.get_added_tokens_decoder()
        ids = {i: real.token_to_id(names.get(token.content, token.content)) for i, token in here.items()}
        return {i: real_id for i, real_id in ids.items() if real_id is not None}

    def encode(self, rendered: str, marker: str) -> list[int]:
        rendered = self._written.sub(lambda match: self._aliases[match[0]], rendered)
        ids = _encode(self._inner, rendered.replace(marker, ""), add_special_tokens=False)
        forged = self._forged.intersection(ids)
        if forged:
            name = self._names[min(forged)]
            message = f"the text contains {name!r}, which this tokenizer cannot read as plain text"
            raise RequestError(message, param="messages")
        return [self._real_ids.get(i, i) for i in ids]


class DecodeStream:
    """Incremental decoding: text is returned when it is final. All of it equals one decode of all ids.

    `shown_ids` are special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._shown_ids = shown_ids
        self._window: list[int] = []  # the last returned token, then those not yet returned
        self._shown = ""  # text of the window that was returned
        self._is_all_out = True

    def push(self, token_id: int) -> str:
        if self._skips and self._tokenizer.is_special(token_id) and token_id not in self._shown_ids:
            return ""
        piece = self._tokenizer.piece(token_id)
        if piece == "":
            return ""  # an id without bytes: models pad their vocabulary
        if piece is not None and self._is_all_out:
            self._window = [token_id]
            self._shown = piece
            return piece
        self._window.append(token_id)
        self._is_all_out = False
        if token_id in self._tokenizer.byte_ids:
            return ""  # a run of byte tokens is decoded together: one bad byte spoils its neighbours
        text = self._decode()
        # A character cut in the middle shows as one replacement character at the end.
        is_whole = not text.endswith("\ufffd")
        new = self._emit(text if is_whole else text[:-1])
        if is_whole:
            # One token of context stays: the first token of a decode may lose its leading space.
            self._window = [token_id]
            self._is_all_out = True
            self._shown = self._decode()
        elif self._tokenizer.is_bytewise and len(self._window) > _MAX_BYTES:
            self._window = self._window[-_MAX_BYTES:]  # no character is longer
            self._shown = self._decode()[:-1]
        return new

    def finish(self) -> str:
        return self._emit(self._decode())

    def _decode(self) -> str:
        # What is skipped never enters the window.
        return self._tokenizer.decode(self._window, False)

    def _emit(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            self._shown = text
        return new


def _piece(inner: tokenizers.Tokenizer, token_id: int) -> str | None:
    """The text of a token if it is the same in every context: byte-level BPE, whole characters. Else None."""
    if not isinstance(inner.decoder, ByteLevel):
        return None
    text = inner.decode([token_id], skip_special_tokens=False)
    return None if "\ufffd" in text else text


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust panics are no Exception
        message = f"{path / 'tokenizer.json'} cannot be read as a tokenizer ({error}); download it again"
        raise ConfigError(message) from None


def _open(spec: str) -> tokenizers.Tokenizer:
    """A tokenizer without truncation and padding, which a file may carry from training."""
    tokenizer = tokenizers.Tokenizer.from_str(spec)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unknown_id(spec: str, tokenizer: tokenizers.Tokenizer) -> int | None:
    """Only the text tells it of a Unigram model, whose tokens have escaped quotes. Parsing takes 100 MiB."""
    if not isinstance(tokenizer.model, Unigram):
        return tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    match = re.search(r'(?<!\\)"unk_id"\s*:\s*(\d+)', spec)
    return int(match[1]) if match else None


def _frame_as_asked(
    inner: tokenizers.Tokenizer, config: Mapping[str, Any], tokens: Mapping[str, str]
) -> None:
    """LlamaTokenizer in Transformers takes add_bos_token and add_eos_token from tokenizer_config.json."""
    is_llama = str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
    if not is_llama or not isinstance(config.get("add_bos_token"), bool):
        return
    before, after = (_token_if_added(name, config, tokens) for name in ("bos_token", "eos_token"))
    ids = [(token, inner.token_to_id(token)) for token in {*before, *after}]
    if all(i is not None for _, i in ids):
        inner.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _token_if_added(name: str, config: Mapping[str, Any], tokens: Mapping[str, str]) -> list[str]:
    if config.get(f"add_{name}") is not True:
        return []
    return [tokens[name]] if name in tokens else []


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named tokens are strings, or mappings with the string under "content" in older files."""
    tokens = {}
    for name in _NAMED:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _encode(inner: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode a batch of one, which releases the GIL; `encode` would hold it."""
    try:
        return inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError:
        half = "half of a surrogate pair (U+D800 to U+DFFF)"
        raise RequestError(f"the text holds {half}, which is no character; send valid Unicode") from None
