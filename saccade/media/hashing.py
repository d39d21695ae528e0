"""Identity: the salt of a request, the content key of a picture, the records of a prompt. Knows bytes and ids only.

SHA-256 rather than BLAKE2: processors since 2017 have instructions for it, and there it is about twice as fast.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.media.load import Loaded
from saccade.types import RECORD_BYTES, Header, Key, Span

_KEY_WORDS = 4  # a 32-byte key as 64-bit words
_RECORD_WORDS = RECORD_BYTES // 8
_REMEMBERED_BYTES = 16 << 20  # of pictures, compressed: those of the conversations that go on at the moment
_REMEMBERED = 512  # pictures, 700 bytes each: of tiny ones the bytes alone would allow hundreds of thousands
_SAMPLES = 32


def content_key(loaded: Loaded, policy_tag: bytes, fingerprint: bytes, salt: bytes) -> Key:
    """Equal for equal bytes under one policy, model and salt. Fields carry their lengths, so none poses as another."""
    header = loaded.header
    # Compressed bytes say their own size and orientation; bare pixels do not.
    shape = struct.pack("<QQ", *header.size) if header.format == "rgb" else b""
    digest = hashlib.sha256()
    for field in (header.format.encode(), shape, policy_tag, fingerprint, salt, loaded.data):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def salt_of(tenant: str, cache_salt: Any) -> bytes:
    """What keeps a request's cache entries apart from those of others: nothing, or the digest of who asks and which
    salt came with the request. The length keeps ("a", "bc") and ("ab", "c") apart."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be a string, not {type(cache_salt).__name__}", param="cache_salt")
    if not tenant and not cache_salt:
        return b""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{cache_salt}".encode(errors="surrogatepass")).digest()


class _Place(NamedTuple):
    """Where a picture is looked up. Everything its key depends on, but of its bytes only a few."""

    header: Header
    policy_tag: bytes
    salt: bytes  # its digest: clients choose how long a salt is
    length: int
    sample: bytes


class _Known(NamedTuple):
    start: int  # of its bytes in the ring
    key: Key


class RecentKeys:
    """`content_key` for one model, which remembers the pictures that came last: those of a conversation come each turn.

    Bytes are compared several times faster than they are hashed, and a picture is another's equal only if all of its
    bytes are: what is remembered is what hashing would give. The memory for bytes is taken at once and never grows:

        ring    | picture 7 | 8 | 9 ...  | (a gap) | picture 4 | 5 | 6 |      the next one takes the place of 4
    """

    def __init__(self, fingerprint: bytes, max_bytes: int = _REMEMBERED_BYTES) -> None:
        self._fingerprint = fingerprint
        self._ring = bytearray(b"\1") * max_bytes
        self._next = 0
        self._known: OrderedDict[_Place, _Known] = OrderedDict()  # as they came
        self._lock = Lock()

    def of(self, loaded: Loaded, policy_tag: bytes, salt: bytes) -> Key:
        data = loaded.data
        sample = data[:: len(data) // _SAMPLES + 1]
        place = _Place(loaded.header, policy_tag, hashlib.sha256(salt).digest(), len(data), sample)
        with self._lock:
            known = self._known.get(place)
            if known and self._ring.startswith(data, known.start):
                return known.key
        key = content_key(loaded, policy_tag, self._fingerprint, salt)
        with self._lock:
            self._remember(place, data, key)
        return key

    def _remember(self, place: _Place, data: bytes, key: Key) -> None:
        if len(data) > len(self._ring):
            return
        self._known.pop(place, None)
        if self._next + len(data) > len(self._ring):
            self._forget_before(len(self._ring))
            self._next = 0
        end = self._next + len(data)
        self._forget_before(end)
        self._ring[self._next : end] = data
        self._known[place] = _Known(self._next, key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        self._next = end

    def _forget_before(self, end: int) -> None:
        """Those that begin between here and there. They are the oldest."""
        while self._known and self._next <= next(iter(self._known.values())).start < end:
            self._known.popitem(last=False)


def identity(
    token_ids: Sequence[int] | npt.NDArray[np.int64], spans: Sequence[Span], marks: Sequence[Key] | None = None
) -> bytes:
    """RECORD_BYTES per position: a key (zeros for text) and, little-endian, the token id or the offset in the span.

    | 0 ....................... 31 | 32 ........... 39 |
    | zeros, or the content key    | id, or the offset |

    `marks` stand for the content keys, one per span, where a span's positions depend on more than what is before it.
    """
    records = np.zeros((len(token_ids), _RECORD_WORDS), "<u8")  # [positions, 5]
    records[:, _KEY_WORDS] = token_ids
    for span, mark in zip(spans, marks or [span.key for span in spans], strict=True):
        records[span.start : span.end, :_KEY_WORDS] = np.frombuffer(mark, "<u8")
        records[span.start : span.end, _KEY_WORDS] = np.arange(span.length)
    return records.tobytes()
