"""The tenant of a request: by its API key, or by the name in a trusted proxy's header.

A key comes as a bearer token or in x-api-key. The file of tenants can be read again while requests run.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.errors import ConfigError, quoted
from saccade.options.server import ServerOptions
from saccade.server.accounts import Account, Clock
from saccade.server.errors import ApiError
from saccade.server.tenant_file import (
    NAME,
    OTHERS,
    TenantSettings,
    check_unique,
    digest_of,
    read_tenants,
)
from saccade.server.web_ui import STATIC

_OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/"})
_MAX_OTHERS = 4096  # tenants that only a proxy names
_FORGOTTEN = 8  # of these the eighth that used least: no flood of names gives a tenant its limits back
_UNNAMED = TenantSettings(is_operator=True)

Headers = Sequence[tuple[bytes, bytes]]


class Tenants:
    """Every tenant's account. Names and limits change by `apply`; what is used of a limit stays."""

    def __init__(self, server: ServerOptions, clock: Clock = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._header = server.tenant_header.lower().encode() if server.tenant_header else None
        self._proxies = server.proxy_networks()
        self._secret = secrets.token_bytes(32)
        self._unnamed = Account("", _UNNAMED, clock)
        self._accounts: dict[str, Account] = {}  # of the settings, by name
        self._others: dict[str, Account] = {}  # named by a proxy only
        self._of_others = TenantSettings()
        self._by_key: dict[bytes, Account] = {}
        self.apply(self.read())

    def __len__(self) -> int:
        return len(self._accounts)

    # --- settings -------------------------------------------------------------------------------------------

    def read(self) -> dict[str, TenantSettings]:
        """The tenants of --api-key and of the file, as they are now. ConfigError if they cannot be used."""
        digests = dict.fromkeys(digest_of(key.encode()) for key in self._server.api_key)
        tenants = {  # a name that does not reveal the key, and in the metrics nothing of it
            digest.hex()[:16]: TenantSettings((digest,), label=f"api-key:{number}")
            for number, digest in enumerate(digests, 1)
        }
        if self._server.api_keys is not None:
            file = Path(self._server.api_keys)
            of_file = read_tenants(file, needs_keys=self._header is None)
            for name in tenants.keys() & of_file.keys():
                raise ConfigError(f"{file}: tenant {name}: the name belongs to an --api-key; choose another")
            tenants |= of_file
            check_unique(tenants, f"{file} and --api-key")
        return tenants

    def apply(self, tenants: Mapping[str, TenantSettings]) -> None:
        before = self._accounts
        self._accounts = {}
        self._by_key = {}
        for name, settings in tenants.items():
            if name == OTHERS:
                continue
            account = before.get(name) or self._others.pop(name, None) or Account(name, clock=self._clock)
            account.apply(settings)
            self._accounts[name] = account
            self._by_key |= {self._tag(digest): account for digest in settings.digests}
        self._of_others = tenants.get(OTHERS, TenantSettings())
        for account in self._others.values():
            account.apply(self._of_others)

    # --- requests -------------------------------------------------------------------------------------------

    def find(self, path: str, headers: Headers, peer: str) -> Account:
        """`peer`: the address of the connection itself. ApiError if the key or the name is not accepted."""
        account = self._by_key_of(path, dict(headers))
        if self._header is None or is_open(path):
            return account
        names = [value.strip(b" \t").decode("latin-1") for name, value in headers if name == self._header]
        header = self._server.tenant_header
        if not self._trusts(peer) and (names or not self._by_key):
            what = f"the header {header}" if names else "without API keys, requests"
            message = f"{what} may come only from the proxies that --trusted-proxies names"
            raise ApiError(403, message, code="proxy_not_trusted")
        if not names:
            if self._by_key:
                return account  # that of the key
            message = f"the proxy sent no header {header}; it must name the tenant of every request"
            raise ApiError(400, message, code="invalid_tenant")
        if len(names) > 1 or not NAME.fullmatch(names[0]):
            problem = f"{len(names)} times" if len(names) > 1 else f"as {quoted(names[0])}"
            rule = "up to 64 letters, digits and . _ @ + -; the proxy must replace the header, not add to it"
            message = f"the header {header} came {problem} and must name one tenant: {rule}"
            raise ApiError(400, message, code="invalid_tenant")
        return self._named(names[0])

    def account(self, name: str) -> Account | None:
        """The account of a tenant whose request came earlier. None: it would not be accepted now."""
        if not name:
            return None if self._by_key or self._header else self._unnamed
        if name in self._accounts:
            return self._accounts[name]
        return self._named(name) if self._header else None

    def _by_key_of(self, path: str, headers: Mapping[bytes, bytes]) -> Account:
        if not self._by_key:
            return self._unnamed
        api_key = headers.get(b"x-api-key")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else None
        for key in filter(None, (bearer, api_key)):
            account = self._by_key.get(self._tag(digest_of(key)))
            if account is not None:
                return account
        if is_open(path):
            return self._unnamed
        is_missing = headers.keys().isdisjoint((b"authorization", b"x-api-key"))
        what = "no API key was sent" if is_missing else "the API key is not one of this server's"
        message = f"{what}; send the header Authorization: Bearer KEY or x-api-key: KEY"
        raise ApiError(401, message, code="invalid_api_key")

    def _tag(self, digest: bytes) -> bytes:
        """Keyed, so that clients cannot choose it: the time of a lookup reveals nothing of any key."""
        return hashlib.blake2b(digest, key=self._secret).digest()

    def _trusts(self, peer: str) -> bool:
        address = address_of(peer)
        if address is None:
            return False
        return any(address in network for network in self._proxies)

    def _named(self, name: str) -> Account:
        if name in self._accounts:
            return self._accounts[name]
        if name not in self._others:
            if len(self._others) >= _MAX_OTHERS:
                by_use = sorted(self._others, key=lambda other: self._others[other].rest_seconds)
                for other in by_use[: max(1, _MAX_OTHERS // _FORGOTTEN)]:
                    del self._others[other]
            self._others[name] = Account(name, self._of_others, self._clock)
        return self._others[name]


def is_open(path: str) -> bool:
    """Paths without a key: orchestrators probe health, and the page asks for the key itself."""
    return path in _OPEN_PATHS or path.startswith(STATIC)


def peer_of(address: tuple[str, int] | None) -> str:
    """The client at an address, under a name that no tenant has: tenants have no colon in theirs.

    An IPv6 /64 counts as one: a single host may own all of its addresses.
    """
    host = "" if address is None else address[0]
    parsed = address_of(host)
    if isinstance(parsed, ipaddress.IPv6Address):
        return f"address:{ipaddress.IPv6Network((parsed, 64), strict=False)}"
    return f"address:{parsed or host}"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """IPv4 also where it comes as IPv6, as through a socket of both. None: it is no address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
