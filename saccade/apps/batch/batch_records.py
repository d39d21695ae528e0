"""What a server keeps of a file and of a batch, and how OpenAI's API shows it. Reads and writes nothing."""

from __future__ import annotations

from typing import Any

import msgspec

FINAL = frozenset({"completed", "failed", "cancelled", "expired"})
STOPPABLE = frozenset({"validating", "in_progress"})
_TIMES = ("in_progress", "finalizing", *sorted(FINAL), "cancelling")  # statuses that have a moment


class FileRecord(msgspec.Struct):
    id: str
    owner: str  # name of the tenant
    filename: str  # as the client called it; no path is made of it
    purpose: str
    size: int  # bytes
    created_at: int

    def view(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class BatchRecord(msgspec.Struct):
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = {}  # when it came into a status
    error: str | None = None  # why it failed as a whole
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def view(self) -> dict[str, Any]:
        failure = {"code": "batch_failed", "message": self.error, "line": None, "param": None}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [failure]} if self.error else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
