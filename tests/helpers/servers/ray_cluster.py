"""A Ray cluster on this machine, of one node or more. It notices within seconds that its head is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.servers.serving import free_port, until

START_SECONDS = 60
RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[3]),  # for tests.helpers
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # until nodes give up on a dead head
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


class RayCluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._nodes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start_head(self, num_cpus: int) -> None:
        self._start("--head", f"--port={self._port}", "--include-dashboard=false", f"--num-cpus={num_cpus}")

    def add_node(self, num_cpus: int) -> None:
        self._start(f"--address={self.address}", f"--num-cpus={num_cpus}")

    def _start(self, *flags: str) -> None:
        log = self._folder / f"{len(self._nodes)}.log"
        command = [RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000", *flags]
        if "--head" in flags:
            command += [f"--temp-dir={self._folder}", "--min-worker-port=20000", "--max-worker-port=20999"]
        else:
            command += ["--min-worker-port=21000", "--max-worker-port=21999"]
        with log.open("wb") as out:
            node = subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRONMENT, start_new_session=True)
        self._nodes.append(node)
        assert until(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None, START_SECONDS)
        assert node.poll() is None, log.read_text()

    def kill_head(self) -> None:
        """Its server of the cluster's state; Ray ends the rest of the node."""
        (server,) = [pid for pid in _descendants(self._nodes[0].pid) if _command(pid).endswith("gcs_server")]
        os.kill(server, signal.SIGKILL)
        self._nodes.pop(0).wait(START_SECONDS)

    def stop(self) -> None:
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            node.wait(START_SECONDS)


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return found + [below for child in found for below in _descendants(child)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[RayCluster]:
    """One node for each number of CPUs, the first is the head."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets are there: the path must be short
    cluster = RayCluster(folder)
    try:
        cluster.start_head(cpus[0])
        for num_cpus in cpus[1:]:
            cluster.add_node(num_cpus)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
