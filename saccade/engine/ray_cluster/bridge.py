"""The process between a server and one engine on a Ray cluster. It relays messages and reads only the first.

`python -m saccade.engine.ray_cluster.bridge ADDRESS CPUS WORKER FD`, started by `launcher`. It is the Ray
driver that owns the engine's placement group and actor: when it ends, for any reason, Ray frees both.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple, TextIO

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from saccade.engine.ipc.loop import end_with_parent
from saccade.engine.ipc.messages import Fatal, Start, command_in, frame, read_body
from saccade.engine.ipc.process import MALLOC_ENVIRONMENT
from saccade.engine.ray_cluster.actor import NAMESPACE, TOKEN_BYTES, Endpoint, WorkerActor, keep_alive
from saccade.errors import ConfigError, EngineUnavailable
from saccade.util.logs import set_up_worker

_PLACE_SECONDS = 300.0  # for a node with free resources: a cluster that grows needs minutes to add one
_TELL_SECONDS = 10.0  # between log lines while waiting for it
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_JOIN_SECONDS = 30.0
_CHUNK_BYTES = 1 << 18
_OWN_CALLS = 2  # of an encoder worker's actor: the one that serves the bridge, and another
_CALLS_PER_ENGINE = 10  # images and greetings under way

logger = logging.getLogger("saccade.engine")


class StoppedEarly(Exception):
    """The server does not want the engine any more."""


class Remote(NamedTuple):
    actor: Any  # Ray ends it with its last handle
    endpoint: Endpoint
    connection: socket.socket
    start: Start  # as the engine gets it


class Bridge:
    def __init__(self, address: str, num_cpus: int, worker: str, client: socket.socket) -> None:
        self._address = address
        self._num_cpus = num_cpus
        self._worker = worker
        self._client = client

    def run(self) -> int:
        stream = self._client.makefile("rb")  # never closed: a thread reads it to the end of the process
        try:
            start = self._read_start(stream)
            remote = self._start_engine(start)
        except StoppedEarly:
            return 0
        except (ConfigError, EngineUnavailable) as error:
            self._tell(str(error), is_config=True)
            return 1
        self._relay(stream, remote)
        node = remote.endpoint.node
        self._tell(f"its Ray worker on {node} ended or cannot be reached any more", is_config=False)
        return 0

    def _read_start(self, stream: BinaryIO) -> Start:
        body = read_body(stream)
        start = command_in(body) if body is not None else None
        if not isinstance(start, Start):
            raise StoppedEarly
        return start

    def _tell(self, message: str, *, is_config: bool) -> None:
        """The engine's last words, unless it has said its own."""
        try:
            self._client.sendall(frame(Fatal(message, is_config)))
        except OSError:
            logger.error("the server is gone and cannot be told: %s", message)

    # --- to the engine --------------------------------------------------------------------------------------

    def _start_engine(self, start: Start) -> Remote:
        self._join_cluster()
        resources = self._resources(start)
        group = self._place(resources)
        token = secrets.token_bytes(TOKEN_BYTES)
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
            "max_restarts": 0,  # the server starts another, after a pause
            "runtime_env": {"env_vars": MALLOC_ENVIRONMENT},
        }
        replica = start.replica
        if replica.encoder is not None:  # engines find it by its name, and call it side by side
            options["name"] = replica.encoders[replica.encoder]
            options["max_concurrency"] = _OWN_CALLS + replica.count * _CALLS_PER_ENGINE
        actor = ray.remote(WorkerActor).options(**options).remote(token, self._worker)
        endpoint = self._listen(actor, start.path)
        actor.serve.remote()
        connection = self._connect(endpoint, token)
        return Remote(actor, endpoint, connection, self._placed(start, endpoint, resources))

    def _join_cluster(self) -> None:
        """Ray itself tries for minutes to reach a cluster that is not there."""
        host, colon, port = self._address.rpartition(":")
        late = threading.Timer(_JOIN_SECONDS, self._give_up)
        late.daemon = True
        late.start()
        try:
            if colon:
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            ray.init(address=self._address, namespace=NAMESPACE, logging_level=logging.ERROR)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler prints a stack trace
        except (RayError, OSError, RuntimeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), "")
            raise EngineUnavailable(self._no_cluster(reason), 0) from None
        finally:
            late.cancel()

    def _no_cluster(self, reason: str) -> str:
        advice = "start one with `ray start`, or correct --ray-address"
        return f"no Ray cluster answers at {self._address} ({reason}); {advice}"

    def _give_up(self) -> None:
        self._tell(self._no_cluster(f"tried for {_JOIN_SECONDS:.0f} s"), is_config=True)
        os._exit(1)

    def _resources(self, start: Start) -> dict[str, int]:
        device = start.options.device
        if ":" in device:
            raise ConfigError(f"device={device} names one GPU, but Ray chooses which; use --device cuda")
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        of_gpus = ("cuda", "auto") if has_gpus else ("cuda",)
        return {"CPU": self._num_cpus} | ({"GPU": 1} if device in of_gpus else {})

    def _place(self, resources: dict[str, int]) -> PlacementGroup:
        """A group of one bundle: an engine is on one node. Ray takes the node with the most to spare."""
        group = placement_group([resources], strategy="STRICT_PACK")
        began = last_log = time.monotonic()
        needs = " and ".join(f"{count} {name}" for name, count in resources.items())
        while not group.wait(_POLL_SECONDS):
            self._check_wanted()
            now = time.monotonic()
            free = {name: ray.available_resources().get(name, 0) for name in resources}
            if now - began > _PLACE_SECONDS:
                there = ", ".join(f"{count:g} {name}" for name, count in free.items())
                problem = f"no node of the Ray cluster had {needs} free within {_PLACE_SECONDS:.0f} s"
                raise EngineUnavailable(f"{problem}; free over all nodes: {there}", 0)
            if now - last_log > _TELL_SECONDS:
                last_log = now
                logger.warning("waits for a Ray node with %s free; over all nodes %s are", needs, free)
        return group

    def _listen(self, actor: Any, folder: str) -> Endpoint:
        answer = actor.listen.remote(folder)
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            self._check_wanted()
        try:
            endpoint: Endpoint = ray.get(answer)
        except RayError as error:
            logger.error("%s", error)
            problem = f"the Ray worker did not start ({type(error).__name__}; the log has its words)"
            raise EngineUnavailable(f"{problem}; Saccade must be installed on every node", 0) from None
        if not endpoint.has_model:
            where = f"node {endpoint.node} ({endpoint.host}) of the Ray cluster"
            advice = "copy it there, or put it on storage that all nodes share"
            raise ConfigError(f"the model folder {folder} is not on {where}; {advice}")
        return endpoint

    def _connect(self, endpoint: Endpoint, token: bytes) -> socket.socket:
        try:
            connection = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_SECONDS)
            connection.sendall(token)
            keep_alive(connection)
        except OSError as error:
            where = f"{endpoint.node} at {endpoint.host}:{endpoint.port}"
            raise EngineUnavailable(f"the engine on {where} cannot be reached: {error}", 0) from None
        return connection

    def _placed(self, start: Start, endpoint: Endpoint, resources: dict[str, int]) -> Start:
        """With what is known now. Ray shows an engine only its own GPU, and gives it threads for its CPUs."""
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        cpus = nodes.get(endpoint.node_id, {}).get("CPU", self._num_cpus)
        of_cpu = ("cpu", max(1, int(cpus // self._num_cpus)))
        device, num_local = ("cuda", 1) if "GPU" in resources else of_cpu
        num_local = min(num_local, start.replica.num_workers)
        replica = replace(start.replica, num_local=num_local, has_own_device=True)
        options = replace(start.options, device=device)
        return msgspec.structs.replace(start, options=options, replica=replica)

    def _check_wanted(self) -> None:
        """Before the engine is connected the server sends nothing but Stop."""
        if select.select([self._client], [], [], 0)[0]:
            self._client.recv(_CHUNK_BYTES)  # closing with unread data would reset the connection
            raise StoppedEarly

    # --- between both ---------------------------------------------------------------------------------------

    def _relay(self, stream: BinaryIO, remote: Remote) -> None:
        """Until the engine closes the connection. When the server does, the process ends at once."""
        remote.connection.sendall(frame(remote.start))
        threading.Thread(target=self._relay_commands, args=(stream, remote.connection), daemon=True).start()
        try:
            while data := remote.connection.recv(_CHUNK_BYTES):
                self._client.sendall(data)
        except OSError as error:
            logger.error("the connection to the engine broke: %s", error)

    def _relay_commands(self, stream: Any, connection: socket.socket) -> None:
        try:
            while data := stream.read1(_CHUNK_BYTES):
                connection.sendall(data)
        except OSError:
            return  # the engine is gone; the other thread tells
        os._exit(0)


class _EngineLines(io.TextIOBase):
    """Takes what Ray prints in a driver and passes on what engines wrote, without Ray's prefix."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith(f"({WorkerActor.__name__}"):
                print(line.partition(") ")[2], file=self._out, flush=True)
        return len(text)


def main() -> None:
    address, num_cpus, worker, fd = sys.argv[1:]
    set_up_worker("engine")
    sys.stdout = sys.stderr = _EngineLines(sys.stderr)
    end_with_parent()
    os.set_inheritable(int(fd), False)
    status = 1
    with socket.socket(fileno=int(fd)) as client:
        try:
            status = Bridge(address, int(num_cpus), worker, client).run()
        except Exception:
            logger.exception("the bridge to the Ray cluster cannot go on")
    os._exit(status)  # without Ray's slow farewell: the cluster notices


if __name__ == "__main__":
    main()
