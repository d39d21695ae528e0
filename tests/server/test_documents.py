"""PDFs over HTTP: as a chat's file, a response's input_file and a message's document."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.media.pdfs import encrypted_pdf, make_pdf, pdf_url
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import MODEL, RunningServer, error_of, text_part

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

pytestmark = pytest.mark.transformers

QUESTION = text_part("What is this?")
PDF = make_pdf([(60, 40), (40, 40)])


def file_part(data: bytes = PDF, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": pdf_url(data), "filename": "a.pdf"}, **fields}


def bill(server: RunningServer, *parts: Any) -> Any:
    body = {"messages": [{"role": "user", "content": [*parts, QUESTION]}]}
    return server.post("/v1/bill", body)


def test_a_bill_counts_pages_and_a_chat_renders_each_once(server: RunningServer) -> None:
    data = make_pdf([(60, 40), (40, 40)], color="0 1 0")
    items = bill(server, file_part(data)).json()["items"]
    assert [(item["width"], item["height"]) for item in items] == [(120, 80), (80, 80)]
    assert server.chat([file_part(data), QUESTION]).status_code == 200
    before = server.stats("saccade:pictures_decoded_total")
    again = server.chat([file_part(data, pages="2"), text_part("And this?")], include_bill=True).json()
    assert [item["key"] for item in again["bill"]["items"]] == [items[1]["key"]]
    assert server.stats("saccade:pictures_decoded_total") == before


def test_the_clients_of_both_apis_send_pdfs(server: RunningServer) -> None:
    asks = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    part: Any = {"type": "input_file", "filename": "a.pdf", "file_data": pdf_url(PDF)}
    content: Any = [part, {"type": "input_text", "text": "What is this?"}]
    response = asks.responses.create(model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=2)
    claude = anthropic.Anthropic(base_url=server.url, api_key="EMPTY", max_retries=0)
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(PDF).decode()}
    blocks: Any = [{"type": "document", "source": source}, {"type": "text", "text": "What is this?"}]
    message = claude.messages.create(model=MODEL, messages=[{"role": "user", "content": blocks}], max_tokens=2)
    chat = server.chat([file_part(), QUESTION]).json()["usage"]["prompt_tokens"]
    assert response.usage is not None and response.usage.input_tokens == chat
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat


def test_a_pdf_is_named_again_by_its_uuid(server: RunningServer) -> None:
    first = bill(server, file_part(uuid="report", pages="2"))
    again = bill(server, {"type": "file", "uuid": "report", "pages": "2"})
    assert first.status_code == again.status_code == 200
    assert first.json()["items"] == again.json()["items"]
    assert error_of(bill(server, {"type": "file", "uuid": "other"}))["code"] == "image_file_not_found"


def test_a_text_document_is_text(server: RunningServer) -> None:
    document = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "Two eggs."}}
    plain = {"type": "text", "text": "Notes\n\nTwo eggs."}
    counts = [
        server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [block]}]}).json()
        for block in (document, plain)
    ]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 0


def test_errors_name_the_field_of_each_api(server: RunningServer) -> None:
    locked = encrypted_pdf()
    error = error_of(bill(server, QUESTION, file_part(locked)))
    assert error["param"] == "messages[0].content[1].file" and "encrypted" in error["message"]
    part = {"type": "input_file", "file_data": pdf_url(locked)}
    refused = server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert error_of(refused)["param"] == "input[0].content[0]"
    linked = {"type": "input_file", "file_url": "https://example.com/a.pdf"}
    refused = server.post("/v1/responses", {"input": [{"role": "user", "content": [linked]}]})
    assert "documents are not fetched" in error_of(refused)["message"]
    source = {"type": "base64", "data": base64.b64encode(locked).decode()}
    body = {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}], "max_tokens": 2}
    assert "encrypted" in server.post("/v1/messages", body).json()["error"]["message"]
    assert server.chat([QUESTION]).status_code == 200
