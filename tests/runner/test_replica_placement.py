"""Where one of several engines runs: a GPU each, or a part of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.runner.replica_placement import device_label, place
from saccade.types.replica import Replica


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_an_engine_alone_is_placed_as_before() -> None:
    before = torch.get_num_threads()
    options = Options(device="cpu")
    placement = place(options, Replica())
    assert placement.options is options and placement.memory_parts == 1 and not placement.reasons
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_replica_has_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    with_gpus(monkeypatch, 3)
    placements = [place(Options(device=device), Replica(index, 3)) for index in range(3)]
    assert [placement.options.device for placement in placements] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {placement.memory_parts for placement in placements} == {1}


def test_more_replicas_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"replicas=4 need a GPU each, but PyTorch sees 2.*--replicas 2"):
        place(Options(device="cuda"), Replica(0, 4))


def test_one_gpu_for_several_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    with pytest.raises(ConfigError, match=r"cuda:1.*replicas=2.*CUDA_VISIBLE_DEVICES"):
        place(Options(device="cuda:1"), Replica(0, 2))


def test_on_a_cpu_threads_and_memory_are_divided() -> None:
    torch.set_num_threads(6)
    placement = place(Options(device="cpu"), Replica(1, 3))
    assert torch.get_num_threads() == 2
    assert placement.memory_parts == 3
    assert placement.reasons == (
        "3 engines share this CPU: each has 2 of its threads and 1/3 of the automatic memory for KV blocks and "
        "embeddings",
    )
    assert place(Options(device="cpu", image_decode_threads=5), Replica(0, 64)).options.image_decode_threads == 5
    assert torch.get_num_threads() == 1


def encoders(count: int, engines: int = 1, encoder: int | None = None, index: int = 0) -> Replica:
    return Replica(index, engines, tuple(str(number) for number in range(count)), encoder)


@pytest.mark.parametrize(
    ("gpus", "engines", "count", "devices", "beside"),
    [
        (4, 2, 2, ["cuda:2", "cuda:3"], [0, 0]),
        (3, 2, 2, ["cuda:2", "cuda:2"], [0, 0]),
        (2, 2, 3, ["cuda:0", "cuda:1", "cuda:0"], [2, 1]),
        (1, 1, 1, ["cuda:0"], [1]),
        (2, 1, 1, ["cuda:1"], [0]),
    ],
)
def test_encoder_workers_take_gpus_after_the_engines_or_share_theirs(
    monkeypatch: pytest.MonkeyPatch, gpus: int, engines: int, count: int, devices: list[str], beside: list[int]
) -> None:
    with_gpus(monkeypatch, gpus)
    options = Options(device="cuda")
    placed = [place(options, encoders(count, engines, encoder)).options.device for encoder in range(count)]
    assert placed == devices
    own = [place(options, encoders(count, engines, index=index)) for index in range(engines)]
    assert [placement.encoders_beside for placement in own] == beside
    assert own[0].reasons == (f"encoder workers on {', '.join(devices)}",)


def test_on_a_cpu_encoder_workers_have_their_part_too() -> None:
    torch.set_num_threads(6)
    placement = place(Options(device="cpu"), encoders(1, 2))
    assert torch.get_num_threads() == 2 and placement.memory_parts == 3
    assert placement.reasons[0].startswith("2 engines and 1 encoder worker share this CPU: each has 2 of its threads")


def test_an_engine_with_its_own_gpu_takes_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows each engine one GPU, whatever its index."""
    with_gpus(monkeypatch, 1)
    placement = place(Options(device="cuda"), Replica(3, 4, num_local=1, has_own_device=True))
    assert placement.options.device == "cuda" and placement.memory_parts == 1


def test_an_engine_with_its_own_threads_shares_only_memory() -> None:
    torch.set_num_threads(6)
    placement = place(Options(device="cpu"), Replica(3, 4, num_local=2, has_own_device=True))
    assert torch.get_num_threads() == 6 and placement.memory_parts == 2
    (reason,) = placement.reasons
    assert reason.startswith("2 workers may share this machine: each has 6 threads and 1/2 of")


def test_a_gpu_is_named_as_the_machine_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert device_label(torch.device("cuda:1")) == "GPU 5, H200"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_label(torch.device("cuda:1")) == "GPU 1, H200"
    assert device_label(torch.device("cpu")) == "cpu"
