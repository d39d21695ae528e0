"""Every setting of `saccade serve` beside the engine's, with its default, help and checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.errors import UsageError
from saccade.options.fields import option as _option
from saccade.options.fields import positive as _positive
from saccade.options.fields import require as _require
from saccade.options.proxies import Network, check_proxies, network_of

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Every setting of `saccade serve` beside the engine's. Flags, environment and file are made from it."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all of them")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    replicas: int = _option(
        1,
        "engines behind this server, each with its own copy of the model: one per GPU (cuda:0, cuda:1 ...); "
        "on a CPU they share the cores and the automatic cache memory. Requests go where their images and "
        "prefixes are cached unless that engine is busy; one that dies takes no other with it",
    )
    min_replicas: int | None = _option(None, "engines that autoscaling leaves; automatic: --replicas")
    max_replicas: int | None = _option(
        None,
        "engines that autoscaling may start when much prompt work is queued or KV blocks run out; those that "
        "it ends finish their requests first; automatic: --replicas, which is how many there are at first",
    )
    encoders: int = _option(
        0,
        "processes that only encode images, shared by all engines; each loads the vision tower alone, on a "
        "GPU after those of the engines if there is one, else beside an engine, or on a part of the CPU. An "
        "embedding that is lost or late is encoded in the engine; 0: engines encode all images themselves",
    )
    min_encoders: int | None = _option(None, "encoder workers that autoscaling leaves; automatic: --encoders")
    max_encoders: int | None = _option(
        None, "encoder workers that autoscaling may start when those there are busy; automatic: --encoders"
    )
    ray_address: str | None = _option(
        None,
        "Ray cluster on whose machines the engines run, such as 10.0.0.1:6379; auto: the one that this "
        "machine has joined (ray start). Each machine needs Saccade, and MODEL under the same path",
    )
    ray_cpus: int = _option(1, "CPUs that Ray reserves for an engine, beside a GPU where there are any")
    kv_events: str | None = _option(
        None,
        "tell routers such as Dynamo and llm-d which KV blocks are cached, in vLLM's form over ZeroMQ, at "
        "this address, such as tcp://127.0.0.1:5557; the events hold the tokens of all prompts and outputs. "
        "Each further replica takes the next port. Needs saccade[kv-events]",
    )
    kv_events_replay: str | None = _option(
        None, "address where routers ask for events that they missed, such as tcp://127.0.0.1:5657"
    )
    kv_events_topic: str | None = _option(None, "topic of the events; llm-d expects kv@ADDRESS@MODEL")
    served_model_name: tuple[str, ...] = _option(
        (), "model names clients may use, the first is shown; automatic: MODEL, or the name of its folder"
    )
    reasoning_parser: str = _option(
        "auto",
        "how the model marks its thinking, which answers give apart from their text: think, qwen3, glm45, "
        "deepseek_v3, deepseek_r1, mistral, gemma4; auto: by the chat template; none: thinking is text",
    )
    tool_call_parser: str = _option(
        "auto",
        "how the model writes tool calls: hermes, qwen3_coder, mistral, llama3_json, pythonic, deepseek_v3, "
        "deepseek_v32, glm45, gemma4, functiongemma ...; auto: by the chat template; none: calls are text",
    )
    api_key: tuple[str, ...] = _option((), "bearer token that clients must send; may be repeated; none: open")
    api_keys: str | None = _option(
        None,
        "TOML file of tenants: a table each with keys, weight, requests_per_minute, tokens_per_minute, "
        "pixels_per_minute, processor_seconds_per_minute, open_requests; SIGHUP reads it again",
    )
    tenant_header: str | None = _option(
        None, "header in which a proxy names the tenant, such as X-Tenant; needs --trusted-proxies"
    )
    trusted_proxies: tuple[str, ...] = _option(
        (),
        "addresses and networks of the proxies that --tenant-header and X-Forwarded-For are read from, such "
        "as 127.0.0.1,10.1.0.0/16; default: none, and 127.0.0.1 for X-Forwarded-For",
    )
    share_caches: bool = _option(
        False, "let tenants share both caches; each can then tell if another one sent a given text or image"
    )
    root_path: str = _option("", "path under which a proxy shows the server, such as /vlm")
    ssl_certfile: str | None = _option(
        None, "PEM file of the certificate with its chain: serve HTTPS; SIGHUP reads it again"
    )
    ssl_keyfile: str | None = _option(None, "PEM file of its key; default: --ssl-certfile has it")
    ssl_ca_certs: str | None = _option(
        None, "PEM file of authorities: clients must have a certificate that one of them has signed"
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "web origins that may call the server, such as https://app.example.com, or *; default: its own"
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "host names under which clients may call the server, or *; localhost is always allowed; automatic: "
        "HOST if it is an address of this machine, else any",
    )
    allowed_media_domains: tuple[str, ...] = _option((), "domains media may be fetched from; default: none")
    allow_private_media_addresses: bool = _option(
        False, "also fetch from allowed domains that are on a private network; never with *"
    )
    media_fetch_timeout: float = _option(10.0, "seconds to fetch one image or video, with redirects")
    allowed_local_media_path: str | None = _option(None, "folder that file: URLs may name; default: none")
    max_body_mb: int = _option(96, "MiB of one request's body")
    max_inflight_mb: int | None = _option(
        None,
        "MiB of all bodies being read or prepared at the same time; automatic: 1024, or an eighth of the "
        "memory that is free at start if that is less, but two of the largest bodies",
    )
    max_client_share: float = _option(
        0.5,
        "share of --max-inflight-mb that the requests of one API key (without keys: of one address) may "
        "hold, and of --max-connections that one address may hold; 1: all",
    )
    max_connections: int | None = _option(None, "open connections; automatic: from ulimit -n, at most 4096")
    header_timeout: float = _option(
        15.0, "seconds until a connection's first request, and a request's headers, have arrived"
    )
    body_timeout: float = _option(
        15.0, "seconds that a body may take; a longer one must bring --min-body-rate over each such interval"
    )
    min_body_rate: float = _option(32.0, "KiB a second that bodies must reach; 0: any within --body-timeout")
    write_timeout: float = _option(60.0, "seconds that a response waits for its client to read")
    max_parts: int = _option(4096, "messages and content parts of one request")
    max_waiting_megapixels: int = _option(
        1000,
        "megapixels of images and frames, as they were sent, that the requests of one caller may wait for; "
        "a single request always may",
    )
    max_schema_checks: int = _option(128, "requests of one caller whose JSON schemas wait to be checked")
    uuid_cache_mb: int = _option(64, "MiB of images that clients may name again by uuid; 0 keeps none")
    operator_routes: bool = _option(
        False,
        "serve POST /reset_prefix_cache, /sleep, /wake_up, /start_profile and /stop_profile, and GET "
        "/is_sleeping, to operators; without keys that is everyone who reaches the server",
    )
    batch_dir: str | None = _option(
        None,
        "folder for /v1/files and /v1/batches, of this server alone; unfinished batches go on at the next "
        "start; files in it may stand in requests as file_id; default: none, and all of that is off",
    )
    batch_concurrency: int = _option(4, "requests of batches that run at the same time, beside live ones")
    batch_storage_mb: int = _option(1024, "MiB that the files of one API key may have in --batch-dir")
    batch_dir_mb: int | None = _option(
        None, "MiB that --batch-dir may have in all; automatic: 16 times --batch-storage-mb"
    )
    drain_timeout: float = _option(30.0, "seconds that open requests may take to finish after SIGTERM")
    heartbeat_timeout: float = _option(60.0, "seconds without a heartbeat until the engine is restarted")
    strict_params: bool = _option(False, "refuse requests with unknown fields")
    enable_access_log: bool = _option(True, "log a line per request")
    log_level: str = _option("info", "least severe lines that are logged: " + ", ".join(LEVELS))
    log_format: str = _option("text", "form of log lines: text, or json with a field for each value")
    otlp_traces_endpoint: str | None = _option(
        None,
        "where to send OpenTelemetry traces over OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces; needs "
        "saccade[otel]",
    )

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "from 0 to 65535")
        _check_range("replicas", self.replicas, *self.replica_range, at_least=1)
        _check_range("encoders", self.encoders, *self.encoder_range, at_least=0)
        for name in _COUNTS:
            _positive(name, getattr(self, name))
        for name in ("max_connections", "batch_dir_mb", "max_inflight_mb"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        share = self.max_client_share
        _require(0 < share <= 1, "max_client_share", share, "above 0 and at most 1")
        for name in ("uuid_cache_mb", "drain_timeout", "min_body_rate"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in _TIMEOUTS:
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                expected = "* or origins as browsers send them, such as https://app.example.com"
                raise UsageError(f"allowed_origins takes {expected}, not {origin}")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"allowed_hosts takes * or names without scheme and port, not {host}")
        has_wildcard = any(domain.startswith("*") for domain in self.allowed_media_domains)
        if self.allow_private_media_addresses and (has_wildcard or not self.allowed_media_domains):
            domains = ",".join(self.allowed_media_domains) or "none"
            raise UsageError(
                "allow_private_media_addresses needs allowed_media_domains that name the hosts one by one, "
                f"not {domains}: * would open your whole network to clients"
            )
        if self.max_inflight_mb is not None and self.max_inflight_mb < self.max_body_mb:
            raise UsageError(
                f"max_inflight_mb={self.max_inflight_mb} is below max_body_mb={self.max_body_mb}, so the "
                "largest body could never be taken; raise the one or lower the other"
            )
        root = self.root_path
        _require(not root or _ROOT.fullmatch(root) is not None, "root_path", root, "empty or such as /vlm")
        for name in ("ssl_keyfile", "ssl_ca_certs") if self.ssl_certfile is None else ():
            if getattr(self, name) is not None:
                raise UsageError(f"{name}={getattr(self, name)} needs ssl_certfile, the server's certificate")
        _require(self.log_level in LEVELS, "log_level", self.log_level, f"one of {', '.join(LEVELS)}")
        _require(self.log_format in FORMATS, "log_format", self.log_format, f"one of {', '.join(FORMATS)}")
        if self.otlp_traces_endpoint is not None and not _HTTP.match(self.otlp_traces_endpoint):
            example = "such as http://127.0.0.1:4318/v1/traces"
            message = f"otlp_traces_endpoint takes an http or https URL {example}, not"
            raise UsageError(f"{message} {self.otlp_traces_endpoint}")
        if not all(self.api_key):
            raise UsageError("an api_key is empty, which would let everybody in; give a key or leave it out")
        _check_operator_routes(self)
        check_proxies(self.trusted_proxies, self.tenant_header)

    @property
    def replica_range(self) -> tuple[int, int]:
        """How few and how many engines there may be."""
        return _range(self.replicas, self.min_replicas, self.max_replicas)

    @property
    def encoder_range(self) -> tuple[int, int]:
        return _range(self.encoders, self.min_encoders, self.max_encoders)

    @property
    def has_files_to_reload(self) -> bool:
        """Files that SIGHUP reads again."""
        return (self.api_keys, self.ssl_certfile) != (None, None)

    @property
    def batch_dir_bytes(self) -> int:
        return (self.batch_dir_mb or _OWNERS_WORTH * self.batch_storage_mb) << 20

    def max_inflight_bytes(self, free_bytes: int) -> int:
        """`free_bytes`: of memory, when the server starts."""
        if self.max_inflight_mb is not None:
            return self.max_inflight_mb << 20
        return max(2 * self.max_body_mb << 20, min(1 << 30, free_bytes // 8))

    def proxy_networks(self) -> list[Network]:
        """What `trusted_proxies` names."""
        return [network_of(text) for text in self.trusted_proxies]


def _check_operator_routes(server: ServerOptions) -> None:
    if not server.operator_routes or server.api_keys:
        return
    remedy = "give --api-keys with a tenant that has operator = true"
    if server.api_key:
        raise UsageError(f"operator_routes are for operators, and an api_key is none; {remedy}")
    if server.host not in _LOOPBACK:
        reason = f"would let everyone who reaches {server.host} put the engine to sleep"
        raise UsageError(f"operator_routes without keys {reason}; {remedy}")


def _range(count: int, low: int | None, high: int | None) -> tuple[int, int]:
    return count if low is None else low, count if high is None else high


def _check_range(name: str, count: int, low: int, high: int, *, at_least: int) -> None:
    """Where there are none, autoscaling starts none."""
    _require(
        isinstance(count, int) and at_least <= count <= MAX_REPLICAS,
        name,
        count,
        f"a whole number from {at_least} to {MAX_REPLICAS}",
    )
    if not min(count, 1) <= low <= count <= high <= (MAX_REPLICAS if count else 0):
        settings = f"min_{name}={low}, {name}={count}, max_{name}={high}"
        raise UsageError(f"{settings} must not fall, and be from 1 to {MAX_REPLICAS}")


_OWNERS_WORTH = 16  # API keys that may fill their part of --batch-dir
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_REPLICAS = 64  # and encoder workers
_COUNTS = (
    *("ray_cpus", "max_body_mb", "max_parts", "max_schema_checks"),
    "max_waiting_megapixels",
    *("batch_concurrency", "batch_storage_mb"),
)
_TIMEOUTS = ("heartbeat_timeout", "media_fetch_timeout", "header_timeout", "body_timeout", "write_timeout")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
_ROOT = re.compile(r"(/[\w.~-]+)+")
_HTTP = re.compile(r"https?://[^/\s]")
_HOST = re.compile(r"\*|[\w.-]+|\[[0-9a-fA-F:.]+\]")
