"""An engine in a Ray actor: the loop of a local one, with encoder workers reached through Ray."""

from __future__ import annotations

import socket
from functools import partial

from saccade.engine.ipc.loop import serve_connection
from saccade.engine.ipc.worker import build
from saccade.engine.ray_cluster.encoder_channel import ActorChannel


class RayWorker:
    def serve(self, connection: socket.socket) -> None:
        serve_connection(connection, partial(build, connect=ActorChannel))
