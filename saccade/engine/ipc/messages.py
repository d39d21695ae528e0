"""Messages between the API process and the engine process, and the frames they are sent in.

A frame is four bytes of length (big endian), then one message in msgpack. A value that does not fit its
declared type ends the connection. Knows no sockets and no processes.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from saccade.checkpoint.config import ModelConfig, model_config
from saccade.errors import RequestError
from saccade.options.engine import Options, SchedulerConfig
from saccade.sampling_params import SamplingParams
from saccade.scheduler.cache_log import CacheChanges
from saccade.types.events import TokenEvent
from saccade.types.media import Geometry, MediaItem
from saccade.types.prompt import Prompt, Span
from saccade.types.replica import Replica
from saccade.types.request import Request, Tenant, Thinking

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 30
_POSITION = np.dtype("<i4")
_Kind = TypeVar("_Kind")
ControlAction = Literal["reset_prefix_cache", "start_profile", "stop_profile"]


class WireError(Exception):
    """The other side sent something that is not a message. The connection ends."""


# --- requests -----------------------------------------------------------------------------------------------


class PromptBody(msgspec.Struct, frozen=True, array_like=True):
    """A `Prompt` without its text and the names of its parts: the engine sees no string of the client."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    items: tuple[MediaItem, ...]  # each image and frame group once, without its data
    data: tuple[bytes, ...]  # each file once: all groups of a video share theirs
    data_of_item: tuple[int, ...]  # items[i] has data[data_of_item[i]]
    item_of_span: tuple[int, ...]  # spans[i] belongs to items[item_of_span[i]]
    positions: bytes  # int32, little endian, row by row
    shape: tuple[int, int]  # [axes, tokens]
    next_position: int
    identity: bytes
    salt: bytes
    constant_rows: int
    wholes: tuple[tuple[int, int], ...]


class RequestBody(msgspec.Struct, frozen=True, array_like=True):
    """Requests with the same prompt and parameters, such as the `n` completions of one client request."""

    ids: tuple[tuple[str, int], ...]  # each request's id and seed
    prompt: PromptBody
    params: SamplingParams  # without stop strings, which only text can see
    max_tokens: int
    eos_token_ids: frozenset[int]
    tenant: Tenant
    priority: int
    thinking: Thinking | None


def pack_requests(requests: Iterable[Request]) -> list[RequestBody]:
    """Requests that share their prompt and parameter objects become one body."""
    alike: dict[Hashable, list[Request]] = {}
    for request in requests:
        same = (id(request.prompt), id(request.params))
        limits = (request.max_tokens, request.eos_token_ids)
        whose = (request.tenant, request.priority)
        alike.setdefault((*same, *limits, *whose, request.thinking), []).append(request)
    bodies = []
    for group in alike.values():
        first = group[0]
        ids = tuple((request.request_id, request.seed) for request in group)
        prompt = _pack_prompt(first.prompt)
        params = replace(first.params, stop=None)
        limits = (first.max_tokens, first.eos_token_ids)
        whose = (first.tenant, first.priority)
        bodies.append(RequestBody(ids, prompt, params, *limits, *whose, first.thinking))
    return bodies


def unpack_requests(bodies: Iterable[RequestBody]) -> list[Request]:
    requests = []
    for body in bodies:
        prompt = _unpack_prompt(body.prompt)
        shared = (prompt, body.params, body.max_tokens, body.eos_token_ids)
        whose = (body.tenant, body.priority, body.thinking)
        requests += [Request(request_id, *shared, seed, *whose) for request_id, seed in body.ids]
    return requests


def _pack_prompt(prompt: Prompt) -> PromptBody:
    items = {item.key: item for item in prompt.items}
    item_index = {key: index for index, key in enumerate(items)}
    files = {id(item.data): item.data for item in items.values()}
    file_index = {identity: index for index, identity in enumerate(files)}
    axes, tokens = prompt.positions.shape
    return PromptBody(
        token_ids=list(prompt.token_ids),
        spans=prompt.spans,
        items=tuple(replace(item, data=b"") for item in items.values()),
        data=tuple(files.values()),
        data_of_item=tuple(file_index[id(item.data)] for item in items.values()),
        item_of_span=tuple(item_index[item.key] for item in prompt.items),
        positions=prompt.positions.astype(_POSITION, copy=False).tobytes(),
        shape=(axes, tokens),
        next_position=prompt.next_position,
        identity=prompt.identity,
        salt=prompt.salt,
        constant_rows=prompt.constant_rows,
        wholes=prompt.wholes,
    )


def _unpack_prompt(body: PromptBody) -> Prompt:
    try:
        positions = np.frombuffer(body.positions, _POSITION).reshape(body.shape)
        pairs = zip(body.items, body.data_of_item, strict=True)
        whole = [replace(item, data=body.data[index]) for item, index in pairs]
        items = tuple(whole[index] for index in body.item_of_span)
    except (ValueError, IndexError) as error:
        raise WireError(f"a prompt of {len(body.token_ids)} tokens does not fit together: {error}") from None
    return Prompt(
        token_ids=body.token_ids,
        spans=body.spans,
        items=items,
        positions=positions,
        next_position=body.next_position,
        identity=body.identity,
        salt=body.salt,
        constant_rows=body.constant_rows,
        wholes=body.wholes,
    )


# --- messages -----------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. The first value on the wire is the class name."""


class Start(Message, frozen=True):
    """First to the worker: all it needs to build a core. The sender has read the checkpoint's small files."""

    path: str
    config: dict[str, Any]  # config.json
    eos_token_ids: list[int]  # as generation_config.json or config.json name them
    is_bridged: bool
    image_processor: dict[str, Any]
    options: Options
    largest: Geometry | None  # the most expensive image the limits allow
    warmup: list[RequestBody]  # run before Ready
    progress: bool  # whether to show progress bars while loading
    replica: Replica = Replica()
    logs_kv_events: bool = False


class Submit(Message, frozen=True):
    """All its requests are admitted or none: one Accepted or Refused follows, which names the first of them.

    Once accepted, each request gets exactly one terminal event.
    """

    requests: list[RequestBody]


class Abort(Message, frozen=True):
    """The terminal event follows, unless it has been sent already."""

    request_id: str


class Control(Message, frozen=True):
    """Something that is done between two steps. One Controlled follows, of the same number."""

    number: int
    action: ControlAction
    prefix: str | None = None  # of the files of a profile


class Stop(Message, frozen=True):
    """The worker ends after the step it is in."""


class WorkerPlace(NamedTuple):
    """Where a worker runs."""

    node: str  # name of the machine
    pid: int
    device: str


class Ready(Message, frozen=True):
    """Weights are loaded, encoder and decoder are warm."""

    limits: SchedulerConfig | None  # None: it is an encoder worker, which schedules nothing
    reasons: tuple[str, ...]  # what was chosen and why
    place: WorkerPlace


class Accepted(Message, frozen=True):
    request_id: str


class Refused(Message, frozen=True):
    request_id: str
    error: RequestError


class Controlled(Message, frozen=True):
    number: int
    result: str | bool | None
    error: str | None = None  # another setting, or another order of calls, would avoid it


class StepUpdate(Message, frozen=True):
    """After every step, and regularly when idle: the heartbeat of the step loop."""

    events: list[TokenEvent]  # since the last update
    stats: dict[str, Any] | None  # about twice a second, and when a request has ended
    cache: CacheChanges | None = None  # from one of several replicas, when something has changed
    kv_events: bytes = b""  # as they are published; empty where they are not, or when nothing has changed


class Fatal(Message, frozen=True):
    """Last from the worker."""

    message: str
    is_config: bool  # other settings can fix it


Command = Start | Submit | Abort | Control | Stop
Report = Ready | Accepted | Refused | Controlled | StepUpdate | Fatal


def start_message(
    path: Path,
    config: ModelConfig,
    image_processor: Mapping[str, Any],
    options: Options,
    largest: Geometry | None,
    warmup: Sequence[Request],
    *,
    progress: bool,
    replica: Replica = Replica(),  # noqa: B008 (immutable)
    logs_kv_events: bool = False,
) -> Start:
    return Start(
        path=str(path),
        config=dict(config.raw),
        eos_token_ids=sorted(config.eos_token_ids),
        is_bridged=config.is_bridged,
        image_processor=dict(image_processor),
        options=options,
        largest=largest,
        warmup=pack_requests(warmup),
        progress=progress,
        replica=replica,
        logs_kv_events=logs_kv_events,
    )


def config_of(start: Start) -> ModelConfig:
    config = model_config(start.config, {"eos_token_id": start.eos_token_ids})
    return replace(config, is_bridged=start.is_bridged)


# --- frames -------------------------------------------------------------------------------------------------


def _encode_error(value: Any) -> Any:
    if isinstance(value, RequestError):
        return value.message, value.code, value.param, value.key
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def decode_error(kind: type, value: Any) -> Any:
    if kind is not RequestError:
        raise TypeError(f"{kind.__name__} has no form on the wire")
    message, code, param, key = value
    return RequestError(message, code=code, param=param, key=key)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_error)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=decode_error)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report, dec_hook=decode_error)


def frame(message: Message) -> bytearray:
    """One message, ready to be sent. RequestError if a client's value cannot be encoded."""
    buffer = bytearray(HEADER.size)
    try:
        _ENCODER.encode_into(message, buffer, HEADER.size)
    except OverflowError:
        problem = "a number that does not fit in 64 bits; send a smaller one"
        raise RequestError(f"the request holds {problem}") from None
    except UnicodeEncodeError:
        problem = "half a surrogate pair, which is no character; send valid text"
        raise RequestError(f"the request holds {problem}") from None
    size = len(buffer) - HEADER.size
    if size > MAX_FRAME_BYTES:
        raise RequestError(
            f"the request takes {size} bytes, but {MAX_FRAME_BYTES} may be sent to the engine at once; "
            "send less",
            code="image_file_too_large",
        )
    HEADER.pack_into(buffer, 0, size)
    return buffer


def body_size(header: bytes) -> int:
    """Bytes that follow the header of a frame."""
    size = int(HEADER.unpack(header)[0])
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame claims {size} bytes, but the most is {MAX_FRAME_BYTES}")
    return size


def read_body(stream: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking stream; None when the other side closed it between two frames."""
    header = stream.read(HEADER.size)
    if not header:
        return None
    if len(header) < HEADER.size:
        raise WireError(f"the connection ended inside a frame's header, after {len(header)} bytes")
    size = body_size(header)
    body = stream.read(size)
    if len(body) < size:
        raise WireError(f"the connection ended inside a frame, after {len(body)} of {size} bytes")
    return body


def command_in(body: bytes) -> Command:
    return decoded(_COMMANDS, body)


def report_in(body: bytes) -> Report:
    return decoded(_REPORTS, body)


def decoded(decoder: msgspec.msgpack.Decoder[_Kind], body: bytes) -> _Kind:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        size = len(body)
        raise WireError(f"a frame of {size} bytes holds no message that is known here: {error}") from None
