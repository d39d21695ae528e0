"""`saccade serve`: puts the parts together, says what was chosen, and shuts everything down in order.

SIGTERM ─► ready is 503, new requests 503 ─► open ones finish (--drain-timeout) ─► the rest get an error ─► exit 0
a second signal skips the waiting
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from saccade.engine.gc_control import collect, freeze, trim
from saccade.engine.ipc.client import EngineClient, EngineInfo, EngineUnavailable
from saccade.errors import ConfigError
from saccade.media.fetch import Fetcher, FetchPolicy
from saccade.options import MediaPolicy, ServerOptions
from saccade.processor.checkpoint import open_checkpoint
from saccade.processor.generation_config import defaults_line
from saccade.processor.prompt import Processor
from saccade.sampling_params import SamplingParams
from saccade.server.api.models import capacity_line
from saccade.server.app import create_app
from saccade.server.config import Settings
from saccade.server.http.listener import Listener
from saccade.server.http.parser import BoundedHttp
from saccade.server.service import Service
from saccade.structured.check import ANY_OBJECT
from saccade.structured.schema import is_available
from saccade.types import Request, Size

logger = logging.getLogger("saccade.server")

_THROUGHPUT_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0  # for errors to reach clients whose requests were given up
_WARM_IMAGE = Size(64, 64)
_STEP_MS = 400.0  # on a CPU: what a newcomer waits for at most before its own step begins


def serve(settings: Settings) -> int:
    options, server = settings
    if options.max_step_ms is None:
        options = replace(options, max_step_ms=_STEP_MS)
    checkpoint = open_checkpoint(
        options.model, weights=options.load_format != "dummy", generation_config=options.generation_config
    )
    processor = Processor(checkpoint, MediaPolicy.of(options))
    engine = EngineClient(
        options,
        checkpoint=checkpoint,
        largest=processor.largest_item(),
        warmup=warmup_requests(processor),
        heartbeat_timeout=server.heartbeat_timeout,
        progress=sys.stderr.isatty(),
    )
    with _listening(server) as sock:
        service = Service(options, server, processor, engine, Fetcher(_fetch_policy(settings)))
        running = _Running(service, engine, sock)
        with asyncio.Runner(loop_factory=running.http.config.get_loop_factory()) as runner:
            return runner.run(running.run())


@contextlib.contextmanager
def _listening(server: ServerOptions) -> Iterator[socket.socket]:
    """The port is taken before anything slow begins, so that a taken one is known at once."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        sock = socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; choose another --port or --host"
        ) from None
    with sock:
        yield sock


def _fetch_policy(settings: Settings) -> FetchPolicy:
    server = settings.server
    local = server.allowed_local_media_path
    return FetchPolicy(
        allowed_domains=server.allowed_media_domains,
        allowed_local_path=Path(local) if local is not None else None,
        max_bytes=settings.engine.max_image_bytes,
        timeout_s=server.media_fetch_timeout,
        allow_private_addresses=server.allow_private_media_addresses,
    )


def warmup_requests(processor: Processor) -> list[Request]:
    """A few tokens of text and a small picture: what is lazy in the engine is done before the first client comes."""
    prompts = [processor.from_prompt("warm")]
    if processor.policy.limits.get("image", 0) > 0:
        text, grey = f"{processor.placeholder}warm", _bmp(_WARM_IMAGE)
        prompts.append(processor.from_prompt({"prompt": text, "multi_modal_data": {"image": grey}}))
    forms = [ANY_OBJECT] if is_available() else []  # reading the tokenizer for grammars takes a second or three
    asked = [*((prompt, None) for prompt in prompts), *((prompts[0], form) for form in forms)]
    return [
        Request(f"warm-up-{i}", prompt, SamplingParams(max_tokens=2, temperature=0, structured=form), 2, frozenset(), 0)
        for i, (prompt, form) in enumerate(asked)
    ]


def _bmp(size: Size) -> bytes:
    """A black picture in the simplest format there is: a header, then 24 bits a pixel."""
    pixels = bytes(size.width * size.height * 3)
    numbers = (54 + len(pixels), 0, 54, 40, size.width, size.height, 1 | 24 << 16, 0, len(pixels), 0, 0, 0, 0)
    return b"BM" + b"".join(number.to_bytes(4, "little") for number in numbers) + pixels


class _Server(uvicorn.Server):
    """Signals are ours: Uvicorn would close the port at once, and a draining server still has to say so. So is the
    port: Uvicorn's loop drops connections when descriptors run out."""

    def __init__(self, config: uvicorn.Config, service: Service, sock: socket.socket) -> None:
        super().__init__(config)
        self._service = service
        self._listener = Listener(sock, self._make_protocol, service.connections)

    def _make_protocol(self) -> BoundedHttp:
        service = self._service
        return BoundedHttp(
            self.config, self.server_state, service.server, service.connections, on_refusal=service.metrics.refused
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Running:
    """The server from its first request to its last."""

    def __init__(self, service: Service, engine: EngineClient, sock: socket.socket) -> None:
        self._service = service
        self._engine = engine
        self._sock = sock
        self._stop: asyncio.Task[None] | None = None
        self._skip_drain = asyncio.Event()
        app = create_app(service)
        self._routes = sorted({str(getattr(route, "path", "")) for route in app.routes})
        config = uvicorn.Config(
            app,
            loop="auto",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
        )
        self.http = _Server(config, service, sock)

    async def run(self) -> int:
        """The port answers from the start: while the model loads, /health and /ready say so."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self.http.serve([]))
        starting = asyncio.create_task(self._start_engine())
        reporting = asyncio.create_task(self._report_throughput())
        warming = asyncio.create_task(self._service.warm())
        try:
            await serving
            return 0 if not starting.done() or starting.result() else 1
        finally:
            for task in (starting, reporting, warming):
                task.cancel()
            await self._engine.stop()
            await self._service.close()

    async def _start_engine(self) -> bool:
        try:
            self._announce(await self._engine.start())
            freeze()
        except (ConfigError, EngineUnavailable) as error:
            if not self._service.gate.is_draining:
                print(f"saccade: {error}", file=sys.stderr)
            self.http.should_exit = True
            return self._service.gate.is_draining
        return True

    def _announce(self, info: EngineInfo) -> None:
        host, port = self._sock.getsockname()[:2]
        for reason in info.reasons:
            logger.info("%s", reason)
        logger.info("%s", capacity_line(self._service))
        logger.info("%s", defaults_line(self._service.defaults))
        if self._service.server.allow_private_media_addresses:
            domains = ", ".join(self._service.server.allowed_media_domains)
            logger.warning("pictures are fetched from private addresses too, where %s lead there", domains)
        logger.info("routes: %s", " ".join(self._routes))
        names = ", ".join(self._service.names)
        logger.info("serving %s on http://%s:%d after %.1f s", names, host, port, info.start_seconds)

    # --- the end --------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self._stop is None:
            self._stop = asyncio.create_task(self._drain())
        else:
            self._skip_drain.set()

    async def _drain(self) -> None:
        gate, timeout = self._service.gate, self._service.server.drain_timeout
        gate.is_draining = True
        logger.info("shutting down: %d requests are open and may take %.0f s", gate.num_open, timeout)
        deadline = time.monotonic() + timeout
        while gate.num_open and time.monotonic() < deadline and not self._skip_drain.is_set():
            await asyncio.sleep(0.05)
        await self._engine.stop()  # whoever is still open gets an error now
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while gate.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.http.should_exit = True

    # --- the log --------------------------------------------------------------------------------------------------

    async def _report_throughput(self) -> None:
        """One line while there is work, so that a quiet server has a quiet log; then what work left is cleared."""
        metrics = self._service.metrics
        seen = metrics.tokens_in, metrics.tokens_out
        while True:
            await asyncio.sleep(_THROUGHPUT_SECONDS)
            now, stats = (metrics.tokens_in, metrics.tokens_out), self._engine.stats()
            if stats and (now != seen or self._service.gate.num_open):
                logger.info("%s", _throughput_line(now[0] - seen[0], now[1] - seen[1], stats))
                collect()  # of what came since the start: a millisecond
                trim()  # of a heap of 30 MB: another one or two
            seen = now


def _throughput_line(tokens_in: int, tokens_out: int, stats: dict[str, Any]) -> str:
    kv, prefix, encoder = stats["kv"], stats["prefix_cache"], stats["encoder_cache"]
    return (
        f"{tokens_in / _THROUGHPUT_SECONDS:.1f} prompt and {tokens_out / _THROUGHPUT_SECONDS:.1f} answer tokens/s; "
        f"{stats['running']} running, {stats['waiting']} waiting; KV {kv['used'] / kv['total']:.0%} used; prefix cache "
        f"{_share(prefix['hits'], prefix['queries'])} found, pictures "
        f"{_share(encoder['hits'], encoder['hits'] + encoder['misses'])} found"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
