"""Cross-origin rules: browsers may call from the server's own page and from origins the operator allows.

A browser states the page's origin (Origin, Sec-Fetch-Site) and the name it used for the server (Host).
Scripts cannot forge these headers. Clients that are no browser send no Origin and are not affected.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from saccade.errors import quoted
from saccade.options.server import ServerOptions
from saccade.server.errors import ApiError
from saccade.server.http.auth import is_open

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_PROBES = ("/live", "/health", "/ready")  # allowed under any Host
_PORT = re.compile(r":[0-9]*$")
_READ_METHODS = ("GET", "HEAD")


class BrowserRules:
    def __init__(self, server: ServerOptions) -> None:
        self._origins = frozenset(server.allowed_origins)
        self._hosts = _known_hosts(server)

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """ApiError 403 for a request made by a page that is not allowed."""
        is_reading = method in _READ_METHODS
        if is_reading and path in _PROBES:
            return
        host = _text(headers.get(b"host"))
        self._check_host(host)
        # Paths without a key are public, so any page may link to them.
        if not (is_reading and is_open(path)):
            self._check_origin(host, _text(headers.get(b"origin")), _text(headers.get(b"sec-fetch-site")))

    def _check_host(self, host: str | None) -> None:
        """Against DNS rebinding: a foreign name that resolves to this server makes its pages same-origin."""
        if host is None or self._hosts is None or _without_port(host) in self._hosts:
            return
        advice = "use localhost or 127.0.0.1, or start it with --allowed-hosts and the name"
        message = f"the Host {quoted(host)} is not a name of this server; {advice}"
        raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, host: str | None, origin: str | None, site: str | None) -> None:
        if not self._origins.isdisjoint(("*", origin)):
            return
        # Sec-Fetch-Site is the browser's own verdict. It also holds when a proxy changes the Host.
        if site:
            is_same_origin = site in ("same-origin", "none")
        else:
            is_same_origin = origin is None or origin.partition("://")[2] == host
        if not is_same_origin:
            page = "another site" if origin is None else quoted(origin)
            advice = "start it with --allowed-origins and the page's origin if it should"
            message = f"a page of {page} may not call this server; {advice}"
            raise ApiError(403, message, code="origin_not_allowed")


def _known_hosts(server: ServerOptions) -> frozenset[str] | None:
    """Allowed Host names. None allows any: without --allowed-hosts only loopback names are known."""
    if "*" in server.allowed_hosts:
        return None
    if not server.allowed_hosts and not is_loopback(server.host):
        return None
    bound_host = f"[{server.host}]" if ":" in server.host else server.host
    return frozenset(name.lower() for name in (*_LOCAL_NAMES, bound_host, *server.allowed_hosts))


def is_loopback(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # listening on the host reports the error
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1").strip().lower()


def _without_port(host: str) -> str:
    return _PORT.sub("", host)
