"""Every setting of the engine, with its default and help, and the resolved limits that the parts get."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import UsageError
from saccade.options.fields import defaults_of
from saccade.options.fields import option as _option
from saccade.options.fields import positive as _positive
from saccade.options.fields import require as _require
from saccade.options.vllm.keywords import translated
from saccade.types.attention_reach import AttentionReach
from saccade.types.latency import LatencyProfile, StepTime

# --- what a user may set ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """Every setting of the engine. The command line is made from this class; None means automatic."""

    model: str | None = _option(None, "folder or hub id of a checkpoint; none: the built-in model")
    revision: str | None = _option(None, "branch, tag or commit of a hub id; automatic: the newest")
    download_dir: str | None = _option(None, "folder for downloads from the hub; automatic: the hub's cache")
    tokenizer: str | None = _option(None, "folder or hub id of another tokenizer; automatic: MODEL's")
    tokenizer_revision: str | None = _option(None, "its revision, or with none that of MODEL's tokenizer")
    chat_template: str | None = _option(
        None, "file with a Jinja chat template, or its text; automatic: the checkpoint's"
    )
    default_chat_template_kwargs: dict[str, Any] = _option(  # noqa: RUF009 (a dict becomes a default factory)
        {}, 'what chat templates get where a request says nothing, as JSON such as {"enable_thinking": false}'
    )
    task: str = _option(
        "auto",
        "what the model is served for: generate, embed, score, or pooling (embed or score); auto: by the "
        "checkpoint's name and files",
    )
    hf_overrides: dict[str, Any] = _option(  # noqa: RUF009
        {}, "values in place of config.json's, as JSON; objects in it are merged"
    )
    dtype: str = _option("auto", "float32, bfloat16 or float16; auto: the checkpoint's, if it is fast here")
    device: str = _option("auto", "cpu or cuda; auto: cuda when there is one")
    quantization: str | None = _option(
        None,
        "fp8: the decoder's layers, of any family, are quantised while they load (needs a GPU of compute "
        "capability 8.9 or more); checkpoints that are quantised already need no option",
    )
    load_format: str = _option("auto", "auto, or dummy for random weights made from the config alone")
    seed: int = _option(0, "seed of dummy weights, and of requests that set none")
    max_model_len: int | None = _option(None, "prompt plus output tokens; automatic: by model and KV cache")
    max_num_batched_tokens: int = _option(2048, "tokens computed per step; fewer mean smoother streams")
    max_num_seqs: int = _option(128, "requests that run at the same time")
    max_waiting: int | None = _option(None, "waiting requests; more are refused; automatic: 256 when serving")
    block_size: int = _option(16, "tokens per KV block")
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory the engine may take")
    kv_cache_gb: float | None = _option(None, "GiB for KV blocks; automatic: from the free memory")
    kv_cache_dtype: str = _option(
        "auto",
        "how keys and values are stored: fp8 (or fp8_e4m3) holds twice the tokens, with the checkpoint's "
        "scales if it has some; auto, or bfloat16 or float16 as --dtype: the model's dtype",
    )
    kv_offload_gb: float = _option(
        0.0,
        "GiB of host memory (pinned beside a GPU) for KV blocks that the device evicts: conversations that "
        "come back and preempted requests are copied from there if that is faster than prefill; 0: none",
    )
    encoder_budget: int | None = _option(None, "embeddings per step; automatic: fits the largest image")
    encoder_cache_gb: float | None = _option(
        None, "GiB for the encoder cache; 0 keeps nothing; automatic: 0.5, or more if one image needs it"
    )
    embedding_host_gb: float | None = _option(
        None,
        "GiB of host memory for embeddings that were evicted from the encoder cache, pinned beside a GPU; 0: "
        "none; automatic: 4 beside a GPU, or a tenth of the free memory if that is less, and none on a CPU",
    )
    embedding_dir: str | None = _option(
        None,
        "folder in which embeddings outlive the process; several servers may share it; used only for image "
        "sizes that are read faster than encoded",
    )
    embedding_dir_gb: float = _option(16.0, "GiB of that folder; embeddings not used for longest go first")
    embedding_store: str | None = _option(
        None,
        "the same in a Valkey or Redis server: valkey://[user:password@]host[:port][/db], valkeys:// for "
        "TLS, or redis://, rediss://, unix://; better as SACCADE_EMBEDDING_STORE, which ps does not show",
        is_secret=True,
    )
    embedding_days: float = _option(
        30.0, "days without a use after which an embedding in the folder or the store is removed"
    )
    enable_prefix_caching: bool = _option(True, "reuse KV blocks of equal prompt prefixes")
    disable_chunked_mm_input: bool = _option(
        False, "end a prefill chunk before an image of which only a part fits, not inside it"
    )
    limit_mm_per_prompt: dict[str, int] = _option(  # noqa: RUF009 (a dict becomes a default factory)
        {"image": 16, "video": 1}, "images and videos per prompt, such as image=4,video=1"
    )
    min_pixels: int | None = _option(None, "smaller images are enlarged to this; automatic: the checkpoint's")
    max_pixels: int | None = _option(
        None, "larger images and video frames are reduced to this; automatic: the checkpoint's"
    )
    max_image_bytes: int = _option(64 << 20, "compressed size of one image")
    max_image_pixels: int = _option(100_000_000, "width x height of one image before it is resized")
    max_request_pixels: int = _option(400_000_000, "the same for all images of one request together")
    scaled_jpeg: bool = _option(
        False,
        "decode a JPEG at 1/2, 1/4 or 1/8 of its size where the model sees no more than that: faster for "
        "large photos, but the pixels differ a little from those that models are trained on",
    )
    gpu_jpeg: bool = _option(
        False,
        "only for images you trust, where all clients may see all images: decode JPEGs of 2 to 50 megapixels "
        "with nvJPEG on the JPEG engines of an NVIDIA data-centre GPU (pip install nvidia-nvjpeg for CUDA "
        "13, nvidia-nvjpeg-cu12 for CUDA 12); faster for large photos, but a damaged JPEG may show parts of "
        "an image decoded before it, a C library parses clients' bytes inside the engine's process, and "
        "pixels may differ by 1 of 255; JPEGs that it takes are not scaled by --scaled-jpeg",
    )
    video_fps: float = _option(2.0, "frames sampled per second of video; requests may ask for fewer")
    max_video_frames: int | None = _option(None, "frames sampled from one video; automatic: the checkpoint's")
    max_video_pixels: int | None = _option(
        None,
        "larger videos are reduced to this: per frame, or over all frames if the checkpoint counts so; "
        "automatic: the checkpoint's",
    )
    video_pruning: float = _option(
        0.0,
        "share of a frame group's tokens that is dropped, where least has changed since the frame before; "
        "the first group of a video stays whole, and requests may ask for more",
    )
    max_video_bytes: int = _option(256 << 20, "compressed size of one video")
    max_video_seconds: float = _option(3600.0, "length of one video")
    max_document_bytes: int = _option(64 << 20, "size of one PDF")
    max_document_pages: int = _option(1000, "pages of one PDF; requests choose some, each counts as an image")
    document_dpi: int = _option(144, "resolution at which pages of a PDF are rendered")
    max_page_pixels: int = _option(4_000_000, "pages that would be larger are rendered at this many pixels")
    max_step_ms: float | None = _option(
        None,
        "how long a step may take on a CPU: prefill is chunked, images are encoded in slices, text goes "
        "first, which bounds the time to first token; automatic: no limit offline, 400 when serving",
    )
    inter_token_ms: float | None = _option(
        None,
        "on a GPU, the most that a step may take in which requests decode, with its prefill and encoding; "
        "the host's own time comes on top; automatic: 2.5 times what decode takes alone, and up to 20 when "
        "prompts and images queue",
    )
    encode_layers_per_step: int | None = _option(
        None, "encoder layers run per step while requests decode; automatic: whole images at once"
    )
    attention_backend: str = _option(
        "auto",
        "prefill attention on a GPU, by one way: the fastest of our kernels that supports model and GPU; "
        "triton means the same, and flashinfer is accepted with a warning",
    )
    image_decode_threads: int | None = _option(None, "image decoders; automatic: one per core, at most 8")
    isolate_decoders: str = _option(
        "auto",
        "on: decode images and videos in processes of their own, so that a file that takes too long, fills "
        "the memory or crashes its decoder ends only that; off; auto: on where requests come from clients",
    )
    max_decode_seconds: float = _option(
        30.0, "CPU seconds that decoding one image or frame group may take; isolated decoders are ended then"
    )
    chat_template_timeout: float = _option(
        2.0, "CPU seconds that a checkpoint's chat template may take for one request; most take a millisecond"
    )
    generation_config: str = _option(
        "auto",
        "sampling defaults of requests that set none: auto for the checkpoint's generation_config.json, none "
        "for the engine's own, or a folder with another generation_config.json",
    )
    profile_dir: str | None = _option(
        None, "folder for traces of torch's profiler, between start_profile and stop_profile; none: refused"
    )
    override_generation_config: dict[str, Any] = _option(  # noqa: RUF009 (a dict becomes a default factory)
        {}, 'single values of it, as JSON such as {"temperature": 0.5}; null removes the file\'s value'
    )

    @property
    def has_embedding_tiers(self) -> bool:
        """Whether embeddings may come back from host memory or a store."""
        return self.embedding_host_gb != 0 or self.has_embedding_store

    @property
    def has_embedding_store(self) -> bool:
        return any((self.embedding_dir, self.embedding_store))

    def max_step_seconds(self, device: str) -> float | None:
        """The limit of every step, if any. On a GPU a measured latency profile bounds steps instead."""
        return self.max_step_ms / 1e3 if self.max_step_ms is not None and device == "cpu" else None

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
            *_PIXEL_LIMITS,
            *_DOCUMENT_LIMITS,
        ):
            _positive(name, getattr(self, name))
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("kv_cache_gb", "kv_offload_gb", "encoder_cache_gb", "embedding_host_gb", "max_waiting"):
            value = getattr(self, name)
            if value is not None:
                is_valid = isinstance(value, (int, float)) and value >= 0
                _require(is_valid, name, value, "a number of 0 or more")
        _require(isinstance(self.seed, int), "seed", self.seed, "a whole number")
        for name in ("max_step_ms", "inter_token_ms", "video_fps", "max_video_seconds", "max_decode_seconds"):
            value = getattr(self, name)
            if value is not None:
                _require(value > 0, name, value, "above 0")
        seconds = self.chat_template_timeout
        limits = f"above 0 and at most {_MAX_TEMPLATE_SECONDS} seconds"
        _require(0 < seconds <= _MAX_TEMPLATE_SECONDS, "chat_template_timeout", seconds, limits)
        _require(0 <= self.video_pruning < 1, "video_pruning", self.video_pruning, "at least 0 and below 1")
        if self.kv_offload_gb and not self.enable_prefix_caching:
            raise UsageError(
                f"kv_offload_gb={self.kv_offload_gb} needs the prefix cache, which finds blocks again; leave "
                "out --no-prefix-caching or --kv-offload-gb"
            )
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, "gpu_memory_utilization", share, "above 0 and at most 1")
        is_known = self.quantization in (None, "fp8")
        _require(is_known, "quantization", self.quantization, "fp8, or left out: config.json says the rest")
        for name, choices in _CHOICES.items():
            expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
            _require(getattr(self, name) in choices, name, getattr(self, name), expected)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise UsageError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")
        _check_embedding_store(self)
        for kind, count in self.limit_mm_per_prompt.items():
            if kind not in ("image", "video") or count < 0:
                expected = "image=N,video=N with N >= 0"
                raise UsageError(f"limit_mm_per_prompt takes {expected}, not {kind}={count}")


def _check_embedding_store(options: Options) -> None:
    for name in ("embedding_dir_gb", "embedding_days"):
        _require(getattr(options, name) > 0, name, getattr(options, name), "above 0")
    url = options.embedding_store
    if url is None:
        return
    match = _SCHEME.match(url)
    scheme = match[1] if match else "something else"  # the URL may hold a password, so it is not repeated
    if scheme not in _STORE_SCHEMES:
        raise UsageError(f"embedding_store must be a URL with {', '.join(_STORE_SCHEMES)}, not {scheme}")
    if options.embedding_dir is not None:
        both = f"embedding_dir={options.embedding_dir} and embedding_store={scheme}://..."
        raise UsageError(f"{both} are both given; embeddings are kept in one of them, so leave one out")


_CHOICES = {
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3"),
    "task": ("auto", "generate", "embed", "score", "pooling"),
    "isolate_decoders": ("auto", "on", "off"),
    "attention_backend": ("auto", "triton", "flashinfer"),
}
_SCHEME = re.compile(r"([^\W_]+)://")
_STORE_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
_MAX_TEMPLATE_SECONDS = 600
_PIXEL_LIMITS = ("max_image_bytes", "max_image_pixels", "max_request_pixels", "max_video_bytes")
_DOCUMENT_LIMITS = ("max_document_bytes", "max_document_pages", "document_dpi", "max_page_pixels")
_OPTIONAL_COUNTS = (
    "max_model_len",
    "encoder_budget",
    "min_pixels",
    "max_pixels",
    "max_video_frames",
    "max_video_pixels",
    "encode_layers_per_step",
    "image_decode_threads",
)


def options(**values: Any) -> Options:
    """Options from keyword arguments, ours and vLLM's, as `LLM(...)` takes them."""
    return Options(**translated(values, defaults_of(Options)))


# --- what the parts get -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Resolved limits the scheduler works under. Tokens, blocks and slots only."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    encoder_budget: int  # embeddings encoded per step, counted before pruning
    encoder_cache_slots: int  # embedding slots that may be resident or in flight
    keep_idle_embeddings: bool = True  # False: an embedding is dropped as soon as no request holds it
    enable_prefix_caching: bool = True
    disable_chunked_mm_input: bool = False  # see Options
    encode_layers_per_step: int | None = None  # see Options
    max_waiting: int | None = None
    slot_bytes: int = 0  # of one embedding slot, for the bill; the scheduler itself counts slots
    steps_ahead: int = 1  # whose images are decoded before their turn
    num_encoders: int = 0  # encoder workers; each may have as much in flight as the engine itself
    state_rows: int | None = None  # recurrent-state checkpoints; None: the model has no recurrent layers
    reach: AttentionReach | None = None  # None: a layer reads all that was computed
    host_blocks: int = 0  # KV blocks in host memory, beside `num_blocks` on the device
    min_restored_blocks: int = 1  # fewer are computed again: measured, where copying becomes cheaper
    restore_ms_per_block: float = 0.0  # measured: bounds what is restored in a step with decodes
    latency: LatencyProfile | None = None  # measured: bounds steps in which requests decode (GPU)
    step_time: StepTime | None = None  # measured: bounds the time of every step (serving on a CPU)


@dataclass(frozen=True, slots=True)
class VideoPolicy:
    """Resolved limits for one video."""

    fps: float
    max_frames: int | None
    max_pixels: int | None
    max_bytes: int
    max_seconds: float
    pruning: float

    @classmethod
    def of(cls, options: Options) -> VideoPolicy:
        return cls(
            fps=options.video_fps,
            max_frames=options.max_video_frames,
            max_pixels=options.max_video_pixels,
            max_bytes=options.max_video_bytes,
            max_seconds=options.max_video_seconds,
            pruning=options.video_pruning,
        )


@dataclass(frozen=True, slots=True)
class DocumentPolicy:
    """Resolved limits for one PDF."""

    max_bytes: int
    max_pages: int
    dpi: int
    max_page_pixels: int


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Resolved limits the processor works under."""

    limits: Mapping[str, int]  # media per prompt, by kind
    min_pixels: int | None
    max_pixels: int | None
    max_image_bytes: int
    max_image_pixels: int
    max_request_pixels: int
    scaled_jpeg: bool  # see `Options`
    gpu_jpeg: bool
    video: VideoPolicy
    document: DocumentPolicy
    template_seconds: float  # of CPU time, for one chat
    max_model_len: int | None  # None: not known before the model is loaded
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # where a chat has none

    @classmethod
    def of(cls, options: Options) -> MediaPolicy:
        return cls(
            limits=options.limit_mm_per_prompt,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            max_image_bytes=options.max_image_bytes,
            max_image_pixels=options.max_image_pixels,
            max_request_pixels=options.max_request_pixels,
            scaled_jpeg=options.scaled_jpeg,
            gpu_jpeg=options.gpu_jpeg,
            video=VideoPolicy.of(options),
            document=DocumentPolicy(*(getattr(options, name) for name in _DOCUMENT_LIMITS)),
            template_seconds=options.chat_template_timeout,
            max_model_len=options.max_model_len,
            template_kwargs=options.default_chat_template_kwargs,
        )
