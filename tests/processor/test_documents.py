"""PDFs in chats: pages become images with their own price and key, and text beside them on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade.helpers.process import HelperProcess, Outcome, Reply
from saccade.media.jobs import encoded
from saccade.media.pdf import Box, Boxes
from saccade.processor.input_processor import Processor
from saccade.types.media import Size
from tests.helpers.media.pdfs import LETTER, encrypted_pdf, make_pdf, pdf_url
from tests.helpers.media.prompts import chat_refusal, make
from tests.helpers.servers.serving import image_url

pytestmark = pytest.mark.transformers

PDF = make_pdf([LETTER, (200, 100), (300, 300)])
BOXES = encoded(Boxes(1, (Box(*LETTER),)))


@pytest.fixture(scope="module")
def qwen(qwen2_vl_folder: Path) -> Processor:
    return make(qwen2_vl_folder)


def file_part(data: bytes = PDF, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": pdf_url(data), "filename": "a.pdf"}, **fields}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def test_each_page_is_billed_as_the_picture_it_will_be(qwen: Processor) -> None:
    prompt = qwen.from_chat(asked(file_part()))
    bill = qwen.bill(prompt, 16)
    assert [(item.kind, item.width, item.height) for item in bill.items] == [
        ("image", 880, 1139),  # max_pixels of this checkpoint
        ("image", 400, 200),
        ("image", 600, 600),
    ]
    for item, given in zip(prompt.items, bill.items, strict=True):
        assert item.geometry == qwen.family.geometry(Size(given.width, given.height), *_limits(qwen))
    assert [item.page for item in prompt.items] == [0, 1, 2]
    assert len({id(item.data) for item in prompt.items}) == 1, "the pages share the file"


def _limits(processor: Processor) -> tuple[int, int]:
    return processor.images.limits.min_pixels, processor.images.limits.max_pixels


def test_a_page_has_its_own_key(qwen: Processor) -> None:
    whole = [item.key for item in qwen.from_chat(asked(file_part())).items]
    some = [item.key for item in qwen.from_chat(asked(file_part(pages="3,1"))).items]
    assert len(set(whole)) == 3 and some == [whole[2], whole[0]], "known pages keep their keys"
    small = qwen.from_chat(asked(file_part(detail="low"))).items
    assert small[0].key != whole[0], "another render size is another image"
    other = [item.key for item in qwen.from_chat(asked(file_part()), salt=b"tenant").items]
    assert not set(other) & set(whole)


def test_fewer_pixels_render_a_smaller_page(qwen: Processor) -> None:
    prompt = qwen.from_chat(asked(file_part(pages="1")), mm_processor_kwargs={"max_pixels": 100_000})
    width, height = prompt.items[0].header.size
    assert (width, height) == (277, 359) and width * height <= 100_000


def test_the_text_layer_stands_beside_its_page_and_stays_text(qwen: Processor) -> None:
    evil = make_pdf([(200, 100)]).replace(b"(Page 1)", b"(<|image_pad|>)")
    rendered = qwen.render(asked(file_part(evil, text_layer=True, heading="Report")))
    shown = qwen.tokenizer.unshield(rendered.text)
    assert shown.index("Report") < shown.index("<|vision_start|>") < shown.rindex("<|image_pad|>")
    assert len(qwen.from_chat(asked(file_part(evil, text_layer=True))).items) == 1


def test_python_callers_give_paths_and_clients_do_not(qwen: Processor, tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(PDF)
    part = {"type": "document", "document": path, "pages": "2"}
    (item,) = qwen.from_chat(asked(part), allow_paths=True).items
    assert item.page == 1
    for refused in (part, {**file_part(), "type": "document"}):
        error = chat_refusal(qwen, asked(refused))
        assert error.param == "messages[0].content[0].type" and "'document' is unknown" in error.message
    client = {"type": "file", "file": {"file_data": str(path)}}
    assert chat_refusal(qwen, asked(client), allow_paths=True).code == "invalid_document"


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (file_part(encrypted_pdf()), "file", "encrypted"),
        (file_part(pages="9"), "file", "the pages 1 to 3"),
        (file_part(make_pdf([LETTER] * 5)), "file", "at most 4 images per prompt"),
        (file_part(make_pdf([(10000, 20)])), "file", "aspect ratio of 500"),
        (file_part(text_layer="yes"), "text_layer", "true or false"),
        (file_part(heading=3), "heading", "a string"),
        (file_part(detail="much"), "file", "detail must be one of"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file", "file_data"),
        ({"type": "file", "file": {"filename": "a.pdf"}}, "file", "file_data"),
        ({"type": "file"}, "file", "file_data"),
    ],
    ids=["encrypted", "pages", "count", "aspect", "text_layer", "heading", "detail", "file_id", "no data", "no file"],
)
def test_an_error_names_the_part(qwen: Processor, part: Any, param: str, words: str) -> None:
    error = chat_refusal(qwen, asked({"type": "text", "text": "Look:"}, part))
    assert error.param == f"messages[0].content[1].{param}" and words in error.message, error


def test_pages_and_pictures_are_counted_together(qwen: Processor) -> None:
    picture = {"type": "image_url", "image_url": {"url": image_url()}}
    error = chat_refusal(qwen, asked(file_part(), picture, picture))
    assert "at most 4 images per prompt" in error.message and "5 were given" in error.message


def test_pages_of_all_documents_are_counted_before_their_text_is_read(qwen: Processor) -> None:
    error = chat_refusal(qwen, asked(file_part(), file_part(pages="1-2", text_layer=True)))
    assert error.param == "messages[0].content[1].file"
    assert "2 pages of the PDF are asked for after 3 of other documents" in error.message


def test_all_documents_of_a_request_share_their_time(qwen: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = []
    reply = Reply(Outcome.DONE, 6.0, BOXES)
    monkeypatch.setattr(HelperProcess, "_reply", lambda helper, *request: asks.append(request) or reply)
    error = chat_refusal(qwen, asked(*[file_part(pages="1")] * 4))
    assert error.code == "document_too_large" and "more than 10 s of CPU time" in error.message
    assert len(asks) == 2, "what exceeds the time is the last that is read"
