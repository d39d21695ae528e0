"""How an engine is started on a Ray cluster: by a bridge process that speaks the worker's protocol.

    EngineClient ══ EngineProcess: socket pair ══ bridge: a Ray driver ══ TCP ══ actor: worker loop

Ray ends a driver when its cluster is gone. So the server is no driver and never imports Ray: it outlives the
cluster, and its supervision starts bridges until one finds the cluster again.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial

from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.supervisor import Launcher
from saccade.errors import ConfigError

ENGINE = "saccade.engine.ray_cluster.engine_worker"
ENCODER = "saccade.engine.ray_cluster.encoder_worker"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}")
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",  # of lines that engines write
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise a warning at each start
}


def ray_launcher(address: str, num_cpus: int, worker: str = ENGINE) -> Launcher:
    """`worker` is the module that an actor runs."""
    if address != "auto" and not _ADDRESS.fullmatch(address):
        expected = "auto or HOST:PORT of a cluster that this machine has joined (ray start)"
        raise ConfigError(f"ray_address takes {expected}, not {address!r}")
    if importlib.util.find_spec("ray") is None:
        advice = "install it with: pip install 'saccade[ray]'"
        raise ConfigError(f"ray_address={address} needs Ray, which is not here; {advice}")
    command = (sys.executable, "-m", "saccade.engine.ray_cluster.bridge", address, str(num_cpus), worker)
    return partial(EngineProcess.spawn, command, _ENVIRONMENT)
