"""The mixed load of a soak: what clients ask, from a seed. Knows no server and sends nothing."""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

CHAT = "/v1/chat/completions"
KINDS = {  # how often, of a hundred
    "text": 16,
    "stream": 14,
    "new image": 19,
    "seen image": 10,
    "conversation": 14,
    "schema": 4,
    "new schema": 1,
    "bill": 4,
    "tokenize": 4,
    "leaver": 5,
    "damaged image": 2,
    "bad request": 2,
    "video": 3,
    "document": 2,
}
_WORDS = ("red", "circle", "blue", "square", "small", "green", "left", "right", "above", "below", "large", "dark")
_SIZES = ((64, 48), (160, 120), (320, 240), (336, 448), (640, 480), (800, 600))
_FORMATS: dict[str, dict[str, Any]] = {  # how Pillow is to save them: fast, for clients share a machine with the server
    "JPEG": {},
    "PNG": {"compress_level": 1},
    "WEBP": {"method": 0},
    "GIF": {},
    "BMP": {},
}
_NO_TIME = time.gmtime(0)  # the same seed makes the same files
_NUM_SEEN = 12  # images that come again and again, from all clients
_NUM_TENANTS = 6
_MAX_TURNS = 6
_FIELD_TYPES = ("string", "integer", "boolean", "number")
_BAD_BODIES = (
    b'{"messages": [',
    b"not JSON",
    b'{"messages": []}',
    b'{"messages": "a string"}',
    b'{"messages": [{"role": "user", "content": "?"}], "temperature": "warm"}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "ftp://a/b"}}]}]}',
)


class Call(NamedTuple):
    """One request."""

    kind: str
    path: str
    body: dict[str, Any] | bytes
    how: Literal["whole", "stream", "leave"] = "whole"  # leave: close the connection at the first piece of the answer
    is_bad: bool = False  # a 4xx is the right answer


class Load:
    """The requests of one client, which are the same for the same seed. Tenants and seen images are shared by all."""

    def __init__(self, seed: int, client: int, model: str, *, has_video: bool) -> None:
        self._random = random.Random(f"{seed}/{client}")
        self._model = model
        self._turns: list[dict[str, Any]] = []
        weights = {kind: weight for kind, weight in KINDS.items() if kind != "video" or has_video}
        self._kinds = list(weights)
        self._weights = list(weights.values())
        self._makers: dict[str, Callable[[], Call]] = {
            "text": lambda: self._chat("text", self._words(5, 200)),
            "stream": lambda: self._chat("stream", self._words(5, 100), how="stream"),
            "new image": lambda: self._chat("new image", [self._new_image(), _text(self._words(3, 12))]),
            "seen image": self._seen_image,
            "conversation": self._conversation,
            "schema": lambda: self._schema(
                "schema", [(name, "string") for name in _WORDS[: self._random.randint(1, 4)]]
            ),
            "new schema": lambda: self._schema("new schema", self._new_fields()),
            "bill": self._bill,
            "tokenize": lambda: Call("tokenize", "/tokenize", {"model": model, "prompt": self._words(5, 400)}),
            "leaver": lambda: self._chat("leaver", self._left(), how="leave", max_tokens=200),
            "damaged image": self._damaged_image,
            "bad request": lambda: Call("bad request", CHAT, self._random.choice(_BAD_BODIES), is_bad=True),
            "video": lambda: self._chat("video", [self._video(), _text(self._words(3, 8))]),
            "document": lambda: self._chat("document", [self._document(), _text(self._words(3, 8))]),
        }

    def next(self) -> Call:
        return self.of(self.choose())

    def choose(self) -> str:
        return self._random.choices(self._kinds, self._weights)[0]

    def of(self, kind: str) -> Call:
        return self._makers[kind]()

    # --- kinds --------------------------------------------------------------------------------------------------------

    def _chat(
        self, kind: str, content: Any, *, how: Literal["whole", "stream", "leave"] = "whole", **fields: Any
    ) -> Call:
        messages = content if kind == "conversation" else [{"role": "user", "content": content}]
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._random.randint(1, 24),
            "temperature": self._random.choice((0, 0.8)),
            "ignore_eos": True,
            "stream": how != "whole",
            "cache_salt": f"tenant {self._random.randrange(_NUM_TENANTS)}",
            **fields,
        }
        return Call(kind, CHAT, body, how)

    def _seen_image(self) -> Call:
        which = self._random.randrange(_NUM_SEEN)
        return self._chat("seen image", [_seen(which), _text(self._words(3, 12))], cache_salt="seen")

    def _conversation(self) -> Call:
        """Each call is one turn more; the answers that come back with it are made up."""
        if len(self._turns) >= 2 * _MAX_TURNS:
            self._turns = []
        if self._turns:
            self._turns.append({"role": "assistant", "content": self._words(1, 8)})
            self._turns.append({"role": "user", "content": self._words(3, 20)})
        else:
            self._turns.append({"role": "user", "content": [self._new_image(), _text(self._words(3, 20))]})
        return self._chat("conversation", list(self._turns), cache_salt="talk")

    def _schema(self, kind: str, fields: list[tuple[str, str]]) -> Call:
        schema = {
            "type": "object",
            "properties": {name: {"type": of} for name, of in fields},
            "required": [name for name, _ in fields],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema}}
        return self._chat(kind, self._words(3, 12), response_format=form, ignore_eos=False)

    def _new_fields(self) -> list[tuple[str, str]]:
        names = [f"field_{self._random.getrandbits(32):08x}" for _ in range(self._random.randint(1, 6))]
        return [(name, self._random.choice(_FIELD_TYPES)) for name in names]

    def _bill(self) -> Call:
        messages = [{"role": "user", "content": [self._new_image(), _text(self._words(3, 12))]}]
        return Call("bill", "/v1/bill", {"model": self._model, "messages": messages})

    def _damaged_image(self) -> Call:
        """Cut off or overwritten behind its header: the price can be told, pixels cannot."""
        data = bytearray(encoded(self._random, "PNG", (320, 240)))
        if self._random.random() < 0.5:
            del data[len(data) // 2 :]
        else:
            data[len(data) // 2 :] = self._random.randbytes(len(data) - len(data) // 2)
        part = _url_part("image_url", "image/png", bytes(data))
        return self._chat("damaged image", [part, _text("?")])._replace(is_bad=True)

    # --- what they are made of ----------------------------------------------------------------------------------------

    def _words(self, minimum: int, maximum: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(minimum, maximum)))

    def _new_image(self) -> dict[str, Any]:
        return image_part(self._random)

    def _left(self) -> Any:
        return self._random.choice((self._words(5, 50), [self._new_image(), _text(self._words(5, 50))]))

    def _document(self) -> dict[str, Any]:
        """A scan: a PDF of one page that is an image."""
        scan = io.BytesIO()
        Image.fromarray(_pixels(self._random, (480, 640))).save(scan, "PDF", creationDate=_NO_TIME, modDate=_NO_TIME)
        url = "data:application/pdf;base64," + base64.b64encode(scan.getvalue()).decode()
        return {"type": "file", "file": {"file_data": url, "filename": "scan.pdf"}}

    def _video(self) -> dict[str, Any]:
        return _url_part("video_url", "video/mp4", film(self._random))


@lru_cache(_NUM_SEEN)
def _seen(which: int) -> dict[str, Any]:
    return image_part(random.Random(which))


def image_part(source: random.Random) -> dict[str, Any]:
    form = source.choice(list(_FORMATS))
    return _url_part("image_url", f"image/{form.lower()}", encoded(source, form, source.choice(_SIZES)))


def encoded(source: random.Random, form: str, size: tuple[int, int]) -> bytes:
    """A smooth random image as compressed bytes."""
    stream = io.BytesIO()
    image = Image.fromarray(_pixels(source, size))
    if form == "GIF":
        image = image.convert("P")  # to a fixed palette: finding the best one takes half a second
    image.save(stream, form, **_FORMATS[form])
    return stream.getvalue()


def film(source: random.Random, size: tuple[int, int] = (112, 84), frames: int = 12) -> bytes:
    """A short MP4; needs PyAV."""
    import av  # optional: without it a soak has no videos

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=6)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(_pixels(source, size), format="rgb24")
            frame.pts = index
            frame.time_base = Fraction(1, 6)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def can_make_videos() -> bool:
    return find_spec("av") is not None


def _pixels(source: random.Random, size: tuple[int, int]) -> np.ndarray:
    small = np.frombuffer(source.randbytes(8 * 6 * 3), np.uint8).reshape(6, 8, 3)
    return np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _url_part(kind: str, mime: str, data: bytes) -> dict[str, Any]:
    url = f"data:{mime};base64," + base64.b64encode(data).decode()
    return {"type": kind, kind: {"url": url}}
