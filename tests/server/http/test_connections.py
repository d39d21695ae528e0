"""Limits of connections: what a machine's descriptors allow, what lets somebody in, who is one client."""

from __future__ import annotations

import resource

import pytest

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.server.http.auth import peer_of
from saccade.server.http.connections import connection_limit


def test_the_limit_of_connections_leaves_descriptors_for_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for descriptors in (64, 256, 1024, 1 << 20):
        monkeypatch.setattr(resource, "getrlimit", lambda _, maximum=descriptors: (maximum, maximum))
        found[descriptors] = connection_limit(None)
    assert found == {64: 32, 256: 128, 1024: 768, 1 << 20: 4096}


def test_more_connections_than_descriptors_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert connection_limit(800) == 800
    with pytest.raises(ConfigError, match=r"max_connections=1000 .* 1024 descriptors"):
        connection_limit(1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_client_share", 0.0), ("max_client_share", 1.5), ("max_connections", 0), ("header_timeout", 0.0)],
)
def test_a_limit_that_would_let_nobody_in_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerOptions(**{name: value})


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert peer_of(("2001:db8::1", 1)) == peer_of(("2001:db8::ffff:2%eth0", 2)) != peer_of(("2001:db8:0:1::1", 1))
    assert peer_of(("10.0.0.1", 1)) == peer_of(("::ffff:10.0.0.1", 1)) != peer_of(("::ffff:10.0.0.2", 1))
