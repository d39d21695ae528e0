"""A conversation in the terminal: streamed answers, and the bill after each."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.llm import Engine
from saccade.options import Options
from saccade.outputs import RequestOutput
from saccade.sampling_params import SamplingParams
from saccade.types import Bill

_HELP = "Type a question; /image FILE adds a picture to the next one, /new starts over, /quit leaves."


def converse(
    opts: Options, question: str | None, images: Sequence[str], max_tokens: int, temperature: float | None
) -> int:
    """Answer `question` once, or talk until the user leaves."""
    logging.getLogger("saccade.engine").setLevel(logging.WARNING)
    given: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        given["temperature"] = temperature
    SamplingParams(**given)  # a mistake is known before the model is loaded
    engine = Engine(opts, progress=sys.stderr.isatty())
    try:
        params = SamplingParams(**{"temperature": 0.0, **engine.defaults, **given})
        talk = Conversation(engine, params, list(images))
        if question is not None:
            talk.ask(question)
            return 0
        return _loop(talk)
    finally:
        engine.close()


def _loop(talk: Conversation) -> int:
    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/new":
            talk.clear()
        elif line.startswith("/image "):
            talk.images.append(line.removeprefix("/image ").strip())
        elif line.startswith("/"):
            print(_HELP, file=sys.stderr)
        elif line:
            try:
                talk.ask(line)
            except RequestError as error:  # a bad picture or a full context ends one question, not the conversation
                print(f"saccade: {error}", file=sys.stderr)


class Conversation:
    """Messages so far and the pictures for the next question."""

    def __init__(self, engine: Engine, params: SamplingParams, images: list[str]) -> None:
        self.engine = engine
        self.params = params
        self.images = images
        self.messages: list[dict[str, Any]] = []

    def clear(self) -> None:
        self.messages, self.images = [], []

    def ask(self, question: str) -> None:
        images = [{"type": "image", "image": path} for path in self.images]
        self.images = []
        turn = {"role": "user", "content": [*images, {"type": "text", "text": question}]}
        out = self._stream([*self.messages, turn])
        self.messages += [turn, {"role": "assistant", "content": out.outputs[0].text}]
        assert out.bill is not None
        print(bill_line(out.bill, len(out.outputs[0].token_ids)), file=sys.stderr)

    def _stream(self, messages: list[dict[str, Any]]) -> RequestOutput:
        self.engine.add_chat("chat", messages, self.params)
        shown = 0
        try:
            while True:
                for out in self.engine.step():
                    text = out.outputs[0].text
                    print(text[shown:], end="", flush=True)
                    shown = len(text)
                    if out.error:
                        raise out.error
                    if out.finished:
                        print()
                        return out
        finally:
            self.engine.abort_request("chat")


def bill_line(bill: Bill, answer_tokens: int) -> str:
    """One line: what the prompt cost, what came from a cache, how long it took."""
    images = ", ".join(f"{i.width}x{i.height} = {i.tokens} tokens" for i in bill.items)
    parts = [
        f"{bill.prompt_tokens} prompt tokens" + (f" ({images})" if images else ""),
        f"{bill.cached_tokens} from the prefix cache",
        f"{bill.kv_blocks} KV blocks",
        *([f"{bill.encoder_cache_bytes / 1e6:.1f} MB of the encoder cache"] if bill.encoder_cache_bytes else []),
        f"{answer_tokens} answer tokens",
    ]
    times = bill.times_ms
    if "first_token" in times:
        spent = f"decode {times['decode']:.0f}, encode {times['encode']:.0f}"
        parts.append(f"first token after {times['first_token']:.0f} ms ({spent}), all after {times['total']:.0f} ms")
    return "[" + "; ".join(parts) + "]"
