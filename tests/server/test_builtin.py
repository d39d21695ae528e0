"""The model inside the package sees: three APIs give the right answer about a drawn shape, with the real clients."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageDraw

from saccade.cli.main import main
from tests.helpers.media.images import png
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import RunningServer, as_url, running_builtin

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

MODEL = "saccade-builtin"
QUESTION = "What color is the circle?"


@pytest.fixture(scope="module")
def builtin() -> Iterator[RunningServer]:
    with running_builtin() as server:
        yield server


def circle(color: str) -> bytes:
    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((62, 62, 162, 162), fill=color)
    return png(image)


def by_chat(server: RunningServer, data: bytes, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    parts = [{"type": "image_url", "image_url": {"url": as_url(data)}}, {"type": "text", "text": QUESTION}]
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "temperature": 0}
    if not stream:
        return str(client.chat.completions.create(**fields).choices[0].message.content)
    chunks = client.chat.completions.create(**fields, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_responses(server: RunningServer, data: bytes, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    parts = [{"type": "input_image", "image_url": as_url(data)}, {"type": "input_text", "text": QUESTION}]
    fields: Any = {"model": MODEL, "input": [{"role": "user", "content": parts}], "temperature": 0}
    if not stream:
        return client.responses.create(**fields).output_text
    with client.responses.stream(**fields) as events:
        return str(events.get_final_response().output_text)


def by_messages(server: RunningServer, data: bytes, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=server.url, api_key="EMPTY")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": blocks}], "max_tokens": 64}
    fields["extra_body"] = {"temperature": 0}
    if not stream:
        return "".join(block.to_dict()["text"] for block in client.messages.create(**fields).content)  # type: ignore[misc]
    with client.messages.stream(**fields) as events:
        return events.get_final_text()


@pytest.mark.parametrize(("color", "stream"), [("red", False), ("blue", True)], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", [by_chat, by_responses, by_messages])
def test_the_color_of_a_drawn_circle_is_told(
    builtin: RunningServer, api: Callable[[RunningServer, bytes, bool], str], color: str, stream: bool
) -> None:
    assert color in api(builtin, circle(color), stream).lower()


def test_a_bench_has_pages_rendered_and_says_what_they_took(
    builtin: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--concurrency", "2", "--pdf", "2", "--requests", "4", "--tokens", "2", "--quiet", "--processes", "1"]
    assert main(["bench", "documents", "--url", builtin.url, *load]) == 0
    _, title, row = capsys.readouterr().out.splitlines()
    assert title.split()[-5:] == ["queue", "pixels", "encode", "prefill", "processor"]
    assert float(row.split()[-4]) > 0 and float(row.split()[-3]) > 0, "pages were rendered and encoded"
