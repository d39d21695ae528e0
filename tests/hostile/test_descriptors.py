"""A server that may open no more files (`ulimit -n`): nothing fails that needs none, and it recovers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from tests.helpers.servers.serving import chat_body, running_server

SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"enum": ["a", "b"]}}}


def test_without_descriptors_what_needs_one_is_a_503_and_works_again_later(
    qwen2_vl_folder: Path, tmp_path: Path
) -> None:
    body = chat_body(response_format=SCHEMA, max_tokens=4)
    batch_file = {"file": ("a.jsonl", b"{}\n")}
    with running_server(qwen2_vl_folder, "--batch-dir", str(tmp_path)) as server, server.client() as client:
        assert client.get("/health").status_code == 200  # on a connection that stays open
        pid = server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # of numbers: all below it are taken
        refused = client.post("/v1/chat/completions", json=body)
        plain = client.post("/v1/chat/completions", json=chat_body(max_tokens=2))
        # The last: a connection whose body is not read ends, and a new one would wait for a descriptor.
        unwritten = client.post("/v1/files", data={"purpose": "batch"}, files=batch_file)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert refused.status_code == 503 and "cannot be started" in refused.text
        assert "retry-after" in refused.headers
        assert unwritten.status_code == 503 and "no file can be opened now" in unwritten.text
        assert plain.status_code == 200
        assert client.post("/v1/files", data={"purpose": "batch"}, files=batch_file).status_code == 200
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert not any("Traceback" in line for line in server.log)
