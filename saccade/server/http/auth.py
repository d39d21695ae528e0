"""API keys, as bearer tokens or in x-api-key, and the tenant they stand for. Compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from saccade.server.errors import ApiError
from saccade.server.web_ui import STATIC

_OPEN_PATHS = frozenset({"/health", "/ready", "/"})


class KeyRing:
    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have equal lengths, so that a comparison does not reveal the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    def tenant(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> str:
        """A name for the caller that does not reveal its key. ApiError 401 without a valid key."""
        if not self._digests:
            return ""
        scheme, _, token = (authorization or b"").partition(b" ")
        for key in (token.strip() if scheme.lower() == b"bearer" else b"", api_key or b""):
            given = _digest(key)  # no configured key is empty, so an absent one never matches
            matches = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(matches):
                return given.hex()[:16]
        if is_open(path):
            return ""
        is_missing = authorization is None and api_key is None
        what = "no API key was sent" if is_missing else "the API key is not one of this server's"
        message = f"{what}; send the header Authorization: Bearer KEY or x-api-key: KEY"
        raise ApiError(401, message, code="invalid_api_key")


def is_open(path: str) -> bool:
    """Paths without a key: orchestrators probe health, and the page asks for the key itself."""
    return path in _OPEN_PATHS or path.startswith(STATIC)


def peer_of(address: tuple[str, int] | None) -> str:
    """The client at an address. An IPv6 /64 counts as one: a single host may own all of its addresses."""
    host = address[0] if address is not None else ""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
