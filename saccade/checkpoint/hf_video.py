"""What a processor of Transformers makes of a video: which frames it takes, and its inputs for them.

A video is one item: what the processor writes between frames, such as their times, belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from PIL import Image

from saccade.checkpoint.hf_processor import Frame, Leaves, Placeholder, frame_of, ids_of, processed, starts_of

_PART = "video_processor"
_PROBES = ((300, 211, 8), (64, 64, 5), (40, 90, 2), (320, 240, 4))  # width, height, frames
_RATE = 4.0
_SMALL = (64, 64, 4)


class VideoForm(NamedTuple):
    """A video, as far as its tokens and sizes depend on it: size and clip, see `types.media`."""

    width: int
    height: int
    total: int
    rate: float | None
    indices: tuple[int, ...]
    fps: float | None = None


def form_of(size: tuple[int, int], clip: Any) -> VideoForm:
    return VideoForm(*size, clip.total, clip.rate, clip.indices, clip.fps)


class _ChosenError(Exception):
    """Ends a call of a processor where its frames are chosen."""

    def __init__(self, indices: Any) -> None:
        super().__init__()
        self.indices = tuple(int(index) for index in indices)


def why_none(processor: Any) -> str | None:
    """Why no videos are read; None if they may be."""
    if _PART not in type(processor).get_attributes():
        return "this model takes no videos"
    if hasattr(getattr(processor, _PART), "sample_frames") and hasattr(processor, "video_token"):
        return None
    if find_spec("torchvision") is None:
        return "a video needs torchvision, which is not installed here (pip install torchvision)"
    return "the part of this model's processor that reads videos cannot be loaded"


def video_place(processor: Any, config: Any) -> Placeholder:
    """Some processors know a video by the tokens around it, which Transformers' config names then."""
    tokenizer = processor.tokenizer
    token = str(processor.video_token)
    if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
        raise ValueError(f"its processor marks a video by the text {token}, which is no token of its own")
    ends = [getattr(config, f"video_{end}_token_id", None) for end in ("start", "end")]
    if None in ends:
        return Placeholder(token, token)
    start, end = tokenizer.convert_ids_to_tokens(ends)
    return Placeholder(token, f"{start}{token}{end}")


def video_frame(processor: Any, place: Placeholder) -> Frame:
    frame = frame_of(processor, place, _ids_of)._replace(wrapped=0)  # the ends are the video's: see below
    if (frame.lead, frame.trail) != (0, 0):  # a number, say: a video that is alone always has the same
        return frame._replace(lead=0, trail=0, takes_many=False, is_joined=False)
    return frame


def absorbed_ends(processor: Any, place: Placeholder) -> tuple[int, ...]:
    """Two tokens around a video in a prompt that come with it: a model may tell them from other text, too.

    Or its processor writes nothing for them.
    """
    if place.wrapped:
        first, *_, last = processor.tokenizer.encode(place.written, add_special_tokens=False)
        return first, last
    ends = [getattr(processor, f"vision_{end}_token", None) for end in ("start", "end")]
    if None in ends:
        return ()
    wrapped = _ids_of(processor, f"{ends[0]}{place.written}{ends[1]}", 1)
    same = wrapped == _ids_of(processor, place.written, 1)
    return tuple(processor.tokenizer.convert_tokens_to_ids(ends)) if same else ()


def stands_beside(processor: Any, video: Placeholder, image: Placeholder) -> bool:
    """Whether a video and a picture of one prompt are written as each alone is."""
    probe = _probe(*_SMALL)
    images = [Image.new("RGB", _SMALL[:2])]
    try:
        inputs = _whole(
            processor,
            f"{image.written} a {video.written}",
            images,
            [_frames(probe, "cpu")],
            [_metadata(probe)],
        )
        ids = inputs["input_ids"][0].tolist()
        parts = ids_of(processor, image.written, 1), _ids_of(processor, video.written, 1)
    except Exception:  # it may take one of them in a prompt
        return False
    frames = frame_of(processor, image), video_frame(processor, video)
    return all(starts_of(ids, frame.inside(part)) for frame, part in zip(frames, parts, strict=True))


class VideoRuns:
    """Inputs of the model for a prompt that is one video, by its size and frames; mostly without pixels."""

    def __init__(self, processor: Any, text: str) -> None:
        self._processor = processor
        self._text = text
        self._shapes: Any = _with_part(processor, _of_shapes)
        self._choice = _with_part(processor, _of_choice)
        agree = [self._agrees(_probe(*numbers)) for numbers in _PROBES]
        if {True, False} & set(agree) != {True}:
            self._shapes = None

    @property
    def looks_at_pixels(self) -> bool:
        """Whether tokens and sizes of a video depend on what it shows."""
        form = _probe(*_PROBES[0])
        generator = import_module("torch").Generator().manual_seed(0)
        shape = (form.total, form.height, form.width, 3)
        noise = import_module("torch").randint(256, shape, generator=generator).to(_frames(form, "cpu"))
        return not Leaves.of(self.of_frames(noise, form)).is_like(Leaves.of(self(form)))

    @property
    def samples(self) -> bool:
        """Whether it chooses frames unless told how many a second."""
        part = getattr(self._processor, _PART)
        return any((part.do_sample_frames, part.fps, part.num_frames))

    @property
    def is_cheap(self) -> bool:
        return self._shapes is not None

    def chosen(
        self, size: tuple[int, int], total: int, rate: float, choice: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Frames that the processor takes of a file. Raises whatever it does. `choice`: fps or num_frames."""
        form = VideoForm(*size, total, rate, ())
        try:
            _made(self._choice, self._text, _frames(form, "meta", total), form, sample=True, **choice)
        except _ChosenError as chosen:
            return chosen.indices
        return tuple(range(total))

    def __call__(self, form: VideoForm) -> dict[str, Any]:
        if self._shapes is not None:
            return self._of_shape(form)
        return self.of_frames(_frames(form, "cpu"), form)

    def of_frames(self, frames: Any, form: VideoForm, text: str | None = None) -> dict[str, Any]:
        """`frames`: [frames, height, width, 3]"""
        return _made(self._processor, text or self._text, frames, form)

    def _of_shape(self, form: VideoForm) -> dict[str, Any]:
        inputs = _made(self._shapes, self._text, _frames(form, "meta"), form)
        if any(getattr(value, "is_meta", False) for value in Leaves.of(inputs).rest):
            raise ValueError("a size that is a pixel")
        return inputs

    def _agrees(self, form: VideoForm) -> bool | None:
        """None: a size that it does not take says nothing of shapes."""
        try:
            blank = Leaves.of(self.of_frames(_frames(form, "cpu"), form))
        except Exception:
            return None
        try:
            return blank.is_like(Leaves.of(self._of_shape(form)))
        except Exception:
            return False


def _made(
    processor: Any, text: str, frames: Any, form: VideoForm, *, sample: bool = False, **choice: Any
) -> dict[str, Any]:
    if form.fps is not None and not sample:
        choice["fps"] = form.fps
    metadata = [_metadata(form)]
    return _whole(processor, text, [], [frames], metadata, do_sample_frames=sample, **choice)


def _whole(
    processor: Any, text: str, images: Sequence[Any], videos: list[Any], metadata: list[Any], **how: Any
) -> dict[str, Any]:
    """Some processors need what they say of the video for its times, and return it then."""
    how = {"do_sample_frames": False, **how, "return_metadata": True}
    inputs = dict(processed(processor, text, *images, videos=videos, video_metadata=metadata, **how))
    inputs.pop("video_metadata", None)
    return inputs


def _metadata(form: VideoForm) -> Any:
    return import_module("transformers.video_utils").VideoMetadata(
        total_num_frames=form.total,
        fps=form.rate,
        width=form.width,
        height=form.height,
        duration=None if form.rate is None else form.total / form.rate,
        frames_indices=list(form.indices),
    )


def _frames(form: VideoForm, device: str, count: int | None = None) -> Any:
    """Blank ones [frames, height, width, 3], of which each pixel is the same memory."""
    torch = import_module("torch")
    shape = (len(form.indices) if count is None else count, form.height, form.width, 3)
    return torch.zeros((), dtype=torch.uint8, device=device).expand(shape)


def _probe(width: int, height: int, frames: int) -> VideoForm:
    return VideoForm(width, height, frames, _RATE, tuple(range(frames)))


def _ids_of(processor: Any, text: str, videos: int) -> tuple[int, ...]:
    """Of a prompt with so many small videos."""
    form = _probe(*_SMALL)
    frames, metadata = [_frames(form, "cpu")] * videos, [_metadata(form) for _ in range(videos)]
    return tuple(_whole(processor, text, [], frames, metadata)["input_ids"][0].tolist())


def _with_part(processor: Any, kind_of: Callable[[Any], type]) -> Any:
    """A copy with another class under its processor of videos."""
    twin = copy(processor)
    part = copy(getattr(processor, _PART))
    part.__class__ = kind_of(type(part))
    setattr(twin, _PART, part)
    return twin


def _of_choice(kind: Any) -> type:
    class Choice(kind):  # type: ignore[misc]
        def sample_frames(self, *args: Any, **named: Any) -> Any:
            raise _ChosenError(super().sample_frames(*args, **named))

    return _named(Choice, kind)


def _of_shapes(kind: Any) -> type:
    """Steps that look at values, on tensors without memory."""

    class Shapes(kind):  # type: ignore[misc]
        def rescale_and_normalize(self, images: Any, *args: Any, **named: Any) -> Any:
            return images.float()

        def rescale(self, image: Any, *args: Any, **named: Any) -> Any:
            return image.float()

        def normalize(self, image: Any, *args: Any, **named: Any) -> Any:
            return image.float()

    return _named(Shapes, kind)


def _named(twin: type, kind: Any) -> type:
    twin.__name__ = kind.__name__
    return twin
