"""What a checkpoint is (`ModelConfig`) and what a user may set (`Options`). Pure data: nothing here opens a file.

Checkpoints come in two dialects: the flat configs that were published (`rope_scaling`, text fields at the top level)
and the nested ones that Transformers 5 saves (`text_config`, `rope_parameters`). Both are read here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from saccade.types import Pace


class ConfigError(ValueError):
    """The operator's mistake: a setting or a checkpoint that cannot work, with the values and what to change."""


# --- the checkpoint -----------------------------------------------------------------------------------------------

# Published configs leave out whatever equals the default of their text model's class.
_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
}
_VISION_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "hidden_act": "quick_gelu",
}
_TOWER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # the same for towers that are known by their own type
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu",
        "is_gated": True,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "image_size": 224,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers of a decoder that remember a fixed amount (gated delta nets) instead of every token's key and value."""

    layers: tuple[int, ...]  # their numbers
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution before them sees

    @property
    def channels(self) -> int:
        """Queries, keys and values of one token, side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder's shape."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...] | None  # frequencies per axis; None for plain RoPE
    rope_scaling: Mapping[str, Any]  # what is left of rope_scaling / rope_parameters, for decoders that scale
    tie_word_embeddings: bool
    model_type: str
    window: int | None = None  # tokens that attention looks back over in some layers; None: all of them
    num_cross_layers: int = 0  # of the layers, those that attend to pictures instead of the text
    linear: LinearConfig | None = None
    num_deep: int = 0  # vectors beside a picture's embedding; number k is added behind decoder layer k

    @property
    def max_context(self) -> int:
        """Positions that are computed as the model means them: attention here always looks back over all tokens."""
        return min(self.max_position, self.window or self.max_position)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values of the text."""
        return self.num_layers - self.num_cross_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def embedding_size(self) -> int:
        """Values in what a tower returns for one slot."""
        return self.hidden_size * (1 + self.num_deep)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower's shape."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    in_channels: int
    image_size: int | None  # side of the square input, for towers that take one size only
    spatial_merge_size: int  # patches per token along each side
    temporal_patch_size: int  # frames per patch
    hidden_act: str
    is_gated: bool = False  # the MLP multiplies its activation with a second product
    window_size: int | None = None  # side of an attention window, in pixels; None: every layer sees whole pictures
    full_layers: tuple[int, ...] = ()  # those that see whole pictures all the same
    deep_layers: tuple[int, ...] = ()  # those whose output goes to the decoder beside the last one's

    @property
    def window_tokens(self) -> int | None:
        """Tokens along one side of an attention window."""
        return self.window_size // self.patch_size // self.spatial_merge_size if self.window_size else None

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    dtype: str  # as the checkpoint was saved: "float32", "bfloat16", "float16"
    eos_token_ids: frozenset[int]
    raw: Mapping[str, Any] = field(repr=False)  # config.json, for what only one family reads


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json (and generation_config.json, which may name more end tokens) in either dialect."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json has no model_type, so this is not a Hugging Face checkpoint Saccade can read")
    nested = raw.get("text_config") or {}
    text = {**_TEXT_DEFAULTS.get(nested.get("model_type", model_type), {}), **_flat_text(raw), **nested}
    vision = raw.get("vision_config")
    return ModelConfig(
        model_type=model_type,
        text=_text_config(text, raw, len((vision or {}).get("deepstack_visual_indexes") or ())),
        vision=_vision_config({**_beside_towers(raw), **vision}) if vision else None,
        image_token_id=_first(raw, "image_token_id", "image_token_index"),
        video_token_id=_first(raw, "video_token_id", "video_token_index"),
        dtype=_dtype_name(raw, text),
        eos_token_ids=_eos_ids(generation or {}, raw, text),
        raw=raw,
    )


def _flat_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in ("text_config", "vision_config", "model_type")}


def _text_config(text: Mapping[str, Any], raw: Mapping[str, Any], num_deep: int) -> TextConfig:
    heads, hidden = _need(text, "num_attention_heads"), _need(text, "hidden_size")
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    section = rope.pop("mrope_section", None)
    theta = rope.pop("rope_theta", text.get("rope_theta", 10000.0))
    # Some published configs deny at the top what is true of the text model inside: its head is then not stored.
    tie = raw.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    return TextConfig(
        hidden_size=hidden,
        intermediate_size=_need(text, "intermediate_size"),
        num_layers=_need(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        vocab_size=_need(text, "vocab_size"),
        max_position=_need(text, "max_position_embeddings"),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        mrope_section=tuple(section) if section else None,
        rope_scaling=rope,
        tie_word_embeddings=bool(tie),
        model_type=text.get("model_type", raw["model_type"]),
        window=_window(text),
        linear=_linear_config(text),
        num_cross_layers=len(text.get("cross_attention_layers") or ()),
        num_deep=num_deep,
    )


def _window(text: Mapping[str, Any]) -> int | None:
    layers = text.get("layer_types") or ["sliding_attention"]  # older configs have one kind
    is_used = text.get("use_sliding_window", True) and "sliding_attention" in layers
    return text.get("sliding_window") if is_used else None


def _linear_config(text: Mapping[str, Any]) -> LinearConfig | None:
    if text.get("linear_num_value_heads") is None:
        return None
    every, kinds = text.get("full_attention_interval") or 4, text.get("layer_types")
    is_linear = [kind == "linear_attention" for kind in kinds] if kinds else [True] * (every - 1) + [False]
    return LinearConfig(
        layers=tuple(i for i in range(_need(text, "num_hidden_layers")) if is_linear[i % len(is_linear)]),
        key_heads=_need(text, "linear_num_key_heads"),
        value_heads=_need(text, "linear_num_value_heads"),
        key_dim=_need(text, "linear_key_head_dim"),
        value_dim=_need(text, "linear_value_head_dim"),
        kernel=_need(text, "linear_conv_kernel_dim"),
    )


def _vision_config(given: Mapping[str, Any]) -> VisionConfig:
    vision = {**_VISION_DEFAULTS, **_TOWER_DEFAULTS.get(given.get("model_type", ""), {}), **given}
    hidden = _first(vision, "embed_dim", "hidden_size")
    if hidden is None:
        raise ConfigError("config.json: vision_config has neither embed_dim nor hidden_size")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=vision.get("intermediate_size") or int(hidden * vision.get("mlp_ratio", 4)),
        num_layers=_need(vision, "depth", "num_hidden_layers") + vision.get("num_global_layers", 0),
        num_heads=_need(vision, "num_heads", "num_attention_heads", "attention_heads"),
        patch_size=_side(vision["patch_size"]),
        in_channels=_first(given, "in_channels", "in_chans", "num_channels") or vision["in_channels"],
        image_size=vision.get("image_size"),
        spatial_merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        hidden_act=vision["hidden_act"],
        # No config says it, but SiLU came to towers together with the gate.
        is_gated=vision.get("is_gated", vision["hidden_act"] == "silu"),
        window_size=vision.get("window_size") if "fullatt_block_indexes" in vision else None,
        full_layers=tuple(vision.get("fullatt_block_indexes") or ()),
        deep_layers=tuple(vision.get("deepstack_visual_indexes") or ()),
    )


def _beside_towers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the tower's shape but stands at the top where a projector does the merging."""
    return {name: raw[name] for name in ("spatial_merge_size",) if raw.get(name) is not None}


def _side(given: int | list[int]) -> int:
    """Of a square, which some checkpoints write as two equal numbers."""
    sides = given if isinstance(given, list) else [given]
    if len(set(sides)) != 1:
        raise ConfigError(f"config.json: patches of {given} pixels are not square")
    return sides[0]


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[n] for n in names if values.get(n) is not None), None)


def _need(values: Mapping[str, Any], *names: str) -> int:
    found = _first(values, *names)
    if not isinstance(found, int):
        raise ConfigError(f"config.json has no {' or '.join(names)}, which the model's shape needs")
    return found


def _dtype_name(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    name = _first(raw, "dtype", "torch_dtype") or _first(text, "dtype", "torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _eos_ids(*sources: Mapping[str, Any]) -> frozenset[int]:
    """The first source that names end tokens wins: generation_config.json, then config.json, then its text part."""
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


# --- what a user may set ------------------------------------------------------------------------------------------


def _option(default: Any, help: str) -> Any:
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Options:
    """Every setting of the engine, with its default. The command line is made from this class; None means automatic."""

    model: str | None = _option(None, "folder or hub id of a checkpoint; nothing: the small model inside the package")
    dtype: str = _option("auto", "float32, bfloat16 or float16; auto: the checkpoint's, where the device is good at it")
    device: str = _option("auto", "cpu or cuda; auto: cuda when there is one")
    load_format: str = _option("auto", "auto, or dummy for random weights made from the config alone")
    seed: int = _option(0, "of dummy weights and of requests that set none")
    max_model_len: int | None = _option(
        None, "longest prompt plus answer, in tokens; automatic: what model and KV allow"
    )
    max_num_batched_tokens: int = _option(2048, "tokens computed per step; smaller steps mean smoother streams")
    max_num_seqs: int = _option(128, "requests that run at the same time")
    max_waiting: int | None = _option(None, "requests that may wait; more are refused at once")
    block_size: int = _option(16, "tokens per KV block")
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory the engine may take")
    kv_cache_gb: float | None = _option(None, "GiB for KV blocks; automatic: from the memory that is free")
    encoder_budget: int | None = _option(None, "embeddings encoded per step; automatic: holds the largest picture")
    encoder_cache_gb: float | None = _option(
        None,
        "GiB for embeddings of pictures seen before; 0 keeps none; automatic: 0.5, or more if one picture needs it",
    )
    enable_prefix_caching: bool = _option(True, "reuse KV blocks of equal beginnings")
    limit_mm_per_prompt: dict[str, int] = _option(  # noqa: RUF009 (a dict becomes a default factory)
        {"image": 16, "video": 1},
        "pictures and videos per prompt, such as image=4,video=1",
    )
    min_pixels: int | None = _option(None, "smaller pictures are enlarged to this; automatic: the checkpoint's")
    max_pixels: int | None = _option(None, "larger pictures are reduced to this; automatic: the checkpoint's")
    max_image_bytes: int = _option(64 << 20, "compressed size of one picture")
    max_image_pixels: int = _option(100_000_000, "width x height of one picture before it is resized")
    max_request_pixels: int = _option(400_000_000, "the same for all pictures of one request together")
    video_fps: float = _option(2.0, "frames taken of each second of a video; requests may ask for fewer")
    max_video_frames: int | None = _option(None, "frames taken of one video at most; automatic: the checkpoint's")
    max_video_pixels: int | None = _option(
        None,
        "larger videos are reduced to this: a frame, or all frames together where the checkpoint counts so; automatic: "
        "the checkpoint's",
    )
    max_video_bytes: int = _option(256 << 20, "compressed size of one video")
    max_video_seconds: float = _option(3600.0, "how long one video may be")
    step_ms: float | None = _option(
        None,
        "how long a step may take on a CPU: prompts are cut, pictures encoded in slices and text goes ahead of them, "
        "so that nobody waits much longer for a first token; automatic: no limit offline, 300 when serving",
    )
    inter_token_ms: float | None = _option(
        None,
        "on a GPU, the device time a step beside running answers is planned to take, prompts and pictures included; "
        "the host's own time comes on top; automatic: 2.25 times what the answers take alone",
    )
    encode_layers_per_step: int | None = _option(
        None, "encoder layers run per step while others decode; automatic: whole pictures at once"
    )
    decode_threads: int | None = _option(None, "threads that decode pictures; automatic: one per core, at most 8")

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", *_PIXEL_LIMITS):
            _positive(name, getattr(self, name))
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("kv_cache_gb", "encoder_cache_gb", "max_waiting"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise ConfigError(f"{name} must be a number of 0 or more, not {value!r}")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}")
        for name in ("step_ms", "inter_token_ms", "video_fps", "max_video_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise ConfigError(f"load_format must be auto, safetensors or dummy, not {self.load_format!r}")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")
        for kind, count in self.limit_mm_per_prompt.items():
            if kind not in ("image", "video") or count < 0:
                raise ConfigError(f"limit_mm_per_prompt takes image=N,video=N with N >= 0, not {kind}={count}")


_PIXEL_LIMITS = ("max_image_bytes", "max_image_pixels", "max_request_pixels", "max_video_bytes")
_OPTIONAL_COUNTS = (
    "max_model_len",
    "encoder_budget",
    "min_pixels",
    "max_pixels",
    "max_video_frames",
    "max_video_pixels",
    "encode_layers_per_step",
    "decode_threads",
)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of 1 or more, not {value!r}")


_PROCESSOR_OPTIONS = {  # as the models' own processors call them -> the option
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "fps": "video_fps",
    "max_frames": "max_video_frames",
    "max_video_pixels": "max_video_pixels",
}


def options(**given: Any) -> Options:
    """Options from keyword arguments, as `LLM(...)` takes them. An unknown name is an error, never dropped."""
    pixels = dict(given.pop("mm_processor_kwargs", None) or {})
    unknown = set(pixels) - set(_PROCESSOR_OPTIONS)
    if unknown:
        names = ", ".join(_PROCESSOR_OPTIONS)
        raise ConfigError(f"mm_processor_kwargs takes {names}, not {', '.join(sorted(unknown))}")
    pixels = {_PROCESSOR_OPTIONS[name]: value for name, value in pixels.items()}
    known = {f.name for f in fields(Options)}
    unknown = set(given) - known
    if unknown:
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}; the options are {', '.join(sorted(known))}")
    return Options(**{**pixels, **given})


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Every setting of `saccade serve` beside the engine's. Flags, environment and file are made from this class."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all of them")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = _option((), "names clients may use, the first is shown; automatic: MODEL")
    api_key: tuple[str, ...] = _option((), "a key clients must send as a bearer token; may be repeated; none: open")
    allowed_origins: tuple[str, ...] = _option((), "web origins whose pages may call the server; none by default")
    allowed_media_domains: tuple[str, ...] = _option((), "domains pictures may be fetched from; none by default")
    allow_private_media_addresses: bool = _option(
        False, "fetch from the allowed domains also where they are on a private network; never with *"
    )
    media_fetch_timeout: float = _option(10.0, "seconds that one picture may take to be fetched, redirects included")
    allowed_local_media_path: str | None = _option(None, "folder whose pictures file: URLs may name; none by default")
    max_body_mb: int = _option(96, "MiB of one request's body")
    max_inflight_mb: int = _option(1024, "MiB of all bodies being read or prepared at the same time")
    max_parts: int = _option(4096, "messages and content parts of one request")
    uuid_cache_mb: int = _option(64, "MiB of pictures kept so that clients may name them again by uuid; 0 keeps none")
    drain_timeout: float = _option(30.0, "seconds that open requests may take to finish after SIGTERM")
    heartbeat_timeout: float = _option(60.0, "seconds without a sign from the engine before it is started again")
    strict_params: bool = _option(False, "refuse requests with fields that are not known")
    enable_access_log: bool = _option(True, "log a line per request")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("max_body_mb", "max_inflight_mb", "max_parts"):
            _positive(name, getattr(self, name))
        for name in ("uuid_cache_mb", "drain_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("heartbeat_timeout", "media_fetch_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        named = [domain for domain in self.allowed_media_domains if not domain.startswith("*")]
        if self.allow_private_media_addresses and (not named or len(named) < len(self.allowed_media_domains)):
            raise ConfigError(
                "allow_private_media_addresses needs allowed_media_domains that name the hosts one by one, not "
                f"{','.join(self.allowed_media_domains) or 'none'}: * would open your whole network to clients"
            )
        if self.max_inflight_mb < self.max_body_mb:
            raise ConfigError(
                f"max_inflight_mb={self.max_inflight_mb} is below max_body_mb={self.max_body_mb}, so the largest body "
                "could never be taken; raise the one or lower the other"
            )
        if any(not key for key in self.api_key):
            raise ConfigError("an api_key is empty, which would let everybody in; give a key or leave it out")


# --- what the parts get -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Resolved limits the scheduler works under. Tokens, blocks and slots only."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    encoder_budget: int  # embedding slots newly encoded per step
    encoder_cache_slots: int  # embedding slots that may be resident or in flight
    keep_idle_embeddings: bool = True  # False: an embedding is dropped as soon as no request holds it
    enable_prefix_caching: bool = True
    encode_layers_per_step: int | None = None  # see Options
    always_slice: bool = False  # slice encoding even when nobody decodes, so that whoever arrives waits for one slice
    is_text_first: bool = False  # prompts without pictures go ahead of prompts with pictures
    max_waiting: int | None = None
    slot_bytes: int = 0  # of one embedding slot, for the bill; the scheduler itself counts slots
    state_rows: int | None = None  # states kept for prompts that begin alike; None: the model needs none to go on
    pace: Pace | None = None  # bounds steps in which someone decodes; None: tokens and layers alone do


@dataclass(frozen=True, slots=True)
class VideoPolicy:
    """Resolved limits for one video; see Options."""

    fps: float = 2.0
    max_frames: int | None = None
    max_pixels: int | None = None
    max_bytes: int = 256 << 20
    max_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Resolved limits the processor works under."""

    limits: Mapping[str, int]  # media per prompt, by kind
    min_pixels: int | None
    max_pixels: int | None
    max_image_bytes: int
    max_image_pixels: int
    max_request_pixels: int = 400_000_000
    video: VideoPolicy = VideoPolicy()

    @classmethod
    def of(cls, options: Options) -> MediaPolicy:
        return cls(
            limits=options.limit_mm_per_prompt,
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            max_image_bytes=options.max_image_bytes,
            max_image_pixels=options.max_image_pixels,
            max_request_pixels=options.max_request_pixels,
            video=VideoPolicy(
                fps=options.video_fps,
                max_frames=options.max_video_frames,
                max_pixels=options.max_video_pixels,
                max_bytes=options.max_video_bytes,
                max_seconds=options.max_video_seconds,
            ),
        )
