"""`saccade chat`: a conversation in the terminal. Streams each answer and prints its bill."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.llm import OfflineEngine
from saccade.media.load import load_image
from saccade.options.engine import MediaPolicy, Options
from saccade.outputs import CompletionOutput, RequestOutput
from saccade.sampling_params import SamplingParams
from saccade.types.bill import Bill

with contextlib.suppress(ImportError):  # not in every build of Python
    import readline  # noqa: F401  # arrow keys and a history for `input`

_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
_HELP = (
    "Type a question; /image FILE adds a picture to the next one, /new starts over, /quit leaves; "
    "Ctrl-C ends an answer early."
)


def converse(
    opts: Options, question: str | None, images: Sequence[str], max_tokens: int, temperature: float | None
) -> int:
    """Answer one question, or read questions until the user leaves."""
    logging.getLogger("saccade.engine").setLevel(logging.WARNING)
    sampling: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        sampling["temperature"] = temperature
    SamplingParams(**sampling)  # reports a mistake before the model is loaded, as the next line does
    policy = MediaPolicy.of(opts)
    for image in images:
        load_image(Path(image), policy)
    engine = OfflineEngine(opts, progress=sys.stderr.isatty())
    try:
        params = SamplingParams(**{"temperature": 0.0, **engine.defaults, **sampling})
        conversation = Conversation(engine, params, list(images), policy)
        if question is not None:
            conversation.ask(question)
        else:
            _loop(conversation)
        return 0
    finally:
        engine.close()


def _loop(conversation: Conversation) -> None:
    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # drops what was typed
            print("\n/quit leaves", file=sys.stderr)
            continue
        if line in ("/quit", "/exit"):
            return
        try:
            _handle(conversation, line)
        except RequestError as error:  # ends one question, not the conversation
            print(f"saccade: {error}", file=sys.stderr)


def _handle(conversation: Conversation, line: str) -> None:
    if line == "/new":
        conversation.clear()
    elif line.startswith("/image "):
        conversation.add_image(line.removeprefix("/image ").strip())
    elif line.startswith("/"):
        print(_HELP, file=sys.stderr)
    elif line:
        conversation.ask(line)


@dataclass
class Conversation:
    """Messages so far and the images for the next question."""

    engine: OfflineEngine
    params: SamplingParams
    images: list[str]
    policy: MediaPolicy
    messages: list[dict[str, Any]] = field(default_factory=list)

    def clear(self) -> None:
        self.messages = []
        self.images = []

    def add_image(self, path: str) -> None:
        """RequestError if it cannot be read; other images stay."""
        load_image(Path(path), self.policy)
        self.images.append(path)

    def ask(self, question: str) -> None:
        """Images are kept for the next question when this one is not answered."""
        images = [{"type": "image", "image": path} for path in self.images]
        message = {"role": "user", "content": [*images, {"type": "text", "text": question}]}
        try:
            out = self._stream([*self.messages, message])
        except KeyboardInterrupt:
            print("\n[ended early; the question is not part of the conversation]", file=sys.stderr)
            return
        self.images = []
        answer = {"role": "assistant", "content": out.outputs[0].content}
        if out.outputs[0].reasoning:
            answer["reasoning_content"] = out.outputs[0].reasoning
        self.messages += [message, answer]
        assert out.bill is not None
        print(bill_line(out.bill, len(out.outputs[0].token_ids)), file=sys.stderr)

    def _stream(self, messages: list[dict[str, Any]]) -> RequestOutput:
        self.engine.add_chat("chat", messages, self.params)
        answer = _PrintedAnswer()
        try:
            while True:
                for out in self.engine.step():
                    answer.show(out.outputs[0])
                    if out.error:
                        raise out.error
                    if out.finished:
                        print()
                        return out
        finally:
            self.engine.abort_request("chat")


class _PrintedAnswer:
    """Prints an answer as it grows. Thinking goes to stderr, dimmed in a terminal, as the bill does."""

    def __init__(self) -> None:
        self._num_thought = 0  # characters printed
        self._num_said = 0

    def show(self, output: CompletionOutput) -> None:
        thought = (output.reasoning or "")[self._num_thought :]
        content = output.content[self._num_said :]
        self._num_thought += len(thought)
        if thought:
            is_terminal = sys.stderr.isatty()
            print(f"{_DIM}{thought}{_PLAIN}" if is_terminal else thought, end="", flush=True, file=sys.stderr)
        if content and not self._num_said and self._num_thought:
            print("\n", file=sys.stderr)
        self._num_said += len(content)
        print(content, end="", flush=True)


def bill_line(bill: Bill, answer_tokens: int) -> str:
    """The bill in one line: tokens, cache hits and times."""
    images = ", ".join(f"{i.width}x{i.height} = {i.tokens} tokens" for i in bill.items)
    parts = [
        f"{bill.prompt_tokens} prompt tokens" + (f" ({images})" if images else ""),
        f"{bill.cached_tokens} from the prefix cache",
        f"{bill.kv_blocks} KV blocks",
    ]
    if bill.encoder_cache_bytes:
        parts.append(f"{bill.encoder_cache_bytes / 1e6:.1f} MB of the encoder cache")
    parts.append(f"{answer_tokens} answer tokens")
    times = bill.times_ms
    if "first_token" in times:
        spent = f"decode {times['decode']:.0f}, encode {times['encode']:.0f}"
        first = f"first token after {times['first_token']:.0f} ms ({spent})"
        parts.append(f"{first}, all after {times['total']:.0f} ms")
    return "[" + "; ".join(parts) + "]"
