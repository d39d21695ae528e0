"""Which hosts, addresses and files a picture may come from."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError, RequestError
from saccade.media.fetch import Fetcher, FetchPolicy
from saccade.media.urls import is_public, is_public_or_private, read_domains, read_url

BODY = b"bytes are bytes here"
TRUST = ssl.create_default_context()  # reading the system's certificates takes a while


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "entry", "is_allowed"),
    [
        ("https://example.com/a", "example.com", True),
        ("https://EXAMPLE.com/a", "Example.COM", True),
        ("https://img.example.com/a", "example.com", True),
        ("https://badexample.com/a", "example.com", False),
        ("https://example.com.evil.org/a", "example.com", False),
        ("https://example.com:8443/a", "example.com", False),
        ("https://example.com:8443/a", "example.com:8443", True),
        ("https://example.com/a", "example.com:8443", False),
        ("http://example.com:443/a", "example.com", False),
        ("http://example.com:80/a", "example.com", True),
        ("https://bücher.example/a", "bücher.example", True),
        ("https://xn--bcher-kva.example/a", "bücher.example", True),
        ("https://1.1.1.1/a", "*", True),
    ],
)
def test_a_host_is_allowed_when_it_is_an_entry_or_below_one(url: str, entry: str, is_allowed: bool) -> None:
    domains = read_domains([entry])
    if is_allowed:
        assert read_url(url, domains).host
    else:
        with pytest.raises(RequestError, match="--allowed-media-domains"):
            read_url(url, domains)


@pytest.mark.parametrize("entry", ["", "https://example.com", "*.example.com", "a b", "example.com:x", "0x7f.1", "a/b"])
def test_an_entry_that_is_no_host_is_an_error_at_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        Fetcher(FetchPolicy(allowed_domains=(entry,)))


def test_characters_outside_ascii_in_a_path_are_percent_encoded() -> None:
    assert read_url("https://a.example/ü?q=ß#part", read_domains(["*"])).path == "/%C3%BC?q=%C3%9F"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("192.168.1.1", False),
        ("172.16.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("feff::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::808:808", False),
        ("2002:a00:1::", False),
        ("2001:0:a00:1::", False),
        ("::8.8.8.8", False),
    ],
)
def test_only_addresses_of_the_public_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "::1", "fd12::1", "fec0::1"]
)
def test_private_addresses_are_reached_where_the_operator_allows_them(address: str) -> None:
    assert is_public_or_private(address) and not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "100.100.100.200",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "240.0.0.1",
        "255.255.255.255",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_link_local_and_other_special_addresses_are_never_reached(address: str) -> None:
    assert not is_public_or_private(address)


def test_a_name_that_leads_to_a_link_local_address_is_refused_even_where_private_ones_are_allowed() -> None:
    policy = FetchPolicy(allowed_domains=("store.test",), allow_private_addresses=True)

    async def resolve(host: str, port: int) -> list[str]:
        return ["10.0.0.1", "169.254.169.254"]

    fetcher = Fetcher(policy, resolve=resolve, ssl_context=TRUST)
    with pytest.raises(RequestError) as caught:
        asyncio.run(fetcher.fetch("http://store.test/a.png"))
    assert caught.value.code == "invalid_image_url"


# --- files --------------------------------------------------------------------------------------------------------


def read(url: str, root: Path | None, **policy: Any) -> bytes:
    return asyncio.run(
        Fetcher(FetchPolicy(allowed_local_path=root, **policy), ssl_context=TRUST).fetch(url, param="here")
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside.png").write_bytes(b"secret")
    folder = tmp_path / "pictures"
    (folder / "a b").mkdir(parents=True)
    (folder / "a b" / "c.png").write_bytes(BODY)
    (folder / "link.png").symlink_to(folder / "a b" / "c.png")
    (folder / "escape.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.mark.parametrize("url", ["{root}/a b/c.png", "file://{root}/a%20b/c.png", "file://localhost{root}/link.png"])
def test_a_file_in_the_allowed_folder_is_read(root: Path, url: str) -> None:
    assert read(url.format(root=root), root) == BODY


@pytest.mark.parametrize(
    "url",
    [
        "{root}/../outside.png",
        "{root}/escape.png",
        "file://{root}/%2e%2e/outside.png",
        "{root}/../missing.png",
        "{root}x/a.png",
        "/etc/passwd",
        "file://elsewhere{root}/link.png",
        "file:relative.png",
        "{root}/zero\0.png",
    ],
)
def test_a_path_outside_the_allowed_folder_is_refused(root: Path, url: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(url.format(root=root), root)
    assert (caught.value.code, caught.value.param) == ("invalid_image_url", "here")


@pytest.mark.parametrize("name", ["missing.png", "a b", "pipe.png"])
def test_what_is_no_readable_file_is_not_found(root: Path, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(f"{root}/{name}", root)
    assert caught.value.code == "image_file_not_found"


def test_a_loop_of_links_is_refused(root: Path) -> None:
    with pytest.raises(RequestError):
        read(f"{root}/loop.png", root)


def test_a_file_over_the_byte_limit_is_refused(root: Path) -> None:
    with pytest.raises(RequestError, match="more than 10 bytes") as caught:
        read(f"{root}/link.png", root, max_bytes=10)
    assert caught.value.code == "image_file_too_large"


def test_no_file_is_read_unless_a_folder_is_allowed(root: Path) -> None:
    with pytest.raises(RequestError, match="--allowed-local-media-path"):
        read(f"{root}/link.png", None)
