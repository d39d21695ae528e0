"""Copies of KV blocks to host memory and back, against plain indexing."""

from __future__ import annotations

import mmap
import random
from typing import Any

import pytest
import torch

from saccade.errors import ConfigError
from saccade.models.layers.torch_attention import PagedKV
from saccade.runner.cuda import kv_host_blocks, staging_sizes
from saccade.runner.cuda.kv_host_blocks import HostBlocks, _Lane
from saccade.types.step import KVCopy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, BLOCKS, SIZE, HEADS, DIM = 3, 12, 4, 2, 8


def random_kv(is_latent: bool = False, dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    shape = (LAYERS, BLOCKS * SIZE, HEADS, DIM)
    k, v = torch.randn(2, *shape).to(DEVICE, dtype)
    return PagedKV(k, k if is_latent else v)


def blocks_of(kv: PagedKV) -> torch.Tensor:
    """[blocks, everything of a block]"""
    both = torch.stack([kv.k, kv.v]).view(2 * LAYERS, BLOCKS, -1)
    return both.transpose(0, 1).flatten(1).clone()


@pytest.fixture(params=["one chunk", "chunks of two"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunks of two":
        monkeypatch.setattr(staging_sizes, "STAGING_BYTES", 2 * 2 * LAYERS * SIZE * HEADS * DIM * 2)


@pytest.mark.usefixtures("staging")
@pytest.mark.parametrize("is_latent", [False, True], ids=["keys and values", "latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_copies_give_what_plain_indexing_gives(is_latent: bool, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    kv = random_kv(is_latent, dtype)
    made = HostBlocks(kv, SIZE, num_blocks=9)
    expected = blocks_of(kv)
    host = torch.zeros(9, expected.shape[1], dtype=dtype, device=DEVICE)
    for _ in range(30):
        out = [KVCopy(*pair) for pair in zip(rng.sample(range(BLOCKS), 5), rng.sample(range(9), 5), strict=True)]
        back = [KVCopy(*pair) for pair in zip(rng.sample(range(BLOCKS), 7), rng.choices(range(9), k=7), strict=True)]
        made.copy(out, back)
        host[[copy.host_block for copy in out]] = expected[[copy.block for copy in out]]
        expected[[copy.block for copy in back]] = host[[copy.host_block for copy in back]]
        assert torch.equal(blocks_of(kv), expected)
        kv.k[:, :SIZE] += 1  # a step writes
        expected[0] = blocks_of(kv)[0]
    made.close()


def test_neighbours_in_host_memory_are_copied_together() -> None:
    copies = [KVCopy(block, host_block) for block, host_block in zip(range(6), (2, 3, 4, 7, 9, 10), strict=True)]
    runs = list(kv_host_blocks._runs(copies))
    assert runs == [(slice(0, 3), slice(2, 5)), (slice(3, 4), slice(7, 8)), (slice(4, 6), slice(9, 11))]


def test_what_is_not_a_number_comes_back_bit_for_bit() -> None:
    kv = random_kv()
    kv.k[:, :SIZE] = float("nan")
    before = kv.k[:, :SIZE].view(torch.int16).clone()
    made = HostBlocks(kv, SIZE, num_blocks=1)
    made.copy([KVCopy(0, 0)], [])
    kv.k.zero_()
    made.copy([], [KVCopy(0, 0)])
    assert torch.equal(kv.k[:, :SIZE].view(torch.int16), before)
    made.close()


def test_times_rise_with_the_blocks_and_end_with_those_that_both_memories_hold() -> None:
    made = HostBlocks(random_kv(), SIZE, num_blocks=9)
    assert [size for size, _ in made.measure()] == [1, 4]
    made.close()


def test_memory_that_cannot_be_had_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match=r"6912 bytes .*Cannot allocate memory; lower --kv-offload-gb"):
        HostBlocks(random_kv(), SIZE, num_blocks=9)


def test_memory_that_cannot_be_pinned_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(ConfigError, match=r"64 bytes .*CUDA error 2 .*ulimit -l"):
        kv_host_blocks._pin(torch.zeros(8, dtype=torch.int64))


class Recorded:
    """A stream's event, and the streams that wait for it."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done


class Waiting:
    """A stream."""

    def __init__(self) -> None:
        self.waited: list[Recorded] = []
        self.next_is_done = False

    def record_event(self) -> Recorded:
        return Recorded(self.next_is_done)

    def wait_event(self, event: Recorded) -> None:
        self.waited.append(event)


def test_a_direction_waits_for_the_other_only_where_both_touch_a_host_block() -> None:
    out, back = (_Lane(1, (1, 1), torch.device("cpu")) for _ in range(2))
    stream, other = Waiting(), Waiting()
    back.stream, out.stream = stream, other  # type: ignore[assignment]
    first, second, last = (out.done([KVCopy(0, host_block)]) for host_block in (1, 2, 1))
    back.wait_for(out, [KVCopy(5, 1), KVCopy(6, 3)])
    assert stream.waited == [first, last]
    for event in (first, second):
        event.is_done = True  # type: ignore[union-attr]
    back.wait_for(out, [KVCopy(5, 1), KVCopy(6, 2)])
    assert stream.waited == [first, last, last], "what is done is forgotten"
