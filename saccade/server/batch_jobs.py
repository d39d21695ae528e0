"""Runs the batches of a folder through the server's own routes, few requests at a time.

A batch's file is read in a helper process, and its results are written in a thread with a loop of its own:
no line delays a stream. Its requests run on the server's loop and pass the gate and limits of its API key.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.types import ASGIApp

from saccade.apps.batch.batch_file import BatchResult, result_lines
from saccade.apps.batch.batch_lines import BatchLines, BatchRequest, batch_lines
from saccade.apps.batch.batch_records import STOPPABLE, BatchRecord
from saccade.apps.batch.batch_run import BUSY, retry_seconds, run_batch
from saccade.apps.batch.batch_store import BatchStore
from saccade.errors import ConfigError, RequestError
from saccade.helpers.process import HelperProcess, Reply, thread_seconds
from saccade.options.server import ServerOptions
from saccade.server.accounts import Account
from saccade.server.errors import ApiError
from saccade.server.http.auth import Tenants
from saccade.server.http.in_process import Answer, post
from saccade.server.http.limits import AdmissionGate
from saccade.util.fair_pool import FairPool, Owner

logger = logging.getLogger("saccade.server")

MAX_LINES = 50_000
_MAX_RUNNING = 8  # batches, one of each owner; the others wait
_GATE_SHARE = 4  # batches take at most one in so many of the gate's open requests
_DISK_THREADS = 2
_READERS = 2  # helper processes that read at a time
_LINE_HELPER = "saccade.server.batch_line_helper"
_UNNAMED_CLIENT = "address:batches"  # no tenant and no peer has this name
_SHUTDOWN = "shutdown"

Result = TypeVar("Result")


class _Stopped(Exception):
    """The batch was cancelled, has expired, or the server ends."""


class _BatchJob:
    def __init__(self, record: BatchRecord) -> None:
        self.record = record
        self.loop = asyncio.get_running_loop()  # the server's
        self.has_begun = False
        self.stopped = asyncio.Event()
        self.why = ""  # it stops: the status it gets, or _SHUTDOWN
        self.helper: HelperProcess | None = None  # while it reads the file

    def stop(self, why: str) -> None:
        """Its sending and its reading, wherever they are."""
        self.why = why
        self.stopped.set()
        if self.helper is not None:
            self.loop.run_in_executor(None, self.helper.close)  # which waits for its end


class BatchJobs:
    """Batches of one owner run one after the other."""

    def __init__(
        self,
        server: ServerOptions,
        tenants: Tenants,
        gate: AdmissionGate,
        max_chars: Callable[[], int],
        charge: Callable[[Account, float], None],
    ) -> None:
        """`charge`: processor seconds to an account, on the server's loop."""
        assert server.batch_dir is not None
        self.store = BatchStore(Path(server.batch_dir), server.batch_storage_mb << 20, server.batch_dir_bytes)
        self._tenants = tenants
        self._max_chars = max_chars
        self._charge = charge
        self._app: ASGIApp | None = None
        self._concurrency = min(server.batch_concurrency, max(1, gate.max_open // _GATE_SHARE))
        self._turns = asyncio.Semaphore(self._concurrency)  # of requests
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jobs: dict[str, _BatchJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(_MAX_RUNNING, thread_name_prefix="saccade-batch")
        self.disk = FairPool(_DISK_THREADS, "saccade-files", max_running=1)
        self._readers = FairPool(_READERS, "saccade-batch-lines", max_running=1)
        self._is_closed = False

    def connect(self, app: ASGIApp) -> None:
        """The routes that answer the requests, without keys and browser rules around them."""
        self._app = app

    def resume(self) -> None:
        """Goes on with batches of an earlier run of the server."""
        for record in self.store.unfinished():
            self.add(record)

    def add(self, record: BatchRecord) -> None:
        if self._is_closed:  # the next start resumes it
            return
        job = _BatchJob(record)
        self._jobs[record.id] = job
        self._spawn(self._run(job))

    async def cancel(self, record: BatchRecord) -> None:
        job = self._jobs.get(record.id)
        if record.status in ("cancelling", "cancelled"):
            return
        if job is None or record.status not in STOPPABLE:
            message = f"{record.id} is {record.status} and cannot be cancelled any more"
            raise ApiError(409, message, code="batch_not_cancellable", param="batch_id")
        await self._end(job, "cancelled")

    async def close(self) -> None:
        """Unfinished batches stay so on disk. What only reads still works, until `disk` is closed."""
        self._is_closed = True
        for job in self._jobs.values():
            job.stop(_SHUTDOWN)
        self._readers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False)
        self.store.close()

    async def in_thread(self, tenant: str, client: str, work: Callable[..., Result], *args: Any) -> Result:
        """Runs work of the store, in its own threads and in the client's turn: a slow disk delays no prompt.

        ApiError if it is full.
        """
        try:
            return await asyncio.wrap_future(
                self.disk.submit(self._turn(tenant, client), partial(work, *args))
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.error("the folder of --batch-dir failed: %s", error)
            message = f"the server's folder of files cannot be written: {error.strerror}; nothing was changed"
            raise ApiError(507, message, code="storage_full") from None

    def _turn(self, tenant: str, client: str = "") -> Owner:
        account = self._tenants.account(tenant)
        return Owner(client or tenant or _UNNAMED_CLIENT, weight=account.settings.weight if account else 1.0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- on the server's loop -------------------------------------------------------------------------------

    async def _run(self, job: _BatchJob) -> None:
        record = job.record
        loop = asyncio.get_running_loop()
        seconds = max(0.0, record.expires_at - time.time())
        expiry = loop.call_later(seconds, lambda: self._spawn(self._end(job, "expired")))
        try:
            if not seconds:
                await self._end(job, "expired")
            async with self._owners.setdefault(record.owner, asyncio.Lock()):
                if not job.why:
                    job.has_begun = True
                    await loop.run_in_executor(self._pool, self._work, job)
        except Exception:
            logger.exception("%s cannot be finished; the next start of the server tries again", record.id)
        finally:
            expiry.cancel()
            del self._jobs[record.id]

    async def _end(self, job: _BatchJob, status: str) -> None:
        """Stops it where it runs. One that waits for its turn ends at once."""
        job.stop(status)
        if not job.has_begun:
            await self.in_thread(job.record.owner, "", self.store.finish, job.record, status)
        elif status == "cancelled":
            await self.in_thread(job.record.owner, "", self.store.move, job.record, "cancelling")

    async def _send(self, job: _BatchJob, url: str, body: bytes) -> Answer:
        answering = asyncio.ensure_future(self._answer(job.record.owner, url, body))
        stopping = asyncio.ensure_future(job.stopped.wait())
        try:
            await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise _Stopped
            return answering.result()
        finally:
            answering.cancel()
            stopping.cancel()

    async def _answer(self, owner: str, url: str, body: bytes) -> Answer:
        """Where the server is busy, the request waits: live requests come first."""
        assert self._app is not None
        for attempt in itertools.count():
            account = self._tenants.account(owner)
            if account is None:
                raise ConfigError("the API key or tenant of the batch is not one of this server's any more")
            async with self._turns:
                answer = await post(self._app, account, owner or _UNNAMED_CLIENT, url, body)
            if answer.status not in BUSY:
                break
            await asyncio.sleep(retry_seconds(answer.retry_after, attempt))
        return answer

    # --- in the batch's thread ------------------------------------------------------------------------------

    def _work(self, job: _BatchJob) -> None:
        record = job.record
        try:
            if record.status != "cancelling":  # before the server started
                with self._lines(job) as lines:
                    asyncio.run(self._send_all(job, lines))
            is_cancelled = record.status == "cancelling"
            if not is_cancelled:
                self.store.move(record, "finalizing")
            self.store.finish(record, "cancelled" if is_cancelled else "completed")
        except _Stopped:
            if job.why == _SHUTDOWN:
                return
            self.store.finish(record, job.why)
        except (ConfigError, RequestError) as error:
            self.store.finish(record, "failed", str(error))
        except OSError as error:
            self.store.suspend(record, error)
        counts = f"{record.completed} of {record.total} requests answered, {record.failed} failed"
        logger.info("%s is %s: %s", record.id, record.status, counts)

    @contextmanager
    def _lines(self, job: _BatchJob) -> Iterator[BatchLines]:
        """Read in the owner's turn, and charged to it. _Stopped when the job was stopped meanwhile."""
        self.store.file(job.record.owner, job.record.input_file_id)  # it may be gone after a full disk
        job.helper = helper = HelperProcess(_LINE_HELPER, str(self._max_chars()))
        turn = self._turn(job.record.owner)

        def measured(work: Callable[[], Reply]) -> Reply:
            start = thread_seconds()
            try:
                return work()
            finally:
                self._charge_from_thread(job, thread_seconds() - start)

        def in_turn(work: Callable[[], Reply]) -> Reply:
            try:
                return self._readers.submit(turn, partial(measured, work)).result()
            finally:  # the pool may be closed, too, and the helper
                if job.why:
                    raise _Stopped

        try:
            with batch_lines(self.store.data(job.record.input_file_id), helper, MAX_LINES, in_turn) as lines:
                if not len(lines):
                    raise ConfigError("the file has no lines; each must be a request")
                helper.close()
                yield lines
        finally:
            helper.close()

    def _charge_from_thread(self, job: _BatchJob, seconds: float) -> None:
        account = self._tenants.account(job.record.owner)
        if account is not None:  # else its key is gone, and the batch fails
            with suppress(RuntimeError):  # the server has ended
                job.loop.call_soon_threadsafe(self._charge, account, seconds)

    async def _send_all(self, job: _BatchJob, lines: BatchLines) -> None:
        record = job.record
        results = self.store.results(record)

        def on_start(total: int, resumed: int) -> None:
            record.total = total
            record.failed = sum(is_error for _, is_error in result_lines(results)) if resumed else 0
            record.completed = resumed - record.failed
            if record.status == "validating":
                self.store.move(record, "in_progress")

        def on_result(result: BatchResult) -> None:
            record.failed += result.is_error
            record.completed += not result.is_error
            self.store.check_results(record)

        await run_batch(lines, results, partial(self._send_from, job), self._concurrency, on_start, on_result)

    async def _send_from(self, job: _BatchJob, request: BatchRequest) -> BatchResult:
        endpoint = job.record.endpoint
        if request.url != endpoint:
            problem = f"line {request.line}: url is {request.url} and the batch's endpoint is {endpoint}"
            return BatchResult(request._replace(problem=problem), 0, "", b"")
        sending = asyncio.run_coroutine_threadsafe(self._send(job, request.url, request.body), job.loop)
        answer = await asyncio.wrap_future(sending)
        return BatchResult(request, answer.status, answer.request_id, answer.content)
