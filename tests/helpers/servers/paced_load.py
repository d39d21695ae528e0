"""Loads of images in simulated time, on a device with an H200's times:
`python -m tests.helpers.servers.paced_load [CEILING_MS ...]`

Closed loops of new images of 1280x720 (64 tokens out), 8 and 32 at a time; then 32 streams of text beside four new
images of 1280x960 every quarter of a second. 4.3 ms are 2.5 times what a decode step of 32 takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from saccade.engine.async_core import AsyncEngineCore
from saccade.types.events import TokenEvent
from tests.helpers.engine.scheduling import FakeImage, make_config, make_request
from tests.helpers.fakes.timed_device import RIDING, TimedDevice

HOST_MS = 0.35  # of a step, beside what the device takes
SMALL, LARGE = 1196, 1564  # embeddings of 1280x720 and 1280x960
BURST, EVERY_MS = 4, 250.0
STREAMS = 32


class PacedLoad:
    def __init__(self, ceiling_ms: float, embeddings: int, tokens_out: int) -> None:
        latency = replace(RIDING, ceiling_ms=ceiling_ms)
        config = make_config(
            latency=latency, max_num_seqs=128, max_num_batched_tokens=8192, encoder_budget=8192,
            encoder_cache_slots=60_000, num_blocks=80_000,
        )  # fmt: skip
        self.device = TimedDevice(config, per_image=embeddings)
        self.device.latency = latency
        self.core = AsyncEngineCore(config, self.device)
        self.now = 0.0
        self.tokens_out = tokens_out
        self.num_ended = 0
        self.sent: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.gaps: dict[str, list[float]] = {"image": [], "text": []}
        self._latest: dict[str, float] = {}

    def send_image(self) -> None:
        name = f"image{len(self.sent)}"
        self.sent[name] = self.now
        image = FakeImage(name, self.device.per_image)
        unique = 100_000 + 100 * len(self.sent)
        request = make_request(name, 8, image, 22, max_tokens=self.tokens_out, temperature=0, first_token=unique)
        self.core.add(request)

    def send_text(self, number: int) -> None:
        self.core.add(make_request(f"text{number}", 450, max_tokens=1000, temperature=0, first_token=1000 * number))

    def step(self) -> int:
        """Returns how many images were answered wholly."""
        self.device.work.clear()
        events = self.core.step()
        self.now += HOST_MS + sum(ms for _, ms in self.device.work)
        return sum(self._note(event) for event in events)

    def _note(self, event: TokenEvent) -> bool:
        name = event.request_id
        kind = name.rstrip("0123456789")
        if event.token_id is not None:
            if name in self._latest:
                self.gaps[kind].append(self.now - self._latest[name])
            self._latest[name] = self.now
            self.first.setdefault(name, self.now)
        ended = event.finish_reason is not None and kind == "image"
        self.num_ended += ended
        return ended

    def shown(self) -> str:
        waits = [self.first[name] - at for name, at in self.sent.items() if name in self.first]
        rate = 1e3 * self.num_ended / self.now
        parts = [f"{rate:.1f} images/s, first token {_shown(waits)} ms"]
        parts += [f"between tokens of {kind} {_shown(gaps)} ms" for kind, gaps in self.gaps.items() if gaps]
        return ", ".join(parts)


def _shown(values: Sequence[float]) -> str:
    p50, p99 = np.percentile(values, (50, 99))
    return f"{p50:.1f} / {p99:.1f}"


def closed_loop(ceiling_ms: float, at_a_time: int, total: int) -> PacedLoad:
    load = PacedLoad(ceiling_ms, SMALL, tokens_out=64)
    for _ in range(at_a_time):
        load.send_image()
    while load.num_ended < total:
        for _ in range(load.step()):
            if len(load.sent) < total:
                load.send_image()
    return load


def beside_streams(ceiling_ms: float, total: int) -> PacedLoad:
    load = PacedLoad(ceiling_ms, LARGE, tokens_out=4)
    for number in range(STREAMS):
        load.send_text(number)
    while load.num_ended < total:
        if len(load.sent) < total and load.now >= EVERY_MS * len(load.sent) / BURST:
            for _ in range(BURST):
                load.send_image()
        load.step()
    return load


def main() -> None:
    for ceiling_ms in [float(text) for text in sys.argv[1:]] or [4.3, 20.0]:
        print(f"ceiling {ceiling_ms:g} ms; p50 / p99")
        print("   8 at a time:", closed_loop(ceiling_ms, 8, 96).shown(), flush=True)
        print("  32 at a time:", closed_loop(ceiling_ms, 32, 192).shown(), flush=True)
        print("  beside text: ", beside_streams(ceiling_ms, 60).shown(), flush=True)


if __name__ == "__main__":
    main()
