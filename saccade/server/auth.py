"""Who is asking: bearer keys, compared in constant time, and the tenant they stand for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from saccade.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Load balancers and orchestrators ask these without a key."""


class KeyRing:
    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that comparing tells nothing about the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    def tenant(self, path: str, authorization: bytes | None) -> str:
        """A name for the caller that does not give the key away. ApiError 401 without a right key."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            return given.hex()[:16]
        if path in OPEN_PATHS:
            return ""
        what = "no API key was sent" if authorization is None else "the API key is not one of this server's"
        raise ApiError(401, f"{what}; send the header Authorization: Bearer KEY", code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
