"""--root-path: with the prefix and without it, for routes, keys and rules of browsers."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from saccade.errors import UsageError
from saccade.options.server import ServerOptions
from saccade.server.http.auth import Tenants
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.server.http.root_path import RootPath


async def shown(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.scope["path"])


@pytest.fixture(scope="module")
def client() -> TestClient:
    server = ServerOptions(root_path="/vlm/a", api_key=("key",), allowed_hosts=("public.example.com",))
    app = Starlette(routes=[Route(path, shown) for path in ("/", "/live", "/v1/models")])
    rules = {
        "tenants": Tenants(server),
        "rules": BrowserRules(server),
        "on_refusal": lambda reason: None,
        "logs": False,
    }
    app.add_middleware(RequestMiddleware, **rules)
    app.add_middleware(RootPath, root=server.root_path)
    return TestClient(app, base_url="https://public.example.com", follow_redirects=False)


@pytest.mark.parametrize("prefix", ["", "/vlm/a"])
def test_routes_answer_with_and_without_the_prefix(client: TestClient, prefix: str) -> None:
    assert client.get(f"{prefix}/live").text == "/live"  # without a key
    assert client.get(f"{prefix}/v1/models").status_code == 401
    assert client.get(f"{prefix}/v1/models", headers={"x-api-key": "key"}).text == "/v1/models"


def test_the_page_is_sent_to_its_slash(client: TestClient) -> None:
    response = client.get("/vlm/a")
    assert (response.status_code, response.headers["location"]) == (307, "/vlm/a/")
    assert client.get("/vlm/a/").text == "/"


@pytest.mark.parametrize("path", ["/vlm/ab/live", "/vlm/live", "/vlm/a/vlm/a/live"])
def test_other_prefixes_are_no_routes(client: TestClient, path: str) -> None:
    assert client.get(path, headers={"x-api-key": "key"}).status_code == 404


def test_rules_of_browsers_hold_below_the_prefix_and_over_tls(client: TestClient) -> None:
    key = {"x-api-key": "key"}
    assert client.get("/vlm/a/v1/models", headers={**key, "host": "evil.example.com"}).status_code == 403
    assert client.get("/vlm/a/live", headers={"host": "10.0.0.7:8000"}).status_code == 200
    assert client.get("/vlm/a/v1/models", headers={**key, "origin": "https://evil.example.com"}).status_code == 403
    own = {**key, "origin": "https://public.example.com"}
    assert client.get("/vlm/a/v1/models", headers=own).status_code == 200


@pytest.mark.parametrize("root", ["vlm", "/vlm/", "/", "/a b", "//a"])
def test_a_root_path_begins_with_a_slash_and_ends_without(root: str) -> None:
    with pytest.raises(UsageError, match="root_path"):
        ServerOptions(root_path=root)
