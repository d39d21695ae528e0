"""Routes with which an operator changes a running server: caches, sleep, profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.errors import UsageError
from saccade.options.server import ServerOptions
from tests.helpers.servers.serving import RunningServer, error_of, running_server

POSTS = ("/reset_prefix_cache", "/sleep", "/wake_up", "/start_profile", "/stop_profile")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def operated(qwen2_vl_folder: Path, traces: Path) -> Iterator[RunningServer]:
    tenants = traces.parent / "tenants.toml"
    tenants.write_text('[ops]\nkeys = ["the-operators-key"]\noperator = true\n[guest]\nkeys = ["a-guests-own-key"]\n')
    flags = ("--operator-routes", "--profile-dir", str(traces), "--api-keys", str(tenants))
    with running_server(qwen2_vl_folder, *flags, key="the-operators-key") as server:
        yield server


def test_a_profile_is_written_into_the_folder(operated: RunningServer, traces: Path) -> None:
    assert error_of(operated.post("/stop_profile", None))["message"] == "no profile is running; start one first"
    assert "letters, digits" in error_of(operated.post("/start_profile?prefix=../x", None))["message"]
    assert operated.post("/start_profile?prefix=mine", None).json() == {"profiling": True}
    assert operated.chat(max_tokens=2).status_code == 200
    file = Path(operated.post("/stop_profile", None).json()["file"])
    assert file.parent == traces and file.name.startswith("mine-") and file.stat().st_size > 0


def test_a_reset_prefix_cache_computes_the_prompt_again(operated: RunningServer) -> None:
    def cached() -> int:
        usage = operated.chat("the same words " * 20, max_tokens=1).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0 and cached() > 0
    assert operated.post("/reset_prefix_cache", None).json() == {"reset": True}
    assert cached() == 0


def test_a_sleeping_server_is_alive_not_ready_and_wakes_up(operated: RunningServer) -> None:
    before = operated.chat(max_tokens=4, temperature=0).json()["choices"][0]
    assert error_of(operated.post("/sleep?level=3", None))["param"] == "level"
    assert operated.post("/sleep?level=1", None).json() == operated.get("/is_sleeping").json() == {"is_sleeping": True}
    assert operated.get("/health").status_code == 200
    assert operated.get("/ready").status_code == 503 and operated.get("/ready").json() == {"status": "sleeping"}
    assert operated.chat(max_tokens=1).status_code == 503
    assert operated.post("/reset_prefix_cache", None).status_code == 503
    assert operated.post("/wake_up", None).json() == operated.get("/is_sleeping").json() == {"is_sleeping": False}
    assert operated.get("/ready").status_code == 200
    assert operated.chat(max_tokens=4, temperature=0).json()["choices"][0]["message"] == before["message"]


def test_only_operators_may(operated: RunningServer) -> None:
    with operated.stranger(Authorization="Bearer a-guests-own-key") as guest:
        for path in POSTS:
            assert guest.post(path).status_code == 403, path
        assert guest.get("/is_sleeping").status_code == 403
    with operated.stranger() as stranger:
        assert stranger.post("/sleep").status_code == 401


def test_without_the_flag_there_are_no_such_routes(server: RunningServer) -> None:
    for path in POSTS:
        assert server.post(path, None).status_code == 404, path


def test_open_routes_on_a_public_address_are_refused() -> None:
    with pytest.raises(UsageError, match="put the engine to sleep; give --api-keys"):
        ServerOptions(operator_routes=True, host="0.0.0.0")
    assert ServerOptions(operator_routes=True, host="0.0.0.0", api_keys="keys.toml").operator_routes
    assert ServerOptions(operator_routes=True).operator_routes


def test_routes_that_no_key_opens_are_refused() -> None:
    with pytest.raises(UsageError, match="an api_key is none; give --api-keys"):
        ServerOptions(operator_routes=True, api_key=("k",))
