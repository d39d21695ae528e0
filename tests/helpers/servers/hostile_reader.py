"""A reader of KV events that speaks ZMTP 3.0 by hand, to send what libzmq would not."""

from __future__ import annotations

import re
import socket
import struct
from contextlib import suppress

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)
_SOCKET_TYPE = b"\x0bSocket-Type"
_ANSWER = 64 + 2 + len(b"\x05READY")  # bytes of what the other side begins with, at least


class HostileReader:
    def __init__(self, address: str, kind: bytes) -> None:
        found = re.fullmatch(r"tcp://(.+):(\d+)", address)
        if found:
            self._socket = socket.create_connection((found[1], int(found[2])))
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix("ipc://"))
        self._socket.settimeout(20.0)
        ready = b"\x05READY" + _SOCKET_TYPE + struct.pack(">I", len(kind)) + kind
        self._socket.sendall(_GREETING + frame(ready, 0x04))
        heard = 0
        while heard < _ANSWER:  # before that it takes no messages
            heard += len(self._socket.recv(256))

    def send(self, *frames: bytes) -> None:
        """Until the other side has had enough: then it takes no more."""
        self._socket.settimeout(2.0)
        with suppress(OSError):
            for begin in range(0, len(frames), 100):
                self._socket.sendall(b"".join(frames[begin : begin + 100]))

    def close(self) -> None:
        self._socket.close()


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | 0x02]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def topics(count: int, length: int) -> list[bytes]:
    """Subscriptions. What they begin with is all different, so that they share nothing."""
    return [frame(b"\x01" + number.to_bytes(4, "little") * (length // 4)) for number in range(count)]


def endless(count: int, length: int) -> list[bytes]:
    """The beginning of a message that never ends."""
    return [frame(bytes(length), 0x01)] * count
