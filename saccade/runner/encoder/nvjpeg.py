"""nvJPEG, NVIDIA's JPEG decoder, by ctypes. Knows bytes and tensors, no requests; one thread at a time.

A batch is decoded at once by the JPEG engines that data-centre GPUs (A100, H100, H200, B200) have beside
their SMs. Their own buffers cannot be cleared: a damaged JPEG may show pixels of one before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.media.jpeg_layout import plain_length
from saccade.types.media import Size

_BACKEND_HARDWARE = 3  # nvjpegBackend_t
_RGB_INTERLEAVED = 5  # nvjpegOutputFormat_t
_INTERPOLATED = 1 << 5  # NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION: chroma as libjpeg has it
_ARCH_MISMATCH = 7  # nvjpegStatus_t
_MAX_COMPONENTS = 4
_CPU_THREADS = 1  # of a batch; engines need none


class NvJpegError(Exception):
    """A JPEG that the library refuses, or a call of it that failed."""


class Jpeg(NamedTuple):
    data: bytes
    size: Size  # as stored
    length: int  # of what is decoded

    @classmethod
    def of(cls, data: bytes, size: Size) -> Jpeg:
        return cls(data, size, plain_length(data))


class _Image(ctypes.Structure):
    _fields_ = (
        ("channel", ctypes.c_void_p * _MAX_COMPONENTS),
        ("pitch", ctypes.c_size_t * _MAX_COMPONENTS),
    )


def load_library() -> ctypes.CDLL:
    for path in _candidates():
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    raise ConfigError(
        "gpu_jpeg was asked for, but nvJPEG (libnvjpeg.so.13 or libnvjpeg.so.12) is not installed: pip "
        "install nvidia-nvjpeg (CUDA 13) or nvidia-nvjpeg-cu12 (CUDA 12), install the CUDA toolkit, or leave "
        "out --gpu-jpeg"
    )


def _candidates() -> Iterator[str | Path]:
    """Files of NVIDIA's packages, the system and CUDA toolkits; PyTorch's own release of CUDA first."""
    release_of_torch = str(torch.version.cuda).partition(".")[0]
    spec = find_spec("nvidia")
    packages: list[str] = []
    if spec is not None and spec.submodule_search_locations:
        packages = list(spec.submodule_search_locations)
    for release in sorted(("13", "12"), key=lambda release: release != release_of_torch):
        name = f"libnvjpeg.so.{release}"
        for package in packages:
            yield from sorted(Path(package).glob(f"*/lib/{name}"))
        yield name
        yield from sorted(Path("/usr/local").glob(f"cuda*/targets/*/lib/{name}"))


class NvJpeg:
    """A handle with one state."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._library = library
        self._handle = ctypes.c_void_p()
        self._state = ctypes.c_void_p()
        self._batch = 0  # that the state is set up for
        with self.on_stream():
            self.engines = self._create()
            self._create_state()

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def wait(self) -> None:
        """Until all is done that was launched on the stream. Blocks only this thread."""
        if self._stream:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()

    @torch.inference_mode()
    def decode(self, jpegs: Sequence[Jpeg]) -> list[Tensor]:
        """uint8 [height, width, 3] of each on the device, complete. One that fails fails all."""
        with self.on_stream():
            for jpeg in jpegs:
                self._check_size(jpeg)
            shapes = [(jpeg.size.height, jpeg.size.width, 3) for jpeg in jpegs]
            # Zeros: of what is on the device, a damaged JPEG shows pixels of JPEGs at most.
            outs = [torch.zeros(shape, dtype=torch.uint8, device=self.device) for shape in shapes]
            self.wait()  # the library has streams of its own
            if not self._state:
                self._create_state()
            try:
                self._launch(jpegs, outs)
            except NvJpegError:
                self.wait()  # raises where the CUDA context has died
                self._destroy_state()  # what a failed call has left in it is not known
                raise
            self.wait()
        return outs

    def close(self) -> None:
        with self.on_stream():
            self._destroy_state()
            if self._handle:
                with suppress(NvJpegError):
                    self._call("nvjpegDestroy", self._handle)
            self._handle = ctypes.c_void_p()

    def _create(self) -> int:
        """Returns how many engines the GPU has."""
        how = (ctypes.c_int(_BACKEND_HARDWARE), None, None, ctypes.c_uint(_INTERPOLATED))
        status = self._library.nvjpegCreateEx(*how, ctypes.byref(self._handle))
        engines = ctypes.c_uint()
        cores = ctypes.c_uint()
        if status != _ARCH_MISMATCH:
            _check("nvjpegCreateEx", status)
            counts = ctypes.byref(engines), ctypes.byref(cores)
            self._call("nvjpegGetHardwareDecoderInfo", self._handle, *counts)
        if not engines.value:
            raise NvJpegError("this GPU has no JPEG engines")
        return engines.value

    def _create_state(self) -> None:
        self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
        self._batch = 0

    def _destroy_state(self) -> None:
        old = self._state
        self._state = ctypes.c_void_p()
        if old:
            with suppress(NvJpegError):
                self._call("nvjpegJpegStateDestroy", old)

    def _check_size(self, jpeg: Jpeg) -> None:
        """The library writes what it reads as the size, and must read what we allocate."""
        number = ctypes.c_int()
        subsampling = ctypes.c_int()
        widths = (ctypes.c_int * _MAX_COMPONENTS)()
        heights = (ctypes.c_int * _MAX_COMPONENTS)()
        data = ctypes.c_char_p(jpeg.data), ctypes.c_size_t(jpeg.length)
        outputs = ctypes.byref(number), ctypes.byref(subsampling), widths, heights
        self._call("nvjpegGetImageInfo", self._handle, *data, *outputs)
        if (number.value, Size(widths[0], heights[0])) != (3, jpeg.size):
            read = f"{widths[0]}x{heights[0]} with {number.value} components"
            raise NvJpegError(f"nvJPEG reads {read}, the header says {jpeg.size.width}x{jpeg.size.height}")

    def _launch(self, jpegs: Sequence[Jpeg], outs: Sequence[Tensor]) -> None:
        images = (_Image * len(outs))()
        for image, out in zip(images, outs, strict=True):
            image.channel[0] = out.data_ptr()
            image.pitch[0] = out.stride(0)
        stream = ctypes.c_void_p(self._stream.cuda_stream if self._stream else None)
        if self._batch != len(jpegs):
            how = (ctypes.c_int(value) for value in (len(jpegs), _CPU_THREADS, _RGB_INTERLEAVED))
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, *how)
            self._batch = len(jpegs)
        pointers = (ctypes.c_char_p * len(jpegs))(*(jpeg.data for jpeg in jpegs))
        counts = (ctypes.c_size_t * len(jpegs))(*(jpeg.length for jpeg in jpegs))
        self._call("nvjpegDecodeBatched", self._handle, self._state, pointers, counts, images, stream)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._library, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise NvJpegError(f"{name} returned status {status}")
