"""Frames as an MP4, for loads with videos. PyAV is optional and imported with the first one."""

from __future__ import annotations

import io
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np

from saccade.errors import ConfigError

_CODECS = ("libx264", "mpeg4")  # the first that this build of PyAV has


def check_av() -> None:
    """Check before a load: in a process of clients it would be too late."""
    if find_spec("av") is None:
        remedy = (
            "install it with `pip install saccade[video]`, or send the frames as images (image --images 16)"
        )
        raise ConfigError(f"the workload video makes MP4 files with PyAV, which is not installed; {remedy}")


def mp4(frames: np.ndarray[Any, Any], fps: int) -> bytes:
    """frames: [count, height, width, 3] of uint8; height and width are even, as the pixel format needs."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        codec = next(name for name in _CODECS if name in av.codecs_available)
        stream: Any = container.add_stream(codec, rate=fps)
        _, stream.height, stream.width, _ = frames.shape
        stream.pix_fmt = "yuv420p"
        for index, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = index
            frame.time_base = Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
