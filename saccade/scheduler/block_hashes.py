"""The digests by which KV blocks are found again: chained over what stands at each position of a request.

A position's record says which token or image row stands there, so equal digests mean equal keys and values.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from saccade.types.prompt import RECORD_BYTES

_TEXT_RECORD = "32xQ"  # zeros where a media record has its content key, then the token id


def text_records(token_ids: Sequence[int]) -> bytes:
    """The records of generated tokens, in the layout of `Prompt.identity`."""
    return struct.pack("<" + _TEXT_RECORD * len(token_ids), *token_ids)


class BlockHashes:
    """The digests of one request's blocks: digest i covers every position up to the end of block i.

    Hashed on demand and once: a prompt that misses early is not hashed to its end, and a decode step hashes
    only when a block fills.
    """

    def __init__(
        self,
        identity: bytes,
        salt: bytes,
        block_size: int,
        generated: Sequence[int],
        prompt_ids: Sequence[int] = (),
        *,
        may_find: bool = True,  # False: every prompt token is to be computed, so nothing cached is found
    ) -> None:
        self._identity = identity
        self._prompt_ids = prompt_ids  # only `token_ids` needs them
        self._generated = generated  # the request's own list, which grows as it decodes
        self._may_find = may_find
        self._width = block_size * RECORD_BYTES
        self._digests = [hashlib.sha256(salt).digest()]  # the root: other salts share nothing
        self.match: list[int] = []  # cached blocks of the latest lookup, kept by the pool
        self.match_version = 0  # evictions of the pool by then: the match is valid until the next one

    @property
    def may_find(self) -> bool:
        """After the first token, one that was preempted finds what it has computed."""
        return self._may_find or bool(self._generated)

    @property
    def num_known(self) -> int:
        """Blocks that are hashed."""
        return len(self._digests) - 1

    def digest(self, index: int) -> bytes:
        """That of block `index`; of -1 the root."""
        digests = self._digests
        if index + 1 >= len(digests):
            digest = digests[-1]
            for records in self.iter_records(len(digests) - 1, index + 1):
                digest = hashlib.sha256(digest + records).digest()
                digests.append(digest)
        return digests[index + 1]

    def all_digests(self, count: int) -> list[bytes]:
        """Those of the first `count` blocks."""
        self.digest(count - 1)
        return self._digests[1 : count + 1]

    def content(self, index: int) -> tuple[bytes, bytes]:
        """Digest and records of block `index`, where that of the block before it is known."""
        digests = self._digests
        records = self.records(index)
        if index + 1 == len(digests):
            digests.append(hashlib.sha256(digests[index] + records).digest())
        return digests[index + 1], records

    def extend(self, first: int, digests: Sequence[bytes]) -> None:
        """Digests from block `first` on, known from cached blocks with the same records and parents."""
        self._digests += digests[self.num_known - first :]

    def iter_records(self, first: int, end: int) -> Iterator[bytes]:
        """The records of blocks `first` to `end`, one after the other."""
        identity = self._identity
        width = self._width
        inside = min(end, len(identity) // width)
        for start in range(first * width, inside * width, width):
            yield identity[start : start + width]
        for index in range(max(first, inside), end):
            yield self.records(index)

    def records(self, index: int) -> bytes:
        """The records of block `index`, which must be full."""
        start = index * self._width
        end = start + self._width
        records = self._identity[start:end]
        if len(records) == self._width:
            return records
        first = max(0, start - len(self._identity)) // RECORD_BYTES
        return records + text_records(self._generated[first : (end - len(self._identity)) // RECORD_BYTES])

    def token_ids(self, index: int) -> list[int]:
        """Those of block `index`, which must be full; an image's are placeholders."""
        block_size = self._width // RECORD_BYTES
        start = index * block_size
        ids = list(self._prompt_ids[start : start + block_size])
        if len(ids) < block_size:
            first = max(0, start - len(self._prompt_ids))
            ids += self._generated[first : first + block_size - len(ids)]
        return ids
