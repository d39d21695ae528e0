"""`saccade serve`: builds the server, logs its settings, and shuts it down in order.

SIGTERM ─► new requests get 503 ─► open ones finish (--drain-timeout) ─► the rest get an error ─► exit 0
A second signal skips the draining. SIGHUP reads the file of --api-keys again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from saccade.engine.encoders.encoder_set import EncoderSet
from saccade.engine.ipc.client import WORKER, EngineClient, EngineInfo, EngineUnavailable
from saccade.engine.ipc.kv_event_publisher import KVEventEndpoints
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.supervisor import Launcher
from saccade.engine.process_tuning import collect, freeze, trim
from saccade.engine.ray_cluster.launcher import ENCODER, ray_launcher
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError
from saccade.media.fetch import Fetcher, FetchPolicy
from saccade.options.engine import MediaPolicy, SchedulerConfig
from saccade.options.server import ServerOptions
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.generation_config import defaults_line
from saccade.processor.input_processor import Processor
from saccade.processor.request_builder import RequestBuilder
from saccade.sampling_params import SamplingParams
from saccade.server.api.models import capacity_line
from saccade.server.app import create_app
from saccade.server.config import Settings
from saccade.server.http.connections import HttpConnection
from saccade.server.http.listener import Listener
from saccade.server.http.origins import is_loopback
from saccade.server.http.parser import BoundedHttp
from saccade.server.http.tls import tls_context
from saccade.server.reload import Reloader
from saccade.server.service import ServedEngine, Service
from saccade.structured.schema import is_available
from saccade.structured.schema_validation import ANY_OBJECT
from saccade.types.request import Request

logger = logging.getLogger("saccade.server")

_THROUGHPUT_SECONDS = 10.0
_FLUSH_SECONDS = 2.0  # for errors to reach the clients of aborted requests
_MAX_STEP_MS = 400.0  # on a CPU: bounds the wait of a new request for its first step


def serve(settings: Settings) -> int:
    options = settings.engine
    server = settings.server
    if server.has_files_to_reload:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until they can be read again
    if options.max_step_ms is None:
        options = replace(options, max_step_ms=_MAX_STEP_MS)
    if options.isolate_decoders == "auto":
        options = replace(options, isolate_decoders="on")
    checkpoint = open_checkpoint(options.model, weights=options.load_format != "dummy", options=options)
    options = replace(options, tokenizer=str(checkpoint.tokenizer_path))  # the engine needs no download
    processor = Processor(checkpoint, MediaPolicy.of(options))
    how: dict[str, Any] = {
        "checkpoint": checkpoint,
        "largest": processor.largest_item(),
        "heartbeat_timeout": server.heartbeat_timeout,
    }
    _, high = server.replica_range
    encoders = EncoderSet(
        options, server.encoders, high, bounds=server.encoder_range, **_encoder_launcher(server), **how
    )
    make_client = partial(
        EngineClient,
        options,
        warmup=warmup_requests(processor),
        progress=sys.stderr.isatty(),
        encoders=encoders.addresses,
        launch=_launcher(server),
        kv_events=KVEventEndpoints.of(options, server),
        **how,
    )
    engine = make_client() if high == 1 else ReplicaSet(make_client, server.replicas, server.replica_range)
    local = server.allowed_local_media_path
    fetch_policy = FetchPolicy(
        allowed_domains=server.allowed_media_domains,
        allowed_local_path=Path(local) if local is not None else None,
        max_bytes=options.max_image_bytes,
        timeout_s=server.media_fetch_timeout,
        allow_private_addresses=server.allow_private_media_addresses,
    )
    _warn_if_open(server)
    tls = tls_context(server)
    with _listening(server) as sock:
        service = Service(options, server, processor, engine, Fetcher(fetch_policy), encoders.views)
        running = _RunningServer(service, engine, encoders, sock, tls)
        with asyncio.Runner(loop_factory=running.http.config.get_loop_factory()) as runner:
            return runner.run(running.run())


def _launcher(server: ServerOptions) -> Launcher:
    if server.ray_address is None:
        return partial(EngineProcess.spawn, WORKER)
    return ray_launcher(server.ray_address, server.ray_cpus)


def _encoder_launcher(server: ServerOptions) -> dict[str, Any]:
    """Workers on Ray have names, unlike those of any other server of the cluster."""
    if server.ray_address is None or not server.encoders:
        return {}
    launch = ray_launcher(server.ray_address, server.ray_cpus, ENCODER)
    return {"launch": launch, "name": f"saccade-{secrets.token_hex(8)}"}


def _warn_if_open(server: ServerOptions) -> None:
    if any((server.api_key, server.api_keys, server.tenant_header, server.ssl_ca_certs)):
        return
    if not is_loopback(server.host):
        advice = "set --api-key or --api-keys, or listen on 127.0.0.1"
        logger.warning("whoever reaches %s:%d may use this server: %s", server.host, server.port, advice)


@contextlib.contextmanager
def _listening(server: ServerOptions) -> Iterator[socket.socket]:
    """Binds the port before anything slow begins, so that a port in use fails at once."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        sock = socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        address = f"{server.host}:{server.port}"
        message = f"cannot listen on {address}: {error.strerror}; choose another --port or --host"
        raise ConfigError(message) from None
    with sock:
        yield sock


def warmup_requests(processor: Processor) -> list[Request]:
    """Text, an image and a JSON grammar: lazy initialization is done before the first request."""
    params = SamplingParams(max_tokens=2, temperature=0)
    text = processor.from_prompt("warm")
    warmups = [(text, params)]
    if processor.policy.limits.get("image", 0) > 0:
        image = {"image": _black_bmp(64, 64)}
        warm = {"prompt": f"{processor.placeholder}warm", "multi_modal_data": image}
        prompt = processor.from_prompt(warm, salt=os.urandom(32))  # no tier must have its embeddings
        warmups.append((prompt, params))
    if is_available():  # preparing the tokenizer for grammars takes one to three seconds
        warmups.append((text, replace(params, structured=ANY_OBJECT)))
    builder = RequestBuilder(frozenset(), seed=0)  # without end tokens, so that decode is warmed up, too
    return [builder.build(f"warm-up-{i}", *warmup, max_tokens=2)[0] for i, warmup in enumerate(warmups)]


def check_context(processor: Processor, limits: SchedulerConfig) -> None:
    """ConfigError where the KV cache or --max-model-len is so small that no image fits."""
    if processor.policy.limits.get("image", 0) == 0 or not processor.takes_images:
        return
    image = {"image": _black_bmp(28, 28)}
    smallest = len(processor.from_prompt({"prompt": processor.placeholder, "multi_modal_data": image}))
    if smallest >= limits.max_model_len:
        blocks = f"{limits.num_blocks} KV blocks of {limits.block_size}"
        advice = "raise --kv-cache-gb or --max-model-len, or serve text with --limit-mm-per-prompt image=0"
        raise ConfigError(
            f"prompt and answer may have {limits.max_model_len} tokens ({blocks}), and an image of 28x28 "
            f"pixels alone takes {smallest}; {advice}"
        )


def _black_bmp(width: int, height: int) -> bytes:
    pixels = bytes(width * height * 3)
    header = (54 + len(pixels), 0, 54, 40, width, height, 1 | 24 << 16, 0, len(pixels), 0, 0, 0, 0)
    return b"BM" + b"".join(value.to_bytes(4, "little") for value in header) + pixels


class _UvicornServer(uvicorn.Server):
    """Uvicorn without its signal handlers and its accept loop.

    On a signal Uvicorn would close the port at once, but a draining server still answers probes. For the
    accept loop see `Listener`.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._service = service
        timeout = service.server.header_timeout
        self._listener = Listener(sock, self._make_protocol, service.connections, tls, timeout)

    def _make_protocol(self, handshake: HttpConnection | None) -> BoundedHttp:
        service = self._service
        return BoundedHttp(self.config, self.server_state, service.server, service.connections, handshake)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _RunningServer:
    """The life of the server: start, drain, stop."""

    def __init__(
        self,
        service: Service,
        engine: ServedEngine,
        encoders: EncoderSet,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._service = service
        self._tls = tls
        self._engine = engine
        self._encoders = encoders
        self._sock = sock
        self._stop: asyncio.Task[None] | None = None
        self._skip_drain = asyncio.Event()
        self._reloader = Reloader(service.server, service.tenants, tls)
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
            forwarded_allow_ips=[str(net) for net in service.server.proxy_networks()] or None,  # this machine
        )
        self.http = _UvicornServer(config, service, sock, tls)

    async def run(self) -> int:
        """Serves from the start: while the model loads, /health and /ready report it."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if self._service.server.has_files_to_reload:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reloader.begin)
        serving = asyncio.create_task(self.http.serve([]))
        starting = asyncio.create_task(self._start_engine())
        reporting = asyncio.create_task(self._report_throughput())
        warming = asyncio.create_task(self._service.warm())
        try:
            await serving
            return int(starting.done() and not starting.result())
        finally:
            for task in (starting, reporting, warming):
                task.cancel()
            self._reloader.close()
            await self._engine.stop()
            await self._encoders.stop()
            await self._service.close()

    async def _start_engine(self) -> bool:
        try:
            started = await asyncio.gather(self._engine.start(), self._encoders.start())
            check_context(self._service.processor, started[0].limits)
            self._announce(*started)
            freeze()
            if self._service.batches is not None:
                self._service.batches.resume()
        except (ConfigError, EngineUnavailable) as error:
            if not self._service.gate.is_draining:
                print(f"saccade: {error}", file=sys.stderr)
            self.http.should_exit = True
            return self._service.gate.is_draining
        return True

    def _announce(self, info: EngineInfo, about_encoders: tuple[str, ...]) -> None:
        host, port = self._sock.getsockname()[:2]
        for reason in (*info.reasons, *about_encoders):
            logger.info("%s", reason)
        logger.info("%s", capacity_line(self._service))
        logger.info("%s", defaults_line(self._service.defaults))
        if self._service.server.allow_private_media_addresses:
            domains = ", ".join(self._service.server.allowed_media_domains)
            logger.warning("pictures are fetched from private addresses too, where %s lead there", domains)
        logger.info("routes: %s", " ".join(self._routes))
        names = ", ".join(self._service.names)
        url = f"{'http' if self._tls is None else 'https'}://{host}:{port}{self._service.server.root_path}"
        logger.info("serving %s on %s after %.1f s", names, url, info.start_seconds)

    def _on_signal(self) -> None:
        if self._stop is None:
            self._stop = asyncio.create_task(self._drain())
        else:
            self._skip_drain.set()

    async def _drain(self) -> None:
        gate = self._service.gate
        timeout = self._service.server.drain_timeout
        gate.is_draining = True
        if self._service.batches is not None:
            await self._service.batches.close()
        logger.info("shutting down: %d requests are open and may take %.0f s", gate.num_open, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while gate.num_open and not self._skip_drain.is_set():
                    await asyncio.sleep(0.05)
        await self._engine.stop()  # requests that are still open get an error now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                while gate.num_open:
                    await asyncio.sleep(0.05)
        self.http.should_exit = True

    async def _report_throughput(self) -> None:
        """Logs one line per interval with work, then collects garbage. An idle server logs nothing."""
        metrics = self._service.metrics
        while True:
            tokens_in = metrics.tokens_in
            tokens_out = metrics.tokens_out
            await asyncio.sleep(_THROUGHPUT_SECONDS)
            tokens_in = metrics.tokens_in - tokens_in
            tokens_out = metrics.tokens_out - tokens_out
            stats = self._engine.stats()
            work = tokens_in + tokens_out + self._service.gate.num_open
            if stats and work:
                logger.info("%s", _throughput_line(tokens_in, tokens_out, stats))
                collect()  # about 1 ms: only what came since the start
                trim()  # 1 to 2 ms with a heap of 30 MB


def _throughput_line(tokens_in: int, tokens_out: int, stats: dict[str, Any]) -> str:
    prefix = stats["prefix_cache"]
    encoder = stats["encoder_cache"]
    return (
        f"{tokens_in / _THROUGHPUT_SECONDS:.1f} prompt and {tokens_out / _THROUGHPUT_SECONDS:.1f} answer "
        f"tokens/s; {stats['running']} running, {stats['waiting']} waiting; "
        f"KV {stats['kv']['used'] / stats['kv']['total']:.0%} used; "
        f"prefix cache {_share(prefix['hits'], prefix['queries'])} found, "
        f"pictures {_share(encoder['hits'], encoder['hits'] + encoder['misses'])} found"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
