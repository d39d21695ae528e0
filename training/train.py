"""Trains the built-in model within a time limit: `python -m training.train --minutes 9 --out DIR`.

Owns the loop, its clock, the log and the checkpoints. `--resume DIR` goes on from such a folder: with `state.pt` in
it exactly, otherwise from the weights alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import schedule
from training.batches import BatchSizes, Encoder
from training.export import export, read_weights, ship, write_weights
from training.losses import exact_matches, losses
from training.model import TINY, Model, Sizes
from training.optim import Average, optimizers
from training.samples import SKILLS
from training.scenes import plans
from training.tokenizer import corpus, read_tokenizer, train_tokenizer
from training.workers import Feeder, Pool

LOG_EVERY, EVALUATE_EVERY = 15.0, 110.0  # seconds
RESERVE = 25.0  # seconds kept at the end for the last evaluation and the export
WEIGHT_DECAY, CLIP = 0.05, 1.0


@dataclass(frozen=True)
class Settings:
    out: Path
    minutes: float = 9.0
    resume: Path | None = None
    ship: Path | None = None  # where to put the result in few files, too
    workers: int = 16
    held_out: int = 18  # evaluation batches
    peak: float = 2.0e-3
    steps: int | None = None  # stop after so many, for tests
    compile: bool = True
    sizes: Sizes = field(default=Sizes())
    batch: BatchSizes = field(default=BatchSizes())
    corpus: int = 3000
    photos: Path | None = None  # pictures to refuse; without them, textures alone


@dataclass(slots=True)
class Progress:
    """What the trainer has done so far, over all runs."""

    runs: int = 1
    steps: int = 0
    samples: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.start = time.monotonic()
        settings.out.mkdir(parents=True, exist_ok=True)
        self.log_file = settings.out / "log.txt"
        self.progress = _past(settings.resume)
        self.tokenizer = (
            read_tokenizer(settings.resume)
            if settings.resume
            else train_tokenizer(corpus(settings.corpus), settings.sizes.vocabulary)
        )
        encoder = Encoder(self.tokenizer)
        drawn = plans(settings.photos)
        self.pool = Pool(encoder, settings.batch, settings.workers, self.progress.runs, settings.held_out, drawn)
        self.steer(0.0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(self.progress.runs)
        torch.set_float32_matmul_precision("high")
        self.model = Model(settings.sizes).to(self.device)
        self.optimizers = optimizers(self.model, settings.peak, WEIGHT_DECAY)
        self.average = Average(self.model, decay=0.998)
        if settings.resume:
            self._resume(settings.resume)
        if settings.compile and self.device.type == "cuda":
            _compile(self.model)
        self.feeder = Feeder(self.pool, self.device, settings.held_out)
        count = sum(p.numel() for n, p in self.model.named_parameters() if not n.startswith("dense."))
        self.log(
            f"{count / 1e6:.2f}M parameters on {self.device}, {settings.workers} workers, run {self.progress.runs}"
        )

    # --- the loop ---

    def run(self) -> dict[str, float]:
        try:
            self._loop()
            self.evaluate()
            self.save()
        finally:
            self.feeder.close()
        return self.progress.accuracy

    def _loop(self) -> None:
        meter = MemoryReport(self.device)
        begin = last_log = last_evaluation = time.monotonic()
        end = self.start + self.settings.minutes * 60 - min(RESERVE, self.settings.minutes * 6)
        done, good = 0, self._snapshot()
        while (now := time.monotonic()) < end and done != self.settings.steps:
            part = (now - begin) / max(end - begin, 1e-3)
            self._step(part, meter)
            done += 1
            if done == 3:
                self.log(f"three steps after {time.monotonic() - self.start:.0f} s")
            if now - last_log > LOG_EVERY:
                last_log = now
                good = self._report(meter, part, good)
            if now - last_evaluation > EVALUATE_EVERY and end - now > 40:
                last_evaluation = now
                self.evaluate()
                self.save()
            self.steer(part)
        self._report(meter, 1.0, good)

    def _step(self, part: float, meter: MemoryReport) -> None:
        rate = schedule.learning_rate(part, self.settings.peak)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        waiting = time.monotonic()
        batch = self.feeder.next()
        meter.waited += time.monotonic() - waiting
        with self._autocast():
            found = losses(self.model, batch)
        loss = found.answers + schedule.dense_weight(part, self.is_resumed) * found.dense
        torch.autograd.backward(loss)
        meter.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update()
        meter.add(found.by_skill, found.dense.detach(), len(batch["ids"]))
        self.progress.steps += 1
        self.progress.samples += len(batch["ids"])

    def evaluate(self) -> None:
        """Exact matches of whole answers on the held-out batches, with the averaged weights."""
        began = time.monotonic()
        counts = torch.zeros(2, len(SKILLS), device=self.device)
        with self.average.applied(), torch.no_grad(), self._autocast(), torch.compiler.set_stance("force_eager"):
            for batch in list(self.feeder.held_out.values()):
                counts += exact_matches(self.model, batch)
        right, total = counts.tolist()
        self.progress.accuracy = {s: r / t for s, r, t in zip(SKILLS, right, total, strict=True) if t}
        shown = "  ".join(f"{skill} {value:.3f}" for skill, value in self.progress.accuracy.items())
        self.log(f"held out ({sum(total):.0f} questions, {time.monotonic() - began:.1f} s): {shown}")

    def save(self) -> None:
        with self.average.applied():
            self._export()
        state = {
            "model": self.model.state_dict(),
            "average": self.average.weights,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.settings.out / "state.pt")
        past = {name: getattr(self.progress, name) for name in ("runs", "steps", "samples", "accuracy")}
        (self.settings.out / "training.json").write_text(json.dumps(past, indent=1))
        self.log(f"saved after {self.progress.steps} steps, {self.progress.samples} samples")
        if self.settings.ship:
            ship(self.settings.out, self.settings.ship, self.log_file)

    def steer(self, part: float) -> None:
        level = schedule.text_level(part, self.is_resumed)
        self.pool.steer(level, schedule.skill_weights(self.progress.accuracy))

    @property
    def is_resumed(self) -> bool:
        return self.progress.runs > 1

    def log(self, text: str) -> None:
        line = f"[{time.monotonic() - self.start:6.1f}] {text}"
        print(line, flush=True)
        with self.log_file.open("a") as file:
            file.write(line + "\n")

    # --- helpers ---

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _export(self) -> None:
        try:
            export(self.settings.out, self.model, self.tokenizer)
        except Exception:  # whatever is wrong with the export, the weights of a run are not lost to it
            self.log(f"the export failed; writing plain weights\n{traceback.format_exc()}")
            write_weights(self.settings.out, self.model, self.tokenizer)

    def _resume(self, folder: Path) -> None:
        state_file = folder / "state.pt"
        if state_file.exists():
            state = torch.load(state_file, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.average.weights = state["average"]
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            return
        missing, unexpected = self.model.load_state_dict(read_weights(folder), strict=False)
        assert not unexpected and all(n.startswith("dense.") for n in missing), f"{missing} {unexpected}"
        self.average = Average(self.model, decay=0.998)

    def _snapshot(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def _report(self, meter: MemoryReport, part: float, good: list[Tensor]) -> list[Tensor]:
        """Log a line. If the loss is no number any more, go back to the last report's weights, at half the rate."""
        loss = meter.loss()
        self.log(f"{part:5.1%} step {self.progress.steps} " + meter.line())
        meter.reset()
        if math.isfinite(loss):
            return self._snapshot()
        self.log("the loss is not finite: back to the last good weights")
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), good)
        self.optimizers = optimizers(self.model, self.settings.peak, WEIGHT_DECAY)
        self.average = Average(self.model, decay=0.998)
        return good


class MemoryReport:
    """Sums between two lines of the log; reads the device only when asked for a line."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.began, self.waited, self.samples, self.steps = time.monotonic(), 0.0, 0, 0
        self.sums = torch.zeros(2, len(SKILLS), device=self.device)
        self.dense = torch.zeros((), device=self.device)
        self.norm = torch.zeros((), device=self.device)

    def add(self, by_skill: Tensor, dense: Tensor, samples: int) -> None:
        self.sums += by_skill
        self.dense += dense
        self.samples += samples
        self.steps += 1

    def loss(self) -> float:
        return float(self.sums[0].sum() / self.sums[1].sum().clamp(min=1))

    def line(self) -> str:
        spent = max(time.monotonic() - self.began, 1e-6)
        each = (self.sums[0] / self.sums[1].clamp(min=1)).tolist()
        shown = " ".join(f"{skill} {value:.3f}" for skill, value in zip(SKILLS, each, strict=True))
        return (
            f"loss {self.loss():.4f} dense {float(self.dense) / max(1, self.steps):.3f} norm {float(self.norm):.2f} | "
            f"{self.samples / spent:.0f} samples/s, {self.steps / spent:.1f} steps/s, "
            f"waiting {self.waited / spent:.0%} | {shown}"
        )


def _compile(model: Model) -> None:
    """Compiles the repeated blocks once for all shapes; where that fails they run as they are."""
    torch._dynamo.config.suppress_errors = True
    for block in (*model.tower.blocks, *model.decoder.layers):
        block.compile(dynamic=True)


def _past(folder: Path | None) -> Progress:
    if folder is None:
        return Progress()
    file = folder / "training.json"
    past: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": 1}
    return Progress(past["runs"] + 1, past.get("steps", 0), past.get("samples", 0), past.get("accuracy", {}))


def _tiny(settings: dict[str, Any]) -> Settings:
    """Small enough for a CPU and a minute."""
    small = BatchSizes(patches=3000, text=96, page_text=200)
    sizes = Sizes(**{**{n: getattr(TINY, n) for n in TINY.__slots__}, "vocabulary": 640})
    return Settings(**settings, sizes=sizes, batch=small, held_out=2, corpus=200)


def main() -> None:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # sizes change at every step
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the log and the state")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit for everything, the export included")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--photos", type=Path, help="folder with train/ and held_out/: pictures to refuse")
    parser.add_argument("--ship", type=Path, help="also put the result here, in at most eight files")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peak", type=float, default=Settings.peak, help="highest learning rate")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a toy model on a CPU, to see that all runs")
    given = vars(parser.parse_args())
    make: Callable[[dict[str, Any]], Settings] = _tiny if given.pop("tiny") else lambda all_of_it: Settings(**all_of_it)
    Trainer(make(given)).run()


if __name__ == "__main__":
    main()
