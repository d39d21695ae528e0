"""What a pass on a CUDA device tells each kind of layers, and what a kind offers. See `layer_kinds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from saccade.kernels.attention.prefill import Half
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.prepare_inputs import DecodeInputs, DecodeMetadata, PrefillInputs
from saccade.models.cuda.decoder import FusedDecoder, Mixer
from saccade.runner.batch import RequestState
from saccade.runner.cuda.prefill_metadata import Parts, PrefillSizes, Window
from saccade.runner.cuda.staging import Metadata
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Windows
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.step import Admission, ScheduledWindow


class DecoderParts(NamedTuple):
    """What kinds of layers are built of."""

    fused: FusedDecoder
    block_size: int
    max_requests: int
    states: RecurrentStates | None  # of decoders with gated delta nets
    slab: EmbeddingSlab | None  # of decoders with cross-attention
    max_cross_states: int  # that a token attends to


class DecodePass(NamedTuple):
    """One new token of each request."""

    metadata: DecodeMetadata
    states: Tensor  # int32 [T]: of images, that each row attends to
    has_images: bool  # any row attends to one
    inputs: DecodeInputs
    taken: int  # SMs that prefill has meanwhile


class PrefillPass(NamedTuple):
    parts: Parts
    inputs: PrefillInputs
    sizes: PrefillSizes
    tiles: Tiles
    splits: int | None  # of keys; None: the kernel chooses


class LayerKind(Protocol):
    @property
    def layer(self) -> type:
        """The class of its layers' attention."""

    @property
    def is_optional(self) -> bool:
        """Whether its layers are skipped in some passes, which have graphs without them."""

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        """With the metadata that it needs for these windows; None: for any that a CUDA graph holds."""

    def decode(self, step: DecodePass) -> Mixer | None: ...

    def prefill(self, step: PrefillPass) -> Mixer | None:
        """None: the pass skips its layers."""


class TiledKind(LayerKind, Protocol):
    """Attention over the KV cache: every decoder has one kind of it, which chooses tiles and splits."""

    @property
    def past_of_trials(self) -> int:
        """Tokens before a window that is timed."""

    def is_short(self, tokens: int, seq_lens: Sequence[int]) -> bool: ...

    def rows(self, tokens: int, *, is_short: bool = False) -> int: ...

    def half(self, tokens: int) -> Half: ...

    def expanded_of(self, windows: Sequence[Window]) -> int:
        """Tokens of contexts that it should expand, whatever graphs hold."""


@runtime_checkable
class RequestKind(LayerKind, Protocol):
    """Layers that keep something of each request. `row`: the request's in the block tables."""

    def open(self, admission: Admission, row: int) -> None: ...

    def close(self, request_id: str, row: int | None) -> None: ...

    def clear(self) -> None: ...

    def begin_decode(self, windows: Windows, rows: Metadata, states: Metadata) -> None:
        """Writes how many states of images its layers read for each new token, if they read any."""

    def begin_prefill(self, rows: Window, window: ScheduledWindow, state: RequestState) -> Window:
        """The window's rows, with what its layers need to know of them."""

    def begin_pass(self, windows: Sequence[Window]) -> None:
        """Writes what the layers of a prefill pass read, beside its metadata."""
