"""Whole engines that an encoder worker encodes for: the tokens are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from saccade import LLM
from saccade.engine.async_core import AsyncEngineCore
from saccade.engine.core import EngineCore
from saccade.engine.encoders.socket_channel import SocketChannel
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.runner.build_encoder import build_encoder, plan_encoder
from saccade.runner.embedding_tiers.entry import Namespace
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from tests.helpers.engine.async_engine import OPTIONS, QWEN2_VL, answers, overlapped, prompts
from tests.helpers.media.images import make_photo
from tests.helpers.servers.encoder_workers import Worker

SMALL = Options(device="cpu", dtype="float32", image_decode_threads=1)


@pytest.fixture
def worker(two_layers: Path, tmp_path: Path) -> Iterator[Worker]:
    checkpoint = open_checkpoint(str(two_layers))
    largest = Processor(checkpoint, MediaPolicy.of(SMALL)).largest_item()
    assert largest is not None
    plan = plan_encoder(SMALL, checkpoint.config, largest)
    files = (two_layers, checkpoint.config, checkpoint.image_processor)
    encoder, seconds = build_encoder(*files, SMALL, plan, largest, progress=False)
    made = Worker(tmp_path / "encoder", encoder, seconds)
    yield made
    made.close()


def with_worker(llm: LLM, worker: Worker, kind: type[EngineCore]) -> LLM:
    core = llm.engine.core
    width = core.runner.model.config.text.embedding_size
    remote = RemoteEncoders([worker.address], SocketChannel, Namespace(width, "float32", b""), 1 << 24)
    with remote._changed:
        assert remote._changed.wait_for(lambda: bool(remote._workers), 20)
    core.runner.encoder.remote = remote
    llm.engine._core = kind(replace(core.limits, num_encoders=1), core.runner)
    return llm


@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_are_those_of_one_process(two_layers: Path, worker: Worker, is_async: bool) -> None:
    given = prompts(make_photo, QWEN2_VL)
    with LLM(str(two_layers), **OPTIONS) as llm:
        expected = answers(llm, given)
    made = overlapped(two_layers) if is_async else LLM(str(two_layers), **OPTIONS)
    with with_worker(made, worker, AsyncEngineCore if is_async else EngineCore) as llm:
        assert answers(llm, given) == expected
        assert llm.stats()["remote_encoders"]["encoded"] == llm.stats()["encoder"]["encoded"] == 2
        assert llm.stats()["encoder"]["decoded"] == 0
        llm.engine.core.scheduler.check()
