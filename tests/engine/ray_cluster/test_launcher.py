"""Addresses of Ray clusters, and what cannot be combined with one. No cluster is asked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from saccade.engine.ray_cluster.launcher import ray_launcher
from saccade.errors import ConfigError


@pytest.mark.parametrize("address", ["", "head", "ray://head:10001", "head:port", "head:6379/x", "local"])
def test_an_address_that_ray_would_read_otherwise_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"ray_address takes auto or HOST:PORT"):
        ray_launcher(address, 1)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "[fe80::1]:6379", "ray-head.ns.svc:6379"])
def test_an_address_of_a_cluster_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert callable(ray_launcher(address, 1))


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray_address=auto needs Ray.*saccade\[ray\]"):
        ray_launcher("auto", 1)


def test_the_server_never_imports_ray() -> None:
    code = "import sys, saccade.server.serve; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
