"""Tokenizers built for tests."""

from __future__ import annotations

import tokenizers
from tokenizers import pre_tokenizers

from benchmarks import checkpoints


def llama_first() -> tokenizers.Tokenizer:
    """Llama's newer form: only the first piece of a text gets a leading space."""
    tokenizer = checkpoints.llama_tokenizer()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return tokenizer
