"""The input processor: text, chats and media in; token ids, spans, positions and the bill out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from saccade.costs import max_chars
from saccade.errors import ConfigError, RequestError, is_text
from saccade.media.hashing import identity, salt_of
from saccade.media.video_sources import Video
from saccade.options.engine import MediaPolicy
from saccade.processor.checkpoint_files import Checkpoint
from saccade.processor.dialects.parser import OutputFormat, OutputFormats, output_formats
from saccade.processor.documents import open_documents
from saccade.processor.families import built_in_template
from saccade.processor.families.base import BindsPrompt, Family, FramesPrompt, HasMarkup, cross_attended
from saccade.processor.families.fallback import Fallback
from saccade.processor.images import ImageInput, Images, PrefetchMedia, reads_text_only
from saccade.processor.messages import Form, cleaned, cut_at_mark, form_of, mark_end, read_messages
from saccade.processor.output import RequestOutputBuilder
from saccade.processor.prompt_bill import bill_of
from saccade.processor.prompt_parts import Ids, checked_ids, media_inputs, prompt_parts
from saccade.processor.request_builder import RequestBuilder
from saccade.processor.tasks import check_task
from saccade.processor.template import MAX_CHARS, RESERVED, SHOWN_CHARS
from saccade.processor.template_pool import TemplatePool
from saccade.processor.tokenizer import Tokenizer
from saccade.processor.video import Videos, split_kwargs
from saccade.processor.video_prompt import build_video_prompt
from saccade.processor.whole_videos import WholeVideos, largest_item, videos_for
from saccade.sampling_params import SamplingParams
from saccade.types.bill import Bill
from saccade.types.media import Geometry, Key, MediaItem
from saccade.types.prompt import Prompt, Span, VideoRun

_MAX_CHARS = 64 << 20  # of a rendered chat, whatever context config.json claims
_MARKER_TOKENS = 16  # at the end of a prompt, where a marker of thinking may be


class Rendered(NamedTuple):
    """A chat after its template."""

    text: str  # still shielded
    images: list[ImageInput]
    videos: list[Video]


class Processor:
    """Makes a `Prompt` of what a client sends, for one checkpoint and one media policy."""

    def __init__(
        self, checkpoint: Checkpoint, policy: MediaPolicy, prefetch_media: PrefetchMedia | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.images = Images(checkpoint, policy)
        self.policy = self.images.policy
        self.family = self.images.family
        self.videos = videos_for(checkpoint, self.policy, self.images)  # None for a model that takes none
        self.tokenizer = Tokenizer(
            checkpoint.tokenizer_path,
            protect=self.family.placeholder_ids,
            template=built_in_template(checkpoint.config) or "",
            markup=self.family.markup if isinstance(self.family, HasMarkup) else (),
        )
        self.placeholder = self._find_placeholder()  # of an image in a raw prompt
        self.prefetch_media = prefetch_media  # told of images before the rest of a prompt is ready
        longest = checkpoint.config.text.max_context
        chars = max_chars(min(filter(None, (longest, self.policy.max_model_len))))
        chars = min(max(chars, MAX_CHARS), _MAX_CHARS)
        self._templates = TemplatePool(checkpoint.chat_template, self.policy.template_seconds, chars)
        self._form: Form | None = None
        self._check_template_kwargs()
        if checkpoint.chat_template is not None:
            self.tokenizer.encode_template("")  # builds the alias tokenizer before the first chat needs it

    def _find_placeholder(self) -> str | None:
        token = self.family.image_token_id
        if token is None:
            return None
        placeholder = self.tokenizer.token(token)
        if placeholder is None:
            reason = f"config.json names image_token_id={token}, but tokenizer.json has no such token"
            raise ConfigError(f"{reason}; the two files do not belong together")
        return placeholder

    @property
    def takes_images(self) -> bool:
        return self.placeholder is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """EOS ids of the config, or the tokenizer's if the config names none."""
        fallback = self.tokenizer.eos_token_id
        return self.checkpoint.config.eos_token_ids or frozenset(() if fallback is None else (fallback,))

    def request_builder(self, seed: int | None) -> RequestBuilder:
        return RequestBuilder(
            self.eos_token_ids,
            seed,
            self.tokenizer.encode_text,
            lambda prompt: self.format_of(prompt).thinking,
        )

    @cached_property
    def _formats(self) -> OutputFormats:
        return output_formats(self.checkpoint.chat_template, self.tokenizer.token_id)

    def output_builders(self, prompt: Prompt, params: SamplingParams) -> list[RequestOutputBuilder]:
        """For Python callers: they get the thinking apart."""
        make = partial(RequestOutputBuilder, output_format=self.format_of(prompt))
        return [make(i, self.tokenizer, params) for i in range(params.num_outputs)]

    def format_of(self, prompt: Prompt) -> OutputFormat:
        """How the model writes what follows a prompt, as its chat template tells."""
        end = prompt.token_ids[-_MARKER_TOKENS:]
        text = self.tokenizer.decode(end, skip_special_tokens=False) if prompt.text is None else prompt.text
        return self._formats.after(text)

    def largest_item(self) -> Geometry | None:
        """The most expensive image or frame group the limits allow; None when they allow none."""
        return largest_item(self.images, self.videos)

    def from_prompt(self, prompt: str | Mapping[str, Any], *, salt: bytes = b"") -> Prompt:
        """A raw prompt: text or ids with one placeholder per image, as the caller wrote them.

        `salt` comes from `salt_of` for a server's request; Python callers put `cache_salt` into the prompt.
        """
        parts = prompt_parts(prompt)
        text = parts.get("prompt")
        ids = parts.get("prompt_token_ids")
        make_ids = partial(self._checked_ids, ids) if text is None else partial(self._encode, text)
        images, videos = media_inputs(parts.get("multi_modal_data"))
        if cache_salt := parts.get("cache_salt"):
            salt = salt_of(salt.hex(), cache_salt)
        return self._build(make_ids, images, videos, parts.get("mm_processor_kwargs"), salt, text)

    def from_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        salt: bytes = b"",
        allow_paths: bool = False,
    ) -> Prompt:
        """OpenAI messages through the checkpoint's chat template. Client text never becomes a control token.

        `allow_paths` lets a string in an `image` or `video` part name a local file: not for a server.
        """
        rendered = self.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            allow_paths=allow_paths,
        )
        return self.from_rendered(rendered, mm_processor_kwargs=mm_processor_kwargs, salt=salt)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_paths: bool = False,
    ) -> Rendered:
        """First half of `from_chat`: run the template, in a process of its own. It may be slow.

        With `continue_final_message` the text ends where the last message does, which is the assistant's.
        """
        clean = self.tokenizer.shield
        messages = self.open_documents(messages, allow_paths=allow_paths)
        extra = self._template_kwargs(chat_template_kwargs or {})
        chat = read_messages(messages, self.form(), clean, allow_paths=allow_paths)
        if chat.images and not self.takes_images:
            raise reads_text_only(len(chat.images), chat.images[0].param)  # before the template fails on one
        if chat.videos and self.videos is None:
            raise takes_no_video(self.family, chat.videos[0].param)
        if continue_final_message:
            mark_end(chat.messages)
        try:
            text = self._templates.render(
                messages=chat.messages,
                tools=cleaned(tools, clean),
                add_generation_prompt=add_generation_prompt,
                **extra,
            )
        except RequestError as error:
            message = " ".join(self.tokenizer.unshield(error.message).split())
            raise RequestError(message[:SHOWN_CHARS], code=error.code, param=error.param) from None
        return Rendered(cut_at_mark(text) if continue_final_message else text, chat.images, chat.videos)

    def open_documents(self, messages: Any, *, allow_paths: bool = False) -> Any:
        """The messages with the pages of their documents. `render` does this too, if it was not done."""
        return open_documents(messages, self.policy, takes_images=self.takes_images, allow_paths=allow_paths)

    def from_rendered(
        self, rendered: Rendered, *, mm_processor_kwargs: Mapping[str, Any] | None = None, salt: bytes = b""
    ) -> Prompt:
        """Second half of `from_chat`: tokenize, resolve the media and expand their placeholders."""
        make_ids = partial(self.tokenizer.encode_template, self._spelled(rendered.text))
        text = self.tokenizer.unshield(rendered.text)
        return self._build(make_ids, rendered.images, rendered.videos, mm_processor_kwargs, salt, text)

    def form(self) -> Form:
        """Which contents the template takes, probed once. The probe also starts a process for later chats."""
        if self._form is None:
            self._form = form_of(self._templates)
        return self._form

    def close(self) -> None:
        """End the template processes."""
        self._templates.close()

    def _template_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self.tokenizer.named_tokens
        clashes = sorted((RESERVED | set(tokens)) & set(kwargs))
        if clashes:
            message = f"chat_template_kwargs cannot set {', '.join(clashes)}"
            raise RequestError(message, param=f"chat_template_kwargs.{clashes[0]}")
        defaults = self.policy.template_kwargs
        return {**tokens, **defaults, **cleaned(kwargs, self.tokenizer.shield)}

    def _check_template_kwargs(self) -> None:
        """Those of the operator, at start."""
        try:
            self._template_kwargs(self.policy.template_kwargs)
        except RequestError as error:
            raise ConfigError(f"default_{error.message}") from None

    def truncated(self, prompt: Prompt, params: SamplingParams, max_model_len: int) -> Prompt:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` says. Images cannot be cut."""
        count = params.truncate_prompt_tokens
        if count == -1:
            count = max(1, max_model_len - (params.max_tokens or 1))
        if count is None or len(prompt) <= count:
            return prompt
        if prompt.spans:
            reason = f"the prompt has {len(prompt)} tokens, images among them, and those cannot be cut"
            message = f"truncate_prompt_tokens is {count}, but {reason}; send less text"
            raise RequestError(message, code="unsupported", param="truncate_prompt_tokens")
        ids = list(prompt.token_ids[-count:])
        shorter = self.from_prompt({"prompt_token_ids": ids}, salt=prompt.salt)
        return replace(shorter, text=self.tokenizer.decode(ids, skip_special_tokens=False))

    def check_params(self, params: SamplingParams) -> None:
        """Refuse token ids outside the vocabulary, and sampling where the model is not served for it."""
        if params.pooling is None:
            check_task(self.checkpoint.task, "generate")
        size = self.checkpoint.config.text.vocab_size
        lists = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
        }
        for name, ids in lists.items():
            wrong = [token for token in ids or () if token >= size]
            if wrong:
                message = f"{name} holds {wrong[0]}, but this model's ids go from 0 to {size - 1}"
                raise RequestError(message, param=name)

    def _encode(self, text: Any) -> list[int]:
        if not is_text(text):
            raise RequestError("the prompt is empty; give at least one character of text", param="prompt")
        return self.tokenizer.encode(self._spelled(text))

    def _spelled(self, text: str) -> str:
        return self.family.spelled(text) if isinstance(self.family, FramesPrompt) else text

    def _checked_ids(self, ids: Any) -> Ids:
        return checked_ids(ids, self.checkpoint.config.text.vocab_size, self.family.placeholder_ids)

    def _build(
        self,
        make_ids: Callable[[], Ids | list[int]],
        images: list[ImageInput],
        videos: list[Video],
        kwargs: Any,
        salt: bytes,
        text: str | None,
    ) -> Prompt:
        """Images are resolved first, so that they are decoded while the text is tokenized."""
        pixels, frames = split_kwargs(kwargs) if self.videos else (kwargs, {})
        limits = self.images.request_limits(pixels)
        items = self.images.resolve(images, limits, salt, self.prefetch_media) if images else []
        ids = np.asarray(make_ids(), np.int64)
        if isinstance(self.family, FramesPrompt):
            ids = self.family.framed(ids, len(images))
        starts = self._starts(ids, len(images))
        self._check_videos(ids, len(videos))
        if frames and not videos:
            names = ", ".join(frames)
            message = f"{names} is for videos, but none was given"
            raise RequestError(message, param=f"mm_processor_kwargs.{min(frames)}")
        where = _where(zip(images, items, strict=True))
        runs: tuple[VideoRun, ...] = ()
        if videos and isinstance(self.videos, WholeVideos):
            whole = [self.videos.resolve(video, self.videos.options(frames), salt) for video in videos]
            starts, items, runs = _merged(starts, items, np.flatnonzero(ids == self.videos.token_id), whole)
            where |= _where(zip(videos, whole, strict=True))
        expanded, spans = self._expand(ids, starts, items) if items else (ids, ())
        if videos and isinstance(self.videos, Videos):
            placed = list(zip(spans, items, strict=True))
            prompt = self._with_videos(self.videos, expanded, placed, videos, frames, salt, text)
            return replace(prompt, where={**prompt.where, **where})
        geometries = [item.geometry for item in items]
        positions, next_position = self.family.positions(expanded, spans, geometries)
        prompt = Prompt(
            token_ids=expanded.tolist(),
            spans=tuple(spans),
            items=tuple(items),
            positions=positions,
            next_position=next_position,
            identity=identity(expanded, spans),
            salt=salt,
            text=text,
            videos=runs,
            where=where,
        )
        return self.family.bound(prompt) if isinstance(self.family, BindsPrompt) else prompt

    def _starts(self, ids: Ids, num_images: int) -> Ids:
        """Indices of the placeholders, as many as images."""
        starts = np.flatnonzero(ids == self.family.image_token_id)
        if len(starts) != num_images:
            reason = f"the prompt has {len(starts)} image placeholders ({self.placeholder})"
            raise RequestError(f"{reason}, but {num_images} images were given")
        return starts

    def _check_videos(self, ids: Ids, num_videos: int) -> None:
        """Check that the placeholders match the videos, and the limit on videos."""
        token = self.videos.token_id if self.videos else self.checkpoint.config.video_token_id
        if num_videos and self.videos is None:
            raise takes_no_video(self.family)
        maximum = self.videos.max_per_prompt if self.videos else 0
        if num_videos > maximum:
            limit = f"at most {maximum} videos per prompt are allowed (limit_mm_per_prompt video={maximum})"
            raise RequestError(f"{limit}, but {num_videos} were given")
        if token is None:
            return
        count = int((ids == token).sum())
        if count != num_videos:
            reason = f"the prompt has {count} video placeholders ({self.tokenizer.token(token)})"
            raise RequestError(f"{reason}, but {num_videos} videos were given", param="video")

    def _with_videos(
        self,
        resolver: Videos,
        ids: Ids,
        images: list[tuple[Span, MediaItem]],
        videos: list[Video],
        frames: Mapping[str, Any],
        salt: bytes,
        text: str | None,
    ) -> Prompt:
        rules = resolver.rules
        options = resolver.options(frames)
        starts = np.flatnonzero(ids == rules.token_id).tolist()
        groups = [resolver.resolve(video, options, salt) for video in videos]
        layout = build_video_prompt(ids, images, starts, groups, rules, self._caption)
        parts = [(video, item) for video, group in zip(videos, groups, strict=True) for item in group.items]
        positions, next_position = layout.positions(rules.merge_size)
        return Prompt(
            token_ids=layout.token_ids.tolist(),
            spans=tuple(layout.spans),
            items=tuple(layout.items),
            positions=positions,
            next_position=next_position,
            identity=layout.identity(),
            salt=salt,
            text=text,
            videos=tuple(layout.videos),
            where=_where(parts),
        )

    def _caption(self, seconds: float) -> Sequence[int]:
        """Tokens of a frame group's timestamp, in the format of Qwen3-VL."""
        return self.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)

    def _expand(self, ids: Ids, starts: Ids, items: list[MediaItem]) -> tuple[Ids, Sequence[Span]]:
        """Replace each placeholder by its image's tokens."""
        pieces: list[Ids] = []
        spans: list[Span] = []
        copied_end = 0  # of `ids`
        length = 0  # of the expanded prompt
        for start, item in zip(starts.tolist(), items, strict=True):
            image = self.family.expand(item.geometry)
            pieces += [ids[copied_end:start], image.token_ids]
            first = length + start - copied_end
            spans.append(Span(first, len(image.token_ids), item.key, item.geometry.slots, image.is_embed))
            copied_end = start + 1
            length = first + len(image.token_ids)
        expanded = np.concatenate([*pieces, ids[copied_end:]])
        return expanded, cross_attended(spans) if image.is_cross_attended else spans

    def bill(self, prompt: Prompt, block_size: int, slot_bytes: int = 0) -> Bill:
        return bill_of(prompt, block_size, slot_bytes)


def _where(parts: Iterable[tuple[ImageInput | Video, MediaItem]]) -> dict[Key, str]:
    """Content key -> path in the request; the first path if there are several."""
    where: dict[Key, str] = {}
    for part, item in parts:
        where.setdefault(item.key, part.param)
    return where


def _merged(
    images: Ids, items: Sequence[MediaItem], videos: Ids, whole: Sequence[MediaItem]
) -> tuple[Ids, list[MediaItem], tuple[VideoRun, ...]]:
    """Placeholders of pictures and videos and their items, in prompt order, and which of them are videos."""
    starts = np.concatenate([images, videos])
    order = np.argsort(starts)
    media = [[*items, *whole][index] for index in order]
    runs = [
        VideoRun(place, 1, item.num_frames, item.key)
        for place, item in enumerate(media)
        if item.kind == "video"
    ]
    return starts[order], media, tuple(runs)


def takes_no_video(family: Family, param: str | None = None) -> RequestError:
    reason = "this model takes no videos"
    if isinstance(family, Fallback):
        reason = str(family.videos)
    message = f"{reason}; send pictures, or ask a model that does"
    return RequestError(message, code="unsupported", param=param)
