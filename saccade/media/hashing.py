"""Multimodal hashing: content keys of images, cache salts, and the identity of positions for prefix caching.

SHA-256 rather than BLAKE2: CPUs since 2017 have instructions for it, which make it about twice as fast.
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
from saccade.media.documents import PdfPage
from saccade.media.load import Loaded
from saccade.types.media import Header, Key, Size
from saccade.types.prompt import RECORD_BYTES, Span

_KEY_WORDS = 4  # a 32-byte key as 64-bit words
_RECORD_WORDS = RECORD_BYTES // 8
_CACHE_BYTES = 16 << 20  # of compressed images: those of running conversations
_CACHE_ENTRIES = 512  # 700 bytes each: bounds the memory for tiny images
_SAMPLES = 32


def content_key(loaded: Loaded, policy_tag: bytes, fingerprint: bytes, salt: bytes) -> Key:
    """Equal for equal bytes under one policy, model and salt."""
    header = loaded.header
    # Compressed bytes contain their size and orientation; raw pixels do not.
    shape = struct.pack("<QQ", *header.size) if header.format == "rgb" else b""
    return digest_of(header.format.encode(), shape, policy_tag, fingerprint, salt, loaded.data)


def digest_of(*fields: bytes | memoryview) -> bytes:
    """SHA-256 of length-prefixed fields."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def salt_of(tenant: str, cache_salt: Any) -> bytes:
    """Separates a request's cache entries from those of other tenants and salts; empty if it has neither."""
    if not isinstance(cache_salt, str):
        message = f"cache_salt must be a string, not {type(cache_salt).__name__}"
        raise RequestError(message, param="cache_salt")
    if not tenant and not cache_salt:
        return b""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    return hashlib.sha256(f"{len(tenant)}:{tenant}{cache_salt}".encode(errors="surrogatepass")).digest()


class _LookupKey(NamedTuple):
    """Everything a content key depends on, but only a sample of the bytes."""

    header: Header
    policy_tag: bytes
    salt: bytes  # a digest, as clients choose how long a salt is
    length: int
    sample: bytes


class _CachedKey(NamedTuple):
    start: int  # of the bytes in the ring
    key: Key


class RecentKeys:
    """`content_key` with a cache of recent images: a conversation sends its images again with every request.

    All bytes are compared, which is several times faster than hashing them. The ring is allocated once:

        ring    | image 7 | 8 | 9 ...  | (a gap) | image 4 | 5 | 6 |      the next one overwrites 4
    """

    def __init__(self, fingerprint: bytes, max_bytes: int = _CACHE_BYTES) -> None:
        self._fingerprint = fingerprint
        self._ring = bytearray(b"\1") * max_bytes
        self._next = 0
        self._cached: OrderedDict[_LookupKey, _CachedKey] = OrderedDict()  # oldest first
        self._lock = Lock()

    def of(self, loaded: Loaded, policy_tag: bytes, salt: bytes) -> Key:
        data = loaded.data
        sample = data[:: len(data) // _SAMPLES + 1]
        lookup = _LookupKey(loaded.header, policy_tag, hashlib.sha256(salt).digest(), len(data), sample)
        with self._lock:
            cached = self._cached.get(lookup)
            if cached and self._ring.startswith(data, cached.start):
                return cached.key
        key = content_key(loaded, policy_tag, self._fingerprint, salt)
        with self._lock:
            self._insert(lookup, data, key)
        return key

    def of_page(self, page: PdfPage, size: Size, policy_tag: bytes, salt: bytes) -> Key:
        """The key of a page rendered at this size. The PDF is hashed once for all its pages."""
        shape = struct.pack("<QQQ", page.index, *size)
        return digest_of(b"pdf", shape, policy_tag, self._fingerprint, salt, page.digest)

    def _insert(self, lookup: _LookupKey, data: bytes, key: Key) -> None:
        if len(data) > len(self._ring):
            return
        self._cached.pop(lookup, None)
        if self._next + len(data) > len(self._ring):
            self._evict_before(len(self._ring))
            self._next = 0
        end = self._next + len(data)
        self._evict_before(end)
        self._ring[self._next : end] = data
        self._cached[lookup] = _CachedKey(self._next, key)
        if len(self._cached) > _CACHE_ENTRIES:
            self._cached.popitem(last=False)
        self._next = end

    def _evict_before(self, end: int) -> None:
        """Evict the entries that start between `_next` and `end`, which are the oldest."""
        while self._cached and self._next <= next(iter(self._cached.values())).start < end:
            self._cached.popitem(last=False)


TokenIds = Sequence[int] | npt.NDArray[np.int64]


def identity(token_ids: TokenIds, spans: Sequence[Span], marks: Sequence[Key] | None = None) -> bytes:
    """RECORD_BYTES per position: a key (zeros for text) and, little-endian, a token id or offset in the span.

    | 0 ....................... 31 | 32 ........... 39 |
    | zeros, or the content key    | id, or the offset |

    `marks`, one per span, replace the content keys where KV depends on more than the preceding tokens.
    """
    records = np.zeros((len(token_ids), _RECORD_WORDS), "<u8")  # [positions, 5]
    records[:, _KEY_WORDS] = token_ids
    for span, mark in zip(spans, marks or [span.key for span in spans], strict=True):
        records[span.start : span.end, :_KEY_WORDS] = np.frombuffer(mark, "<u8")
        records[span.start : span.end, _KEY_WORDS] = np.arange(span.length)
    return records.tobytes()
