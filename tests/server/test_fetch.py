"""Pictures by URL through a running server: fetched, answered, counted, refused where a redirect leads astray."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.servers.forbidden_urls import FORBIDDEN_URLS
from tests.helpers.servers.image_site import Site, running_site
from tests.helpers.servers.serving import RunningServer, error_of, image_part, running_server, text_part, until

WHERE = "messages[0].content[0].image_url"
TIMEOUT = 1.0


site = pytest.fixture(scope="module")(running_site)
other_site = pytest.fixture(scope="module")(running_site)


@pytest.fixture(scope="module")
def fetching(qwen2_vl_folder: Path, site: Site) -> Iterator[RunningServer]:
    """A server that may fetch from that site, which has a private address."""
    flags = ("--allowed-media-domains", f"127.0.0.1:{site.server_port}", "--allow-private-media-addresses")
    with running_server(qwen2_vl_folder, *flags, "--media-fetch-timeout", str(TIMEOUT)) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_stays(fetching: RunningServer) -> Iterator[None]:
    """Whatever a test fetches, afterwards no bytes and no blocks are held."""
    yield
    assert until(lambda: fetching.stats("saccade:request_bytes") == fetching.stats("saccade:kv_blocks_used") == 0)


def ask(server: RunningServer, *urls: str, **fields: Any) -> Any:
    return server.chat([*map(image_part, urls), text_part("What is this?")], **fields)


def test_a_image_behind_a_url_is_fetched_and_answered(fetching: RunningServer, site: Site) -> None:
    response = ask(fetching, site.url("/photo.png?one"), include_bill=True)
    assert response.status_code == 200, response.text
    (item,) = response.json()["bill"]["items"]
    assert (item["width"], item["height"]) == (112, 84) and "/photo.png?one" in site.asked


def test_a_fetched_image_costs_what_its_bytes_cost(fetching: RunningServer, site: Site) -> None:
    usage = ask(fetching, site.url("/photo.png?two")).json()["usage"]
    parts = [
        {"type": "input_image", "image_url": site.url("/photo.png?two")},
        {"type": "input_text", "text": "What is this?"},
    ]
    body = fetching.post("/v1/responses/input_tokens", {"input": [{"role": "user", "content": parts}]}).json()
    assert body["input_tokens"] == usage["prompt_tokens"]


def test_fetching_is_counted(fetching: RunningServer, site: Site) -> None:
    before = fetching.stats("saccade:media_fetch_seconds_count")
    ask(fetching, site.url("/photo.png?three"), site.url("/photo.png?four"))
    assert fetching.stats("saccade:media_fetch_seconds_count") == before + 2


def test_a_second_question_about_a_url_decodes_nothing_again(fetching: RunningServer, site: Site) -> None:
    url = site.url("/photo.png?asked-twice")
    ask(fetching, url)
    before = fetching.stats("saccade:pictures_decoded_total")
    assert fetching.chat([text_part("And now?"), image_part(url)]).status_code == 200
    assert fetching.stats("saccade:pictures_decoded_total") == before


def test_a_redirect_on_the_same_host_is_followed(fetching: RunningServer, site: Site) -> None:
    assert ask(fetching, site.url("/moved")).status_code == 200


def test_a_redirect_to_a_host_that_is_not_allowed_is_refused(
    fetching: RunningServer, site: Site, other_site: Site
) -> None:
    site.elsewhere = other_site.url("/photo.png")
    error = error_of(ask(fetching, site.url("/astray")))
    assert error["code"] == "invalid_image_url" and error["param"] == WHERE
    assert other_site.asked == []


def test_a_redirect_to_a_link_local_address_is_refused(fetching: RunningServer, site: Site) -> None:
    site.elsewhere = "http://169.254.169.254/latest/meta-data"
    assert error_of(ask(fetching, site.url("/astray")))["code"] == "invalid_image_url"


def test_a_missing_image_is_the_clients_error_and_names_the_status(fetching: RunningServer, site: Site) -> None:
    response = ask(fetching, site.url("/missing.png"))
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "failed_to_download_image"
    assert "404" in error["message"] and error["param"] == WHERE


def test_a_site_that_does_not_answer_is_given_up(fetching: RunningServer, site: Site) -> None:
    response = ask(fetching, site.url("/slow"))
    error = error_of(response)
    assert response.status_code == 400 and error["code"] == "failed_to_download_image"
    assert f"{TIMEOUT:g} s" in error["message"]


def test_one_missing_image_among_good_ones_is_named(fetching: RunningServer, site: Site) -> None:
    error = error_of(ask(fetching, site.url("/photo.png?five"), site.url("/missing.png"), site.url("/slow")))
    assert error["param"] == "messages[0].content[1].image_url"


def test_leaving_while_a_image_is_fetched_frees_everything(fetching: RunningServer, site: Site) -> None:
    body = {"messages": [{"role": "user", "content": [image_part(site.url("/slow?left"))]}]}
    with fetching.client() as client, pytest.raises(Exception, match="timed out"):
        client.post("/v1/chat/completions", json=body, timeout=0.3)
    assert until(lambda: fetching.stats("saccade:request_bytes") == 0)
    assert fetching.answers()


@pytest.fixture(scope="module")
def public(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    """A server that may fetch from everywhere on the public internet."""
    with running_server(qwen2_vl_folder, "--allowed-media-domains", "*") as server:
        yield server


@pytest.mark.parametrize("template", [url for url in FORBIDDEN_URLS if url != "http://example.com/a.png"])
def test_where_every_public_host_is_allowed_no_other_one_is_called(public: RunningServer, template: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.settimeout(0.1)
        response = ask(public, template.replace("{port}", str(canary.getsockname()[1])))
        assert response.status_code == 400 and error_of(response)["code"] == "invalid_image_url"
        with pytest.raises(TimeoutError):
            canary.accept()
    assert public.answers()


def test_the_log_warns_about_private_addresses(fetching: RunningServer) -> None:
    assert any("private addresses" in line for line in fetching.log)
