"""Saccade: an inference engine for vision-language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.errors import ConfigError, RequestError
from saccade.outputs import CompletionOutput, Logprob, RequestOutput
from saccade.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from saccade.async_llm import AsyncLLM
    from saccade.llm import LLM

__version__ = "0.5.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "ConfigError", "GuidedDecodingParams",
    "Logprob", "RequestError", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: `LLM` needs torch, and counting tokens and serving do not."""
    if name == "LLM":
        from saccade.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from saccade.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")
