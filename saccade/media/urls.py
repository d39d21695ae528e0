"""URL and address checks for media fetching: allowed domains and public addresses. Opens nothing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote

import idna

from saccade.errors import ConfigError, RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_AUTHORITY = r"(?P<host>\[[0-9a-f:.]+\]|[^/?#:\[\]]+)(?::(?P<port>[0-9]{1,5}))?"
_URL = re.compile(rf"(?P<scheme>https?)://{_AUTHORITY}(?P<rest>[/?#].*)?", re.I)
_HOST = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2000-\u200f\u2028-\u202f\u3000\ufeff]")
_UNTOUCHED = "/?&=;:@!$'()*+,~%-._[]"
_PRIVATE: Mapping[int, tuple[Network, ...]] = {
    4: tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"))),
    6: (ipaddress.IPv6Network("fc00::/7"), ipaddress.IPv6Network("fec0::/10")),
}
_METADATA = frozenset({"100.100.100.200", "fd00:ec2::254"})  # cloud metadata services inside those networks
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Target(NamedTuple):
    """A checked URL."""

    scheme: str
    host: str  # lower case, ASCII; an IPv6 address without brackets
    port: int
    path: str  # with the query, percent-encoded

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self._bracketed}:{self.port}{self.path}"

    @property
    def authority(self) -> str:
        """The Host header: without the scheme's default port."""
        return self._bracketed if self.port == _PORTS[self.scheme] else f"{self._bracketed}:{self.port}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


class Domain(NamedTuple):
    """One entry of the operator's list."""

    host: str  # "*" for every host
    port: int | None  # None: 80 for http, 443 for https

    def allows(self, target: Target) -> bool:
        if target.port != (self.port or _PORTS[target.scheme]):
            return False
        return self.host in ("*", target.host) or target.host.endswith(f".{self.host}")


def read_domains(entries: Iterable[str]) -> tuple[Domain, ...]:
    """Entries of --allowed-media-domains: "*" or a host, which includes its subdomains. A port may follow."""
    return tuple(_domain(entry) for entry in entries)


def _domain(entry: str) -> Domain:
    host, colon, port = entry.strip().lower().partition(":")
    ascii_host = host if host == "*" else _ascii_host(host)
    if ascii_host is None or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        names = "host names such as example.com or example.com:8443, or *"
        raise ConfigError(f"--allowed-media-domains takes {names}, not {entry!r}")
    return Domain(ascii_host, int(port) if colon else None)


def read_url(url: str, domains: tuple[Domain, ...]) -> Target:
    """An http(s) URL that the operator allows. What two parsers could read differently is refused."""
    match = None
    if len(url) <= _MAX_URL_CHARS and not _NOT_IN_URLS.search(url):
        match = _URL.fullmatch(url)
    host = _host(match["host"].lower()) if match else None
    if match is None or host is None:
        message = "the picture's URL is not a plain http or https URL with a host name; send a valid one"
        raise refused(message)
    scheme = match["scheme"].lower()
    target = Target(scheme, host, int(match["port"] or _PORTS[scheme]), _path(match["rest"] or "/"))
    if not any(domain.allows(target) for domain in domains):
        remedy = "the operator allows hosts with --allowed-media-domains"
        raise refused(f"pictures may not be fetched from {host} port {target.port}; {remedy}")
    return target


def refused(message: str) -> RequestError:
    return RequestError(message, code="invalid_image_url")


def _host(host: str) -> str | None:
    """The host in its canonical form; None if it is invalid."""
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return None
    return _ascii_host(host)


def _ascii_host(host: str) -> str | None:
    try:
        host = host if host.isascii() else idna.encode(host).decode()
    except idna.IDNAError:
        return None
    if not _HOST.fullmatch(host):
        return None
    if not _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
        return host
    try:  # decimal, hexadecimal, octal and shortened forms of an IPv4 address end here
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return None


def _path(tail: str) -> str:
    path = tail.partition("#")[0]
    return quote(path if path.startswith("/") else f"/{path}", safe=_UNTOUCHED)


def is_public(address: str) -> bool:
    """Whether an address, and every IPv4 address embedded in it, is on the public internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # for example with a zone: link-local
        return False
    reached = _with_embedded(parsed)
    return all(map(_is_global, reached))


def _is_global(address: Address) -> bool:
    """`is_global` alone is also true of multicast and of the old private network of IPv6, fec0::/10."""
    if any((address.is_multicast, address.is_reserved, _is_in_private_network(address))):
        return False
    return address.is_global


def is_public_or_private(address: str) -> bool:
    """The public internet, private networks and this machine. Never link-local (cloud metadata)."""
    if is_public(address):
        return True
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return all(_is_private(each) for each in _with_embedded(parsed))


def _is_private(address: Address) -> bool:
    if _is_in_private_network(address):
        return str(address) not in _METADATA
    return address.is_loopback


def _is_in_private_network(address: Address) -> bool:
    return any(address in net for net in _PRIVATE[address.version])


def _with_embedded(address: Address) -> Iterator[Address]:
    """The addresses a packet may reach: a mapped or translated one is the IPv4 address inside it."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    if address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return
    yield address
    yield from address.teredo or ()
    if address.sixtofour is not None:
        yield address.sixtofour
