"""Images and PDFs that requests name by `file_id`: the bytes of stored files, in all three APIs, and who may."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saccade.apps.batch.batch_store import BatchStore
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.server.request.media import ChatLimits, find_links
from saccade.server.request.media_files import StoredFiles
from tests.helpers.media.images import make_photo
from tests.helpers.media.pdfs import make_pdf
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import RunningServer, error_of, jpeg, text_part

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

BILL = "/v1/bill"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def photo(client: openai.OpenAI) -> str:
    return client.files.create(file=("a.jpg", jpeg(make_photo(112, 84))), purpose="vision").id


@pytest.fixture(scope="module")
def pdf(client: openai.OpenAI) -> str:
    return client.files.create(file=("a.pdf", make_pdf([(84, 112)] * 2)), purpose="user_data").id


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, text_part("What?")]}]}


def file_part(file_id: Any, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}, **more}


def image_tokens(server: RunningServer, body: dict[str, Any]) -> int:
    response = server.post(BILL, body)
    assert response.status_code == 200, response.text
    return int(response.json()["image_tokens"])


def test_a_chat_names_images_and_documents(server: RunningServer, photo: str, pdf: str) -> None:
    sent = image_tokens(server, user({"type": "image_url", "image_url": {"file_id": photo}}))
    assert sent == image_tokens(server, user(file_part(photo))) == 12
    one = image_tokens(server, user(file_part(pdf, pages="1")))
    assert image_tokens(server, user(file_part(pdf), file_part(photo))) == 2 * one + 12


def test_responses_and_messages_name_them_too(
    server: RunningServer, client: openai.OpenAI, photo: str, pdf: str
) -> None:
    content: Any = [
        {"type": "input_image", "file_id": photo, "detail": "auto"},
        {"type": "input_file", "file_id": pdf},
        {"type": "input_text", "text": "What?"},
    ]
    made = client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=16, temperature=0
    )
    blocks = [
        {"type": "image", "source": {"type": "file", "file_id": photo}},
        {"type": "document", "source": {"type": "file", "file_id": pdf}},
        {"type": "text", "text": "What?"},
    ]
    counted = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": blocks}]}).json()
    assert made.usage is not None and made.usage.input_tokens == counted["input_tokens"] > 12


@pytest.mark.parametrize("name", ["file-no", "../files/x", "/etc/passwd", "", "file-%00"])
def test_an_unknown_file_is_a_404_whatever_its_name(server: RunningServer, name: str) -> None:
    response = server.post(BILL, user(file_part(name)))
    assert response.status_code == 404 and error_of(response)["code"] == "file_not_found"
    assert error_of(response)["param"] == "messages[0].content[0].file"


def test_other_apis_name_the_part_in_their_own_words(server: RunningServer) -> None:
    part = {"type": "input_file", "file_id": "file-no"}
    response = server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert response.status_code == 404 and error_of(response)["param"] == "input[0].content[0]"
    block = {"type": "image", "source": {"type": "file", "file_id": "file-no"}}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    response = server.post("/v1/messages", body)
    assert response.status_code == 404 and "messages[0].content[0].source" in response.text


def test_a_file_for_batches_and_one_that_is_no_image_are_refused(server: RunningServer, client: openai.OpenAI) -> None:
    batch = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch").id
    error = error_of(server.post(BILL, user(file_part(batch))))
    assert "has the purpose batch; media need one of user_data, vision, assistants" in error["message"]
    words = client.files.create(file=("a.txt", b"just words"), purpose="assistants").id
    response = server.post(BILL, user(file_part(words)))
    assert response.status_code == 400 and "messages[0].content[0]" in error_of(response)["param"]


def test_a_file_with_a_uuid_is_kept_under_it(server: RunningServer, photo: str) -> None:
    part = file_part(photo, uuid="of-a-file")
    assert image_tokens(server, user(part)) == 12
    assert image_tokens(server, user({"type": "image_url", "image_url": None, "uuid": "of-a-file"})) == 12


def test_a_file_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000, 1000)
    with store.draft("alice") as draft:
        draft.write(b"her picture")
        record = draft.save("a.jpg", "vision")
    jobs: Any = SimpleNamespace(store=store, in_thread=lambda tenant, client, work: asyncio.to_thread(work))
    files = StoredFiles(jobs, MediaPolicy.of(Options()))

    def read(tenant: str) -> bytes:
        return asyncio.run(files.read(tenant, tenant, record.id, "messages[0].content[0].file", lambda _: None))

    assert read("alice") == b"her picture"
    for other in ("bob", ""):
        with pytest.raises(RequestError, match="there is no file") as caught:
            read(other)
        assert caught.value.code == "file_not_found"
    store.close()


def test_an_id_stands_alone_and_is_a_string() -> None:
    for source in ({"file_id": 5}, {"file_id": "f", "file_data": "data:,"}):
        messages = [{"role": "user", "content": [{"type": "file", "file": source}]}]
        with pytest.raises(RequestError, match="file_id must be a string and stand alone"):
            find_links(messages, ChatLimits(10, 4))


def test_a_server_without_a_folder_names_the_flag() -> None:
    files = StoredFiles(None, MediaPolicy.of(Options()))
    with pytest.raises(RequestError, match="--batch-dir DIR, or send the data"):
        asyncio.run(files.read("", "", "file-a", "messages[0].content[0].file", lambda _: None))
