"""What is sent: bodies of chat completions, made before the load begins.

A job is a client's conversation: its bodies are sent one after the other. Most jobs have one.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade.apps.bench.pages import page_jpeg, pages_pdf
from saccade.apps.bench.video import mp4

WORDS = ("the", "a", "picture", "of", "what", "which", "colour", "is", "there", "how", "many", "people",
         "left", "right", "above", "large", "small", "read", "name", "number", "list", "every")  # fmt: skip
ANSWER = "It is a picture."  # of the assistant, in conversations
_TYPES = {"image_url": "image/jpeg", "video_url": "video/mp4", "file": "application/pdf"}
_TILE = 40  # pixels of a random patch of colour
_QUALITY = 90
_PAN = 8  # pixels from one frame of a video to the next


class ClientJob(NamedTuple):
    bodies: list[bytes]
    has_images: bool


@dataclass(frozen=True)
class RequestShape:
    """The shape of a workload's requests."""

    model: str
    sizes: tuple[tuple[int, int], ...] = ((1280, 720),)  # of images, in turn
    images: int = 1  # in a request
    words: int = 20
    tokens: int = 64  # out
    turns: int = 4  # of a conversation
    catalogue: int = 64  # images that are asked about again and again
    zipf: float = 1.1  # exponent of their popularity
    frames: int = 16  # of a video
    fps: int = 2
    pages: int = 0  # of a PDF; 0: each page is an image
    ignore_eos: bool = True  # not part of OpenAI's API; without it answers may be shorter


Workload = Callable[[RequestShape, int, random.Random], ClientJob]


def text(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    return ClientJob([_body(shape, [_question(shape, rng, [])])], has_images=False)


def image(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    """New images in every request."""
    parts = [_media("image_url", jpeg(_size(shape, number + i), rng)) for i in range(shape.images)]
    return ClientJob([_body(shape, [_question(shape, rng, parts)])], has_images=True)


def catalogue(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    """Questions about a catalogue of images, few of which are asked about most."""
    weights = [1 / rank**shape.zipf for rank in range(1, shape.catalogue + 1)]
    ranks = rng.choices(range(shape.catalogue), weights, k=shape.images)
    parts = [_media("image_url", jpeg(_size(shape, rank), random.Random(rank))) for rank in ranks]
    return ClientJob([_body(shape, [_question(shape, rng, parts)])], has_images=True)


def conversation(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    """Every turn brings a new image and all that was said before."""
    messages: list[dict[str, Any]] = []
    bodies = []
    for turn in range(shape.turns):
        image = _media("image_url", jpeg(_size(shape, number + turn), rng))
        messages.append(_question(shape, rng, [image]))
        bodies.append(_body(shape, messages))
        messages.append({"role": "assistant", "content": ANSWER})
    return ClientJob(bodies, has_images=True)


def video(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    """New videos in every request."""
    parts = [_media("video_url", _film(shape, _size(shape, number + i), rng)) for i in range(shape.images)]
    return ClientJob([_body(shape, [_question(shape, rng, parts)])], has_images=True)


def documents(shape: RequestShape, number: int, rng: random.Random) -> ClientJob:
    """A request for each page: one that is an image, or all of a new PDF in turn."""
    if not shape.pages:
        page = _media("image_url", page_jpeg(_size(shape, number), rng))
        return ClientJob([_body(shape, [_question(shape, rng, [page])])], has_images=True)
    file = {"file_data": _url("file", pages_pdf(shape.pages, rng)), "filename": f"{number}.pdf"}
    parts = [{"type": "file", "file": file, "pages": str(page)} for page in range(1, shape.pages + 1)]
    return ClientJob([_body(shape, [_question(shape, rng, [part])]) for part in parts], has_images=True)


WORKLOADS: dict[str, Workload] = {
    "text": text,
    "image": image,
    "catalogue": catalogue,
    "conversation": conversation,
    "video": video,
    "documents": documents,
}


def jpeg(size: tuple[int, int], rng: random.Random) -> bytes:
    """About as large as a photo's file."""
    file = io.BytesIO()
    _patches(size, rng).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _film(shape: RequestShape, size: tuple[int, int], rng: random.Random) -> bytes:
    """A view that moves over a wide image, so that no two frames are the same."""
    width, height = (side + side % 2 for side in size)  # even, as videos need
    wide = np.asarray(_patches((width + _PAN * shape.frames, height), rng))
    frames = [wide[:, _PAN * i : _PAN * i + width] for i in range(shape.frames)]
    return mp4(np.stack(frames), shape.fps)


def _patches(size: tuple[int, int], rng: random.Random) -> Image.Image:
    """Soft patches of random colours."""
    width, height = size
    shape = (height // _TILE + 1, width // _TILE + 1, 3)
    colours = np.random.default_rng(rng.getrandbits(60)).integers(0, 255, shape, dtype=np.uint8)
    return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)


def _size(shape: RequestShape, number: int) -> tuple[int, int]:
    return shape.sizes[number % len(shape.sizes)]


def _media(kind: str, data: bytes) -> dict[str, Any]:
    return {"type": kind, kind: {"url": _url(kind, data)}}


def _url(kind: str, data: bytes) -> str:
    return f"data:{_TYPES[kind]};base64,{base64.b64encode(data).decode()}"


def _question(shape: RequestShape, rng: random.Random, parts: list[dict[str, Any]]) -> dict[str, Any]:
    text = {"type": "text", "text": " ".join(rng.choices(WORDS, k=shape.words))}
    return {"role": "user", "content": [*parts, text]}


def _body(shape: RequestShape, messages: list[dict[str, Any]]) -> bytes:
    body = {
        "model": shape.model,
        "messages": messages,
        "max_tokens": shape.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()
