"""Pages of other sites that call a server on this machine: by their headers, and in a real Chromium."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.server.errors import ApiError
from saccade.server.http.origins import BrowserRules
from tests.helpers.servers.browser import PATIENCE_MS, open_page, running_browser
from tests.helpers.servers.hostile import raw_connection
from tests.helpers.servers.serving import MODEL, RunningServer, chat_body, error_of, running_server, until

CHAT = "/v1/chat/completions"
EVIL = "evil.test"  # a name whose owner lets it point to this machine
READING = ["/v1/models", f"/v1/models/{MODEL}", "/v1/engine", "/metrics", "/version", "/openapi.json"]
POSTING = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/bill", "/tokenize", "/detokenize"]

# In a page: everything a page can send without being asked whether it may. Each promise ends when its answer is there.
ATTACK = """async ([server, body]) => {
  const simple = { method: "POST", mode: "no-cors" };
  const chat = `${server}/v1/chat/completions`;
  await fetch(chat, { ...simple, body });
  await fetch(chat, { ...simple, body: new Blob([body]) });
  await fetch(chat, { ...simple, body: new URLSearchParams({ body }) });
  await fetch(`${server}/v1/models`, { mode: "no-cors" });
  const frame = Object.assign(document.createElement("iframe"), { name: "inner" });
  const form = Object.assign(document.createElement("form"), { method: "POST", action: chat, enctype: "text/plain" });
  form.target = "inner";
  form.append(Object.assign(document.createElement("input"), { name: body.slice(0, -2) + ', "a": "', value: '"}' }));
  document.body.append(frame, form);
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  form.submit();
  await loaded;
  await new Promise((resolve) => {
    Object.assign(new Image(), { onload: resolve, onerror: resolve, src: `${server}/v1/engine` });
  });
  navigator.sendBeacon(chat, new Blob([body]));
}"""
ATTACK_SIZE = 7

# In a page: what a script gets to see of an answer; null: the browser does not show it.
READ = """([url, how]) => fetch(url, how).then(
  async (response) => [response.status, await response.text()],
  () => null,
)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One that leaves it to the server whether a page may reach this machine, as all did until lately."""
    flags = (f"--host-resolver-rules=MAP {EVIL} 127.0.0.1", "--disable-features=LocalNetworkAccessChecks")
    with running_browser(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """The origin of an empty page that is not the server's."""
    with running_site() as origin:
        yield origin


@contextmanager
def running_site() -> Iterator[str]:
    class EmptyPage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()


@contextmanager
def attacker(browser: Browser, origin: str) -> Iterator[Page]:
    """A page of somebody else, of which the browser may complain."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    try:
        page.goto(origin)
        yield page
    finally:
        page.close()


def read(page: Page, url: str, body: Any = None) -> Any:
    """What the page's script sees of GET, or of POST with a JSON body."""
    how = {"method": "POST", "body": body, "headers": {"content-type": "application/json"}} if body else {}
    return page.evaluate(READ, [url, how])


def json_chat() -> str:
    return httpx.Request("POST", "http://x", json=chat_body(max_tokens=1)).content.decode()


# --- in a browser -------------------------------------------------------------------------------------------------


def test_nothing_runs_for_a_page_of_another_site(server: RunningServer, browser: Browser, elsewhere: str) -> None:
    def refusals() -> float:
        return server.stats("saccade:admission_rejected_total")

    answered, refused = server.stats("saccade:requests_total"), refusals()
    with attacker(browser, elsewhere) as page:
        page.evaluate(ATTACK, [server.url, json_chat()])
        assert until(lambda: refusals() >= refused + ATTACK_SIZE)
    assert server.stats("saccade:requests_total") == answered
    assert refusals() == refused + ATTACK_SIZE


def test_a_page_of_another_site_reads_nothing(server: RunningServer, browser: Browser, elsewhere: str) -> None:
    with attacker(browser, elsewhere) as page:
        assert [read(page, server.url + path) for path in ["/health", "/", *READING]] == [None] * (2 + len(READING))
        assert read(page, server.url + CHAT, json_chat()) is None


def test_a_name_that_was_made_to_point_here_reads_nothing(server: RunningServer, browser: Browser) -> None:
    """The attacker's page came from the same name and port before: to the browser it is a page of this server."""
    origin, answered = server.url.replace("127.0.0.1", EVIL), server.stats("saccade:requests_total")
    with attacker(browser, "about:blank") as page:
        page.route(f"{origin}/start", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.goto(f"{origin}/start")
        for path, body in [
            ("/", None),
            *((path, None) for path in READING),
            *((path, json_chat()) for path in POSTING),
        ]:
            status, text = read(page, path, body)
            assert status == 403 and "--allowed-hosts" in text, path
    assert server.stats("saccade:requests_total") == answered


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_servers_own_page_works(server: RunningServer, browser: Browser, name: str) -> None:
    with open_page(browser, server.url.replace("127.0.0.1", name)) as page:
        page.get_by_role("button", name="Try a sample").click()
        expect(page.locator("#bill-total")).to_contain_text("picture", timeout=PATIENCE_MS)
        page.get_by_label("Your question").fill("What is this?")
        page.keyboard.press("Enter")
        expect(page.locator(".said")).not_to_be_empty()


def test_a_link_to_the_page_works_from_anywhere(server: RunningServer, browser: Browser, elsewhere: str) -> None:
    with open_page(browser, elsewhere) as page:
        page.evaluate("(url) => { location = url; }", server.url)
        expect(page.locator("#model")).to_contain_text(MODEL, timeout=PATIENCE_MS)


def test_an_allowed_page_and_an_allowed_name_work(qwen2_vl_folder: Path, browser: Browser, elsewhere: str) -> None:
    flags = ("--allowed-origins", elsewhere, "--allowed-hosts", EVIL)
    with running_server(qwen2_vl_folder, *flags) as server:
        with open_page(browser, elsewhere) as page:
            status, text = read(page, server.url + CHAT, json_chat())
            assert status == 200 and "chat.completion" in text
        with open_page(browser, server.url.replace("127.0.0.1", EVIL)) as page:
            expect(page.locator("#model")).to_contain_text(MODEL, timeout=PATIENCE_MS)
            assert read(page, CHAT, json_chat())[0] == 200
        with running_site() as another, attacker(browser, another) as page:
            assert read(page, server.url + CHAT, json_chat()) is None


# --- by their headers ---------------------------------------------------------------------------------------------

FOREIGN = {
    "an origin": {"origin": "https://evil.example"},
    "no origin at all": {"origin": "null"},
    "another port": {"origin": "http://127.0.0.1:1"},
    "the server's name as a prefix": {"origin": "http://127.0.0.1.evil.example"},
    "a cross-site request": {"sec-fetch-site": "cross-site"},
    "another port without an origin": {"sec-fetch-site": "same-site"},
    "an origin as the browser judges it": {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
}


@pytest.mark.parametrize("path", POSTING)
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_page_may_not_post(server: RunningServer, path: str, kind: str) -> None:
    response = httpx.post(server.url + path, json=chat_body(), headers=FOREIGN[kind])
    assert response.status_code == 403 and "--allowed-origins" in response.text
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_page_may_not_read_data(server: RunningServer, path: str, kind: str) -> None:
    response = httpx.get(server.url + path, headers=FOREIGN[kind])
    assert response.status_code == 403 and error_of(response)["code"] == "origin_not_allowed"


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/health", "/ready"])
def test_what_is_the_same_for_everybody_is_served_to_everybody(server: RunningServer, path: str) -> None:
    assert httpx.get(server.url + path, headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_foreign_preflight_is_refused(server: RunningServer) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = httpx.options(server.url + CHAT, headers=headers)
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("site", [None, "same-origin", "none"])
def test_the_servers_own_origin_may_post(server: RunningServer, site: str | None) -> None:
    headers = {"origin": server.url} | ({"sec-fetch-site": site} if site else {})
    assert httpx.post(server.url + CHAT, json=chat_body(max_tokens=1), headers=headers).status_code == 200


def test_an_anthropic_client_gets_the_refusal_in_its_form(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/messages", json=chat_body(), headers={"origin": "null"})
    assert response.status_code == 403 and response.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "text/plain; a=application/json", "application/x-www-form-urlencoded", "multipart/form-data"],
)
def test_a_body_that_needs_no_preflight_is_not_read(server: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = httpx.post(server.url + CHAT, content=json_chat(), headers=headers)
    assert response.status_code == 415 and "Content-Type: application/json" in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_types_are_read(server: RunningServer, kind: str) -> None:
    response = httpx.post(server.url + CHAT, content=json_chat(), headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "x"])
@pytest.mark.parametrize("path", ["/", *READING])
def test_a_foreign_host_is_refused(server: RunningServer, path: str, host: str) -> None:
    response = httpx.get(server.url + path, headers={"host": host})
    assert response.status_code == 403 and error_of(response)["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:80"])
def test_names_of_this_machine_are_taken(server: RunningServer, host: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/health", "/ready"])
def test_probes_may_use_any_name(server: RunningServer, path: str) -> None:
    assert httpx.get(server.url + path, headers={"host": "pod-1.example"}).status_code == 200


def test_a_client_of_http_1_0_needs_no_host(server: RunningServer) -> None:
    with raw_connection(server) as sock:
        sock.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert sock.recv(64).startswith(b"HTTP/1.1 200")


# --- the rules alone ----------------------------------------------------------------------------------------------


def is_taken(options: ServerOptions, method: str = "POST", path: str = CHAT, **headers: str) -> bool:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    try:
        BrowserRules(options).check(method, path, given)
    except ApiError as error:
        assert error.status == 403
        return False
    return True


def test_other_addresses_have_names_that_only_the_operator_knows() -> None:
    assert is_taken(ServerOptions(host="0.0.0.0"), host="any.example")
    assert is_taken(ServerOptions(host="192.0.2.1"), host="any.example")
    named = ServerOptions(host="0.0.0.0", allowed_hosts=("llm.example",))
    assert is_taken(named, host="llm.example:443") and is_taken(named, host="localhost")
    assert not is_taken(named, host="any.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_every_loopback_address_is_checked(host: str) -> None:
    options = ServerOptions(host=host)
    assert is_taken(options, host=f"[{host}]:80" if ":" in host else f"{host}:80")
    assert not is_taken(options, host="any.example")
    assert is_taken(ServerOptions(host=host, allowed_hosts=("*",)), host="any.example")


def test_a_star_allows_every_origin_but_no_host() -> None:
    options = ServerOptions(allowed_origins=("*",))
    assert is_taken(options, host="localhost", origin="null", sec_fetch_site="cross-site")
    assert not is_taken(options, host="any.example", origin="null")


def test_a_proxy_that_changes_the_host_leaves_the_browsers_word() -> None:
    options = ServerOptions()
    assert is_taken(options, host="127.0.0.1:8000", origin="https://llm.example", sec_fetch_site="same-origin")
    assert not is_taken(options, host="127.0.0.1:8000", origin="https://llm.example")


@pytest.mark.parametrize("origin", ['["*"]', "app.example", "https://app.example/", "https://App.example", "null"])
def test_an_origin_that_no_browser_sends_is_a_mistake_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServerOptions(allowed_origins=(origin,))


@pytest.mark.parametrize("host", ['["*"]', "http://llm.example", "llm.example:80", "*.example"])
def test_a_host_that_no_client_sends_is_a_mistake_at_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerOptions(allowed_hosts=(host,))
