"""`saccade serve --kv-events`: a router reads the tokens of a prompt block by block, over TCP."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from tests.helpers.kv_event_reader import Reader
from tests.helpers.serving import free_port, photo_part, running_server, text_part


def test_a_router_reads_the_blocks_of_a_chat(qwen2_vl_folder: Path) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-topic", "kv@here@tiny")
    with running_server(qwen2_vl_folder, *flags) as server:
        answer = server.chat([photo_part(), text_part("What is this? " * 5)], return_token_ids=True).json()
        tokens = answer["prompt_token_ids"]
        reader = Reader(events, replay, topic=b"kv@")
        reader.replay()  # the warm-up and the chat
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
