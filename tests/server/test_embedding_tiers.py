"""A server that is started again over one folder of embeddings: each key finds its own, and no other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.helpers.servers.serving import RunningServer, chat_body, photo_part, running_builtin, text_part, until

IMAGE = [photo_part(240, 180, seed=5), text_part("?")]


def ask(server: RunningServer, key: str) -> dict[str, Any]:
    body = chat_body(IMAGE, include_bill=True)
    del body["model"]
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120, verify=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def is_cached(answer: dict[str, Any]) -> bool:
    return bool(answer["bill"]["items"][0]["cached"])


def entries(folder: Path) -> int:
    return len(list(folder.rglob("*.safetensors")))


def test_after_a_restart_a_key_finds_its_own_embeddings_only(tmp_path: Path) -> None:
    """The built-in model takes far longer to encode than a folder to read, so the folder is used."""
    flags = ("--api-key", "a", "--api-key", "b", "--embedding-dir", str(tmp_path))
    with running_builtin(*flags, key="a") as server:
        assert until(lambda: entries(tmp_path) == 1)  # of the warm-up
        first = ask(server, "a")
        assert not is_cached(first)
        assert until(lambda: entries(tmp_path) == 2)
    with running_builtin(*flags, key="a") as server:
        assert until(lambda: any(f"embeddings in {tmp_path}: used" in line for line in server.log)), server.log
        assert not is_cached(ask(server, "b"))
        again = ask(server, "a")
        assert is_cached(again)
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        lines = server.get("/metrics").text.splitlines()
        assert 'saccade:embedding_tier_hits_total{tier="folder"} 1.0' in lines
