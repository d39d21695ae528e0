"""Which tenant a request belongs to: by key, by a trusted proxy's header, before and after a reload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.server.errors import ApiError
from saccade.server.http import auth
from saccade.server.http.auth import Tenants
from saccade.server.http.limits import AdmissionGate
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.types.request import OTHER_LABEL

CHAT = "/v1/chat/completions"
PROXY, STRANGER = "10.1.2.3", "10.2.0.1"
FILE = """
[acme]
keys = ["key-1", "key-2"]
weight = 2
requests_per_minute = 60

[globex]
keys = ["key-3"]
"""
NAMED = '[acme]\nweight = 2\nrequests_per_minute = 60\n["*"]\nrequests_per_minute = 6'


def tenants(folder: Path, text: str | None = FILE, **options: Any) -> Tenants:
    if text is not None:
        file = folder / "tenants.toml"
        file.write_text(text)
        options["api_keys"] = str(file)
    return Tenants(ServerOptions(**options))


def behind_proxy(folder: Path, text: str | None = FILE, **options: Any) -> Tenants:
    return tenants(folder, text, tenant_header="X-Tenant", trusted_proxies=("10.1.0.0/16", "::1"), **options)


def key(value: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {value}".encode()


def named(value: str) -> tuple[bytes, bytes]:
    return b"x-tenant", value.encode()


def refusal(found: Tenants, *headers: tuple[bytes, bytes], peer: str = STRANGER) -> ApiError:
    with pytest.raises(ApiError) as caught:
        found.find(CHAT, headers, peer)
    return caught.value


# --- keys ---------------------------------------------------------------------------------------------------------


def test_the_keys_of_one_tenant_lead_to_one_account(tmp_path: Path) -> None:
    found = tenants(tmp_path)
    acme = found.find(CHAT, [key("key-1")], STRANGER)
    assert acme is found.find(CHAT, [(b"x-api-key", b"key-2")], STRANGER)
    assert acme.name == "acme" and acme.settings.weight == 2
    assert found.find(CHAT, [key("key-3")], STRANGER).name == "globex"
    assert refusal(found, key("key-4")).status == refusal(found).status == 401


def test_keys_of_the_command_line_work_beside_the_file_and_have_no_limits(tmp_path: Path) -> None:
    found = tenants(tmp_path, api_key=("mine", "mine", "yours"))
    mine = found.find(CHAT, [key("mine")], STRANGER)
    assert mine.name != found.find(CHAT, [key("yours")], STRANGER).name and not mine.headers()
    assert "mine" not in mine.name and mine.settings.label == "api-key:1"
    assert found.find(CHAT, [key("key-1")], STRANGER).name == "acme"
    with pytest.raises(ConfigError, match=r"tenants\.toml and --api-key: tenant acme: keys"):
        tenants(tmp_path, api_key=("key-1",))


def test_without_keys_all_callers_are_one_unnamed_tenant(tmp_path: Path) -> None:
    found = tenants(tmp_path, None).find(CHAT, [], STRANGER)
    assert found.name == "" and not found.headers() and found.settings.label == OTHER_LABEL


def test_the_digest_of_a_key_is_no_key(tmp_path: Path) -> None:
    assert refusal(tenants(tmp_path), key(f"sha256:{auth.digest_of(b'key-1').hex()}")).status == 401


# --- the header ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tenant_header": "X-Tenant"}, "trusted_proxies"),
        ({"tenant_header": "X-Tenant", "api_key": ("sk",)}, "trusted_proxies"),
        ({"tenant_header": "X Tenant", "trusted_proxies": ("::1",)}, "X Tenant"),
        ({"trusted_proxies": ("0.0.0.0/0",)}, "every client"),
        ({"trusted_proxies": ("::/0",)}, "every client"),
        (
            {"trusted_proxies": ("0.0.0.0/1", "128.0.0.0/1")},
            "0.0.0.0/1,128.0.0.0/1 would let every client in 0.0.0.0/0",
        ),
        ({"trusted_proxies": tuple(f"{number}.0.0.0/8" for number in range(4))}, "every client in 0.0.0.0/6"),
        ({"trusted_proxies": ("::ffff:0:0/96",)}, "every client in 0.0.0.0/0"),
        ({"trusted_proxies": ("10.1.2.3/16",)}, "host bits"),
        ({"trusted_proxies": ("proxy.local",)}, "proxy.local"),
    ],
)
def test_open_or_broken_settings_do_not_start(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        ServerOptions(**options)


def test_a_trusted_proxy_names_the_tenant(tmp_path: Path) -> None:
    found = behind_proxy(tmp_path, NAMED)
    acme = found.find(CHAT, [named("acme")], PROXY)
    assert acme.name == "acme" and acme.settings.weight == 2 and acme.limits.requests_per_minute == 60
    other = found.find(CHAT, [named("user@example.com")], PROXY)
    assert other.name == "user@example.com" and other.limits.requests_per_minute == 6
    assert other is found.find(CHAT, [named("user@example.com")], "::ffff:10.1.9.9")
    assert other.settings.label == OTHER_LABEL and not other.settings.is_operator


def test_without_keys_a_proxy_names_the_tenant_of_every_request(tmp_path: Path) -> None:
    """nginx leaves a header out whose value is empty: such a client must not become an operator without limits."""
    error = refusal(behind_proxy(tmp_path, NAMED), peer=PROXY)
    assert error.status == 400 and "X-Tenant" in error.message
    assert refusal(behind_proxy(tmp_path, NAMED), named(""), peer=PROXY).status == 400


def test_a_client_cannot_name_itself(tmp_path: Path) -> None:
    with_keys, without = behind_proxy(tmp_path), behind_proxy(tmp_path, NAMED)
    for error in (
        refusal(with_keys, key("key-3"), named("acme")),
        refusal(without, named("acme")),
        refusal(without, named("acme"), peer=""),  # a peer that is not known
        refusal(without),  # past the proxy
    ):
        assert error.status == 403 and "--trusted-proxies" in error.message
    assert with_keys.find(CHAT, [key("key-3")], STRANGER).name == "globex"


def test_a_proxy_needs_a_key_where_there_are_keys(tmp_path: Path) -> None:
    found = behind_proxy(tmp_path)
    assert refusal(found, named("acme"), peer=PROXY).status == 401
    assert found.find(CHAT, [key("key-3"), named("acme")], PROXY).name == "acme"


@pytest.mark.parametrize(
    "headers", [[named("acme"), named("globex")], [named("")], [named("acme, globex")], [named("a" * 65)]]
)
def test_a_header_that_does_not_name_one_tenant_is_refused(tmp_path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    error = refusal(behind_proxy(tmp_path, NAMED), *headers, peer=PROXY)
    assert error.status == 400 and "must name one tenant" in error.message


def test_probes_need_neither_key_nor_proxy(tmp_path: Path) -> None:
    assert behind_proxy(tmp_path).find("/health", [named("acme")], STRANGER).name == ""


def test_names_that_only_a_proxy_knows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_OTHERS", 16)
    found = behind_proxy(tmp_path, NAMED)
    for number in range(100):
        found.find(CHAT, [named(f"t{number}")], PROXY)
        assert len(found._others) <= 16


def test_a_flood_of_names_gives_no_tenant_its_limits_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it close an account whose request is being read: that would be charged to nothing."""
    monkeypatch.setattr(auth, "_MAX_OTHERS", 16)
    found = behind_proxy(tmp_path, NAMED)
    spent, busy = (found.find(CHAT, [named(name)], PROXY) for name in ("spent", "busy"))
    spent.take(requests=6)
    gate = AdmissionGate(8, 100, 100, engine_bytes=lambda: 0, on_refusal=lambda _: None)
    with gate.lease("busy", busy):
        for number in range(200):
            found.find(CHAT, [named(f"t{number}")], PROXY).take(requests=1)
        assert found.find(CHAT, [named("spent")], PROXY) is spent
        assert found.find(CHAT, [named("busy")], PROXY) is busy
    assert not busy.rest_seconds and spent.rest_seconds


def test_addresses_in_the_form_of_ipv6_are_those_of_ipv4(tmp_path: Path) -> None:
    """As a socket of both gives them, and as an operator may write them."""
    found = tenants(tmp_path, NAMED, tenant_header="X-Tenant", trusted_proxies=("::ffff:10.1.0.0/112", "fc00::/7"))
    for peer in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"):
        assert found.find(CHAT, [named("acme")], peer).name == "acme"
    for peer in ("10.2.0.1", "::ffff:10.2.0.1", "2001:db8::1", "::10.1.2.3"):
        assert refusal(found, named("acme"), peer=peer).status == 403


# --- reloading ----------------------------------------------------------------------------------------------------


def test_new_settings_change_keys_and_limits_and_keep_what_was_used(tmp_path: Path) -> None:
    found = tenants(tmp_path)
    acme = found.find(CHAT, [key("key-1")], STRANGER)
    acme.take(requests=50)
    (tmp_path / "tenants.toml").write_text('[acme]\nkeys = ["key-5"]\nrequests_per_minute = 55\n')
    found.apply(found.read())
    assert found.find(CHAT, [key("key-5")], STRANGER) is acme and len(found) == 1
    assert 5 <= int(acme.headers()["x-ratelimit-remaining-requests"]) < 55
    assert refusal(found, key("key-1")).status == refusal(found, key("key-3")).status == 401


def test_a_name_that_enters_the_file_keeps_its_account(tmp_path: Path) -> None:
    found = behind_proxy(tmp_path, NAMED)
    before = found.find(CHAT, [named("initech")], PROXY)
    (tmp_path / "tenants.toml").write_text("[initech]\nweight = 3\n['*']\nopen_requests = 1")
    found.apply(found.read())
    assert found.find(CHAT, [named("initech")], PROXY) is before and before.settings.weight == 3
    assert found.find(CHAT, [named("acme")], PROXY).limits.open_requests == 1


# --- in front of the routes ---------------------------------------------------------------------------------------


def answered(found: Tenants, headers: list[tuple[bytes, bytes]], **scope: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers and caller of a request that goes through the middleware."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "client": None, **scope}
    rules = BrowserRules(ServerOptions())
    middleware = RequestMiddleware(app, found, rules, on_refusal=lambda _: None, logs=False)
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, scope.get("caller")


def test_a_limited_tenant_learns_what_is_left_from_every_answer(tmp_path: Path) -> None:
    found = tenants(tmp_path)
    status, fields, caller = answered(found, [key("key-1")])
    assert status == 200 and fields["x-ratelimit-remaining-requests"] == "60"
    assert caller.tenant == caller.client == "acme" and caller.account.settings.weight == 2
    assert not [name for name in answered(found, [key("key-3")])[1] if name.startswith("x-ratelimit")]


def test_no_name_of_a_tenant_is_that_of_an_address(tmp_path: Path) -> None:
    """They share capacity under these names, in the gate and in the engine."""
    named_so = tenants(tmp_path, '["10.1.2.3"]\nkeys = ["key-1"]')
    tenant = answered(named_so, [key("key-1")], client=("10.9.9.9", 1))[2]
    address = answered(tenants(tmp_path, None), [], client=("10.1.2.3", 1))[2]
    assert tenant.client == "10.1.2.3" and address.client == "address:10.1.2.3"
    assert answered(tenants(tmp_path, None), [], client=("2001:db8::1", 1))[2].client == "address:2001:db8::/64"


def test_x_forwarded_for_makes_no_proxy(tmp_path: Path) -> None:
    """The address that counts is the connection's: Uvicorn takes `client` from a header."""
    found = behind_proxy(tmp_path, NAMED)
    forged = answered(found, [named("acme")], client=(PROXY, 1), state={"peer": (STRANGER, 1)})
    assert forged[0] == 403
    honest = answered(found, [named("acme")], client=(STRANGER, 1), state={"peer": (PROXY, 1)})
    assert honest[0] == 200 and honest[2].tenant == "acme"
    assert answered(found, [named("acme")], client=(PROXY, 1))[0] == 403  # not from our own protocol
