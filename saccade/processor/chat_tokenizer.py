"""The tokenizer that `LLM.get_tokenizer` returns, with the names that Hugging Face tokenizers have.

For the caller's own text: nothing is shielded, and control tokens in it count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.processor.template import MAX_CHARS, render
from saccade.processor.tokenizer import Tokenizer


class ChatTokenizer:
    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self._tokenizer.token(one) for one in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self._tokenizer.token_id(one) for one in tokens]

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("bos_token")

    @property
    def pad_token(self) -> str | None:
        return self._tokenizer.named_tokens.get("pad_token")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """A prompt for `generate`: text, or with `tokenize` its ids. Runs the template in this process."""
        variables = {**self._tokenizer.named_tokens, **kwargs}
        text = render(
            chat_template or self.chat_template,
            conversation,
            MAX_CHARS,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
