"""Who is asking: keys, as bearer tokens or in x-api-key, compared in constant time, and the tenant they stand for."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from saccade.server.errors import ApiError
from saccade.server.page import STATIC

_OPEN_PATHS = frozenset({"/health", "/ready", "/"})


class KeyRing:
    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that comparing tells nothing about the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    def tenant(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> str:
        """A name for the caller that does not give the key away. ApiError 401 unless one of both headers is right."""
        if not self._digests:
            return ""
        scheme, _, token = (authorization or b"").partition(b" ")
        for key in (token.strip() if scheme.lower() == b"bearer" else b"", api_key or b""):
            given = _digest(key)  # of nothing too: no key of ours is empty
            matches = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(matches):
                return given.hex()[:16]
        if is_open(path):
            return ""
        is_missing = authorization is None and api_key is None
        what = "no API key was sent" if is_missing else "the API key is not one of this server's"
        raise ApiError(
            401, f"{what}; send the header Authorization: Bearer KEY or x-api-key: KEY", code="invalid_api_key"
        )


def is_open(path: str) -> bool:
    """Orchestrators ask for health without a key; the page is the same for everybody and asks for the key itself."""
    return path in _OPEN_PATHS or path.startswith(STATIC)


def peer_of(address: tuple[str, int] | None) -> str:
    """A name for whoever is at an address. With IPv6 a household, or an attacker, has 2**64 of them: one network."""
    host = address[0] if address is not None else ""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
