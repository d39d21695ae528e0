"""/v1/files and /v1/batches, in OpenAI's form. Each tenant sees its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from saccade.apps.batch.batch_records import BatchRecord, FileRecord
from saccade.apps.batch.batch_store import FileDraft
from saccade.errors import RequestError, quoted
from saccade.server.batch_jobs import BatchJobs
from saccade.server.errors import ApiError, json_response, overloaded
from saccade.server.http.limits import receive_body
from saccade.server.http.multipart import MultipartReader
from saccade.server.http.request_context import Caller, Exchange
from saccade.server.pipeline import read_request
from saccade.server.request.batches import read_batch
from saccade.server.request.media_files import PURPOSES
from saccade.server.service import Service

_MAX_PAGE = {"files": 10_000, "batches": 100}
_LIMIT = re.compile(r"[0-9]{1,9}")
_DEFAULT_PAGE = {"files": 10_000, "batches": 20}


def jobs_of(service: Service) -> BatchJobs:
    if service.batches is None:
        message = "this server keeps no files and no batches; start it with --batch-dir DIR"
        raise ApiError(404, message, code="not_enabled")
    return service.batches


def _owner(request: Request) -> str:
    return str(request.scope["caller"].tenant)


# --- files --------------------------------------------------------------------------------------------------


async def create_file(service: Service, request: Request) -> dict[str, Any]:
    """Written to the folder as it arrives."""
    reader = MultipartReader(request.headers.get("content-type", ""))
    jobs = jobs_of(service)
    caller: Caller = request.scope["caller"]
    with _draft(jobs, _owner(request)) as draft:

        async def take(chunk: bytes) -> None:
            if data := reader.take(chunk):
                await jobs.in_thread(caller.tenant, caller.client, draft.write, data)

        await receive_body(request, service.server, service.gate, take, "split the file")
        record = await jobs.in_thread(caller.tenant, caller.client, draft.save, *_check_form(reader))
    return record.view()


@contextmanager
def _draft(jobs: BatchJobs, owner: str) -> Iterator[FileDraft]:
    with ExitStack() as stack:
        try:
            draft = stack.enter_context(jobs.store.draft(owner))
        except OSError as error:
            raise overloaded(503, f"no file can be opened now: {error.strerror}; try again soon") from None
        yield draft


def _check_form(reader: MultipartReader) -> tuple[str, str]:
    """The file's name and its purpose."""
    if not reader.is_complete:
        raise ApiError(400, "the form has no end; its last boundary is missing", code="invalid_form")
    if reader.filename is None:
        raise RequestError("the form has no part with the name file", param="file")
    purpose = reader.fields.get("purpose", b"").decode("utf-8", "replace")
    if purpose not in PURPOSES:
        message = f"purpose must be one of {', '.join(PURPOSES)}, not {quoted(purpose)}"
        raise RequestError(message, param="purpose")
    if any(name.startswith("expires_after") for name in reader.fields):
        message = "expires_after is not supported by this server: files stay until they are deleted"
        raise RequestError(message, code="unsupported", param="expires_after")
    return reader.filename, purpose


async def list_files(service: Service, request: Request) -> Response:
    files = jobs_of(service).store.files(_owner(request))
    purpose = request.query_params.get("purpose")
    return _page("files", [file for file in files if purpose in (None, file.purpose)], request.query_params)


async def get_file(service: Service, request: Request) -> Response:
    record = jobs_of(service).store.file(_owner(request), request.path_params["id"])
    return json_response(record.view())


async def file_content(service: Service, request: Request) -> Response:
    store = jobs_of(service).store
    record = store.file(_owner(request), request.path_params["id"])
    return FileResponse(store.data(record.id), media_type="application/octet-stream")


async def delete_file(service: Service, request: Request) -> Response:
    file_id = request.path_params["id"]
    jobs = jobs_of(service)
    caller: Caller = request.scope["caller"]
    await jobs.in_thread(caller.tenant, caller.client, jobs.store.delete_file, caller.tenant, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


# --- batches ------------------------------------------------------------------------------------------------


async def create_batch(service: Service, exchange: Exchange) -> dict[str, Any]:
    jobs = jobs_of(service)
    order = await read_request(service, read_batch, exchange)
    owner = exchange.caller.tenant
    create = partial(jobs.store.create_batch, owner, order.endpoint, order.input_file_id, order.metadata)
    record = await jobs.in_thread(owner, exchange.caller.client, create)
    jobs.add(record)
    return record.view()


async def list_batches(service: Service, request: Request) -> Response:
    return _page("batches", jobs_of(service).store.batches(_owner(request)), request.query_params)


async def get_batch(service: Service, request: Request) -> Response:
    record = jobs_of(service).store.batch(_owner(request), request.path_params["id"])
    return json_response(record.view())


async def cancel_batch(service: Service, request: Request) -> Response:
    jobs = jobs_of(service)
    record = jobs.store.batch(_owner(request), request.path_params["id"])
    await jobs.cancel(record)
    return json_response(record.view())


def _page(kind: str, records: Sequence[FileRecord | BatchRecord], query: Mapping[str, str]) -> Response:
    """The newest first, those after the one that `after` names."""
    limit = query.get("limit", str(_DEFAULT_PAGE[kind]))
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= _MAX_PAGE[kind]:
        message = f"limit must be from 1 to {_MAX_PAGE[kind]}, not {quoted(limit)}"
        raise RequestError(message, param="limit")
    ids = [record.id for record in records]
    after = query.get("after")
    if after is not None:
        if after not in ids:
            raise RequestError(f"after names {quoted(after)}, which is not in the list", param="after")
        records = records[ids.index(after) + 1 :]
    views = [record.view() for record in records[: int(limit)]]
    page = {"object": "list", "data": views, "has_more": len(records) > len(views)}
    if views:
        page |= {"first_id": views[0]["id"], "last_id": views[-1]["id"]}
    return json_response(page)
