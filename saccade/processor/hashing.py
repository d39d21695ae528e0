"""Identity: the content key of a picture and the records of a prompt. Knows bytes and ids, not what they mean.

SHA-256 rather than BLAKE2: processors since 2017 have instructions for it, and there it is about twice as fast.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from saccade.processor.media import Loaded
from saccade.types import RECORD_BYTES, Key, Span

_KEY_WORDS = 4  # a 32-byte key as 64-bit words
_RECORD_WORDS = RECORD_BYTES // 8


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
