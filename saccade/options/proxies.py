"""The networks of --trusted-proxies, and what --tenant-header asks of them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from saccade.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_MIN_PREFIX = 7  # of the proxies' networks, joined: 10.0.0.0/8 and fc00::/7 are private ones


def network_of(text: str) -> Network:
    """IPv4 also where it is written as IPv6: connections are compared as IPv4."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        expected = "addresses and networks such as 127.0.0.1 and 10.1.0.0/16"
        raise ConfigError(f"trusted_proxies takes {expected}, not {text}: {error}") from None
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    return ipaddress.IPv4Network((mapped, network.prefixlen - 96)) if mapped is not None else network


def check_proxies(proxies: Sequence[str], tenant_header: str | None) -> None:
    networks = [network_of(text) for text in proxies]
    ipv4 = ipaddress.collapse_addresses(net for net in networks if isinstance(net, ipaddress.IPv4Network))
    ipv6 = ipaddress.collapse_addresses(net for net in networks if isinstance(net, ipaddress.IPv6Network))
    joined: list[Network] = [*ipv4, *ipv6]
    for network in joined:
        if network.prefixlen < _MIN_PREFIX:
            setting = f"trusted_proxies={','.join(proxies)}"
            advice = f"name the proxies' own addresses, or networks of /{_MIN_PREFIX} or smaller"
            raise ConfigError(f"{setting} would let every client in {network} act as a proxy; {advice}")
    if tenant_header is None:
        return
    if not _HEADER.fullmatch(tenant_header):
        raise ConfigError(f"tenant_header takes a header's name such as X-Tenant, not {tenant_header}")
    if not proxies:
        raise ConfigError(
            f"tenant_header={tenant_header} would let every client name itself any tenant; set "
            "trusted_proxies to the addresses that may send it, such as 127.0.0.1 for a proxy on this machine"
        )
