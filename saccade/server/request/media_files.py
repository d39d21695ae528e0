"""Files of `/v1/files` that a request names by their ids: its tenant's own, within the limits of media."""

from __future__ import annotations

from pathlib import Path

from saccade.apps.batch.batch_store import BatchStore
from saccade.errors import RequestError, quoted
from saccade.media.fetch import OnBytes
from saccade.options.engine import MediaPolicy
from saccade.server.batch_jobs import BatchJobs

BATCH = "batch"
MEDIA_PURPOSES = ("user_data", "vision", "assistants")
PURPOSES = (BATCH, *MEDIA_PURPOSES)
"""Of files that clients store; those of all but the first may be named in requests."""


class StoredFiles:
    def __init__(self, jobs: BatchJobs | None, policy: MediaPolicy) -> None:
        self._jobs = jobs  # None: this server keeps no files
        self._policy = policy

    async def read(self, tenant: str, client: str, file_id: str, param: str, on_bytes: OnBytes) -> bytes:
        if self._jobs is None:
            message = "file_id names a file, and this server keeps none; start it with --batch-dir DIR"
            raise RequestError(f"{message}, or send the data", code="unsupported", param=param)
        path, size = self._find(self._jobs.store, tenant, file_id, param)
        on_bytes(size)
        try:
            return await self._jobs.in_thread(tenant, client, path.read_bytes)
        except FileNotFoundError:  # deleted since
            raise RequestError(
                f"there is no file {quoted(file_id)}", code="file_not_found", param=param
            ) from None

    def _find(self, store: BatchStore, tenant: str, file_id: str, param: str) -> tuple[Path, int]:
        """The path is made from a known record's id, never from what a client sent."""
        record = store.file(tenant, file_id, param)
        if record.purpose not in MEDIA_PURPOSES:
            purposes = ", ".join(MEDIA_PURPOSES)
            message = f"{record.id} has the purpose {record.purpose}; media need one of {purposes}"
            raise RequestError(message, param=param)
        limit = max(self._policy.document.max_bytes, self._policy.max_image_bytes)
        if record.size > limit:
            message = (
                f"{record.id} has {record.size} bytes, and {limit} are the most of an image or a document"
            )
            raise RequestError(message, code="image_file_too_large", param=param)
        return store.data(record.id), record.size
