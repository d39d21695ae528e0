"""Files and batches through the client of OpenAI."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from saccade.errors import RequestError
from saccade.server.api.batches import jobs_of
from saccade.server.errors import ApiError
from saccade.server.request.batches import read_batch
from saccade.server.request.fields import FieldReader
from saccade.server.service import Service
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import RunningServer, chat_body, error_of, until

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def lines(*bodies: Any) -> bytes:
    entries = ({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies))
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def test_a_batch_is_uploaded_answered_and_read(client: openai.OpenAI) -> None:
    data = lines(chat_body("one"), chat_body("two", max_tokens=-1), chat_body("three"))
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert file.id.startswith("file-") and file.bytes == len(data) and file.filename == "in.jsonl"
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "x"})
    assert batch.id.startswith("batch_") and batch.metadata == {"job": "x"}
    assert until(lambda: client.batches.retrieve(batch.id).completed_at)
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None and done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    answers = [json.loads(line) for line in client.files.content(str(done.output_file_id)).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"c0", "c2"}
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 4 for answer in answers)
    error = json.loads(client.files.content(str(done.error_file_id)).text)
    assert error["custom_id"] == "c1" and error["response"]["status_code"] == 400
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    assert file.id in [each.id for each in client.files.list(purpose="batch")]
    assert client.files.content(file.id).content == data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_is_cancelled(client: openai.OpenAI, server: RunningServer) -> None:
    data = lines(*[chat_body("long", max_tokens=1500, ignore_eos=True)] * 40)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    assert server.answers()


def test_mistakes_are_told(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be one of batch, user_data, vision, assistants"):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(input_file_id="file-no", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        client.batches.retrieve("batch_no")
    assert error_of(server.get("/v1/files?limit=0"))["param"] == "limit"
    assert error_of(server.get("/v1/batches?after=batch_no"))["param"] == "after"
    assert error_of(server.post("/v1/files", {}))["code"] == "unsupported_media_type"


def test_without_a_folder_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ApiError, match="--batch-dir") as error:
        jobs_of(cast(Service, SimpleNamespace(batches=None)))
    assert error.value.status == 404 and error.value.code == "not_enabled"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/nowhere"}, "endpoint"),
        ({"completion_window": "7d"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
def test_the_body_of_a_batch_is_checked(change: dict[str, Any], param: str) -> None:
    good = {"input_file_id": "file-a", "endpoint": CHAT, "completion_window": "24h", "metadata": {"k": "v"}}
    assert read_batch(good, FieldReader(strict=True)).metadata == {"k": "v"}
    with pytest.raises(RequestError) as error:
        read_batch({**good, **change}, FieldReader(strict=True))
    assert error.value.param == param
