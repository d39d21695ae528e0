"""What the routes share while the server runs: engine, limits, tenants, turns. `pipeline` works with it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from saccade.costs import max_chars
from saccade.engine.encoders.encoder_set import EncoderView
from saccade.engine.ipc.client import EngineClient, EngineUnavailable
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError, RequestError, quoted
from saccade.helpers.free_memory import free_ram
from saccade.media.fetch import Fetcher
from saccade.options.engine import Options, SchedulerConfig
from saccade.options.server import ServerOptions
from saccade.processor.checkpoint_files import BUILTIN_NAME
from saccade.processor.dialects.parser import OutputFormats, output_formats
from saccade.processor.generation_config import sampling_defaults
from saccade.processor.input_processor import Processor
from saccade.server.batch_jobs import BatchJobs
from saccade.server.bodies import BodyReader
from saccade.server.http.auth import Tenants
from saccade.server.http.connections import OpenConnections, connection_limit
from saccade.server.http.limits import AdmissionGate
from saccade.server.metrics import Metrics
from saccade.server.request.fields import FieldReader
from saccade.server.request.media import MediaResolver
from saccade.server.request.media_files import StoredFiles
from saccade.server.request.media_uuids import UuidCache
from saccade.server.tracing import Traces
from saccade.server.turns import Turns
from saccade.structured.schema_validation import CHECKS

logger = logging.getLogger("saccade.server")

DEFAULT_MAX_WAITING = 256
_RETRY_AFTER_START = 5.0

ServedEngine = EngineClient | ReplicaSet


class Service:
    def __init__(
        self,
        options: Options,
        server: ServerOptions,
        processor: Processor,
        engine: ServedEngine,
        fetcher: Fetcher,
        encoders: Callable[[], Sequence[EncoderView]] = tuple,
    ) -> None:
        """`encoders` returns the state of each encoder worker."""
        self.options = options
        self.encoders = encoders
        self.server = server
        self.processor = processor
        self.engine = engine
        self.names = server.served_model_name or (_name_of(options.model),)
        self.tenants = Tenants(server)
        endpoint = server.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces(endpoint, self.names[0])
        self.metrics = Metrics(
            self.names[0],
            engine.stats,
            replicas=engine.replicas,
            encoders=encoders,
            status=engine.status,
            bytes_in_flight=lambda: self.gate.total_bytes(),
        )
        self.gate = _admission_gate(options, server, engine, self.metrics)
        self.turns = Turns(server, self.gate.max_open, self.metrics)
        self.batches: BatchJobs | None = None
        if server.batch_dir is not None:
            self.batches = BatchJobs(
                server, self.tenants, self.gate, lambda: self.max_chars, self.turns.charge
            )
        maximum = connection_limit(server.max_connections)
        self.connections = OpenConnections(maximum, server.max_client_share, on_refusal=self.metrics.refused)
        self.defaults = sampling_defaults(options, processor.checkpoint.generation)
        self.formats = _output_formats(server, processor)
        self.fields = FieldReader(strict=server.strict_params, defaults=self.defaults, formats=self.formats)
        self.created = int(time.time())
        self.began = time.monotonic()
        self._fetcher = fetcher
        files = StoredFiles(self.batches, processor.policy)
        uuids = UuidCache(server.uuid_cache_mb << 20)
        self.media = MediaResolver(fetcher, uuids, files, processor.policy, self.metrics)
        self.bodies = BodyReader(self.turns, server.max_body_mb)
        self.requests = processor.request_builder(options.seed)
        self.request_numbers = itertools.count()

    @property
    def limits(self) -> SchedulerConfig:
        """The engine's limits. EngineUnavailable before its first start."""
        self.check_started()
        assert self.engine.info is not None
        return self.engine.info.limits

    def check_started(self) -> None:
        if self.engine.info is None:
            message = f"the engine is {self.engine.status().state}; try again later"
            raise EngineUnavailable(message, _RETRY_AFTER_START)

    @property
    def state(self) -> str:
        return "draining" if self.gate.is_draining else self.engine.status().state

    @property
    def max_chars(self) -> int:
        return max_chars(self.limits.max_model_len)

    def serves(self, name: str) -> bool:
        """The path of a model folder is accepted too, but never shown."""
        if name == self.options.model and not self.server.served_model_name:
            return True
        return name in self.names

    def check_model(self, name: str | None) -> None:
        if name is not None and not self.serves(name):
            names = ", ".join(self.names)
            message = f"the model {quoted(name, 200)} is not served here; this server has {names}"
            raise RequestError(message, code="model_not_found", param="model")

    async def close(self) -> None:
        if self.batches is not None:
            await self.batches.close()
            self.batches.disk.close()
        await self._fetcher.close()
        self.processor.close()
        self.turns.close()
        self.bodies.close()
        CHECKS.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    async def warm(self) -> None:
        """Starts a template process before the first chat. Logs what is wrong with the template."""
        if self.processor.checkpoint.chat_template is None:
            return
        try:
            await self.turns.take_own(self.processor.form)
        except (ConfigError, RequestError) as error:
            logger.warning("the chat template does not work: %s", error)


def _output_formats(server: ServerOptions, processor: Processor) -> OutputFormats:
    return output_formats(
        processor.checkpoint.chat_template,
        processor.tokenizer.token_id,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
    )


def _name_of(model: str | None) -> str:
    """A hub id as it is; of a folder only its name, because clients need not know its path."""
    if model is None:
        return BUILTIN_NAME
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    return folder.resolve().name or "model"


def _admission_gate(
    options: Options, server: ServerOptions, engine: ServedEngine, metrics: Metrics
) -> AdmissionGate:
    max_bytes = server.max_inflight_bytes(free_ram())
    return AdmissionGate(
        _max_open(options) * server.replica_range[1],
        max_bytes,
        # One body of the maximum size must always fit.
        max(int(max_bytes * server.max_client_share), server.max_body_mb << 20),
        engine_bytes=lambda: engine.bytes_in_flight,
        on_refusal=metrics.refused,
        max_client_pixels=server.max_waiting_megapixels * 10**6,
    )


def _max_open(options: Options) -> int:
    """Requests that one engine runs or lets wait."""
    max_waiting = DEFAULT_MAX_WAITING if options.max_waiting is None else options.max_waiting
    return options.max_num_seqs + max_waiting
