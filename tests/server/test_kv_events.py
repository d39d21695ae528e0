"""`saccade serve --kv-events`: a router reads the tokens of a prompt block by block, over TCP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Thread

import pytest

from tests.helpers.servers.hostile import watching
from tests.helpers.servers.hostile_reader import HostileReader, endless, frame, topics
from tests.helpers.servers.kv_event_reader import Reader
from tests.helpers.servers.serving import RunningServer, free_port, photo_part, running_server, text_part, until

EVENTS, REPLAY = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
MUCH_MB = 50.0  # that the API process may grow by


@pytest.fixture(scope="module")
def server(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    flags = ("--kv-events", EVENTS, "--kv-events-replay", REPLAY, "--kv-events-topic", "kv@here@tiny")
    with running_server(qwen2_vl_folder, *flags) as server:
        for _ in range(3):
            assert server.answers()
        yield server


def test_a_router_reads_the_blocks_of_a_chat(server: RunningServer) -> None:
    answer = server.chat([photo_part(), text_part("What is this? " * 5)], return_token_ids=True).json()
    tokens = answer["prompt_token_ids"]
    reader = Reader(EVENTS, REPLAY, topic=b"kv@")
    while reader.next < server.stats("saccade:kv_event_batches_total"):
        reader.replay()  # the warm-up and the chats
    blocks = list(reader.index.device.values())
    begin = next(index for index, block in enumerate(blocks) if block.token_ids == tokens[:16])
    told = [token for block in blocks[begin:] for token in block.token_ids]
    whole = len(tokens) // 16 * 16
    assert whole > 16 and told[:whole] == tokens[:whole]
    (image,) = {keys[0] for block in blocks[begin:] for keys in block.extra_keys or ()}
    assert len(bytes.fromhex(image)) == 32
    for number in count():
        server.chat(f"{number} " * 20)
        if reader.read():
            break
    assert server.stats("saccade:kv_event_batches_total") >= reader.next
    assert server.stats("saccade:kv_event_overflows_total") == 0
    assert not any("let nothing but your router" in line for line in server.log)
    reader.close()


@pytest.mark.parametrize(
    ("address", "kind", "frames"),
    [
        pytest.param(EVENTS, b"SUB", topics(3_000, 4_000), id="topics"),
        pytest.param(REPLAY, b"DEALER", endless(50_000, 4_000), id="a message without an end"),
        pytest.param(REPLAY, b"DEALER", endless(400_000, 250), id="one of short frames"),
        pytest.param(REPLAY, b"DEALER", [frame(b"x")] * 20_000, id="requests that are none"),
    ],
)
def test_what_a_reader_sends_is_held_by_no_process_that_answers_clients(
    server: RunningServer, address: str, kind: bytes, frames: list[bytes]
) -> None:
    lines = len(server.log)
    hostile = HostileReader(address, kind)
    with watching(server) as watch:
        sending = Thread(target=hostile.send, args=frames)
        sending.start()
        numbers = count()
        while sending.is_alive() or next(numbers) < 8:  # libzmq takes topics when a batch is sent
            assert server.chat(f"{time.monotonic()} " * 20, max_tokens=2).status_code == 200
    assert watch.num_answered and not watch.failures
    assert watch.api_growth_mb < MUCH_MB
    assert len([line for line in server.log[lines:] if "KV events" in line or "replay" in line]) < 5
    hostile.close()
    reader = Reader(EVENTS, REPLAY)
    assert until(lambda: server.chat(f"{time.monotonic()} " * 20).status_code == 200 and reader.read())
    reader.close()
