"""Is the GPU right? `python -m benchmarks.gpu_correct`; `benchmarks.gpu` runs it.

Logits and embeddings in float32 and bfloat16 against float32 on the CPU, with the same weights; the built-in model's
texts on 32 questions; its accuracy on the first 1,000 held-out questions, which on a CPU in float32 is 99.4 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_shapes import SHAPES, write_folder
from benchmarks.gpu_work import Inputs, say
from saccade import LLM, SamplingParams
from saccade.apps.evaluation.questions import Question, QuestionSet, load_questions
from saccade.outputs import RequestOutput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-2}  # of the norm of the difference over the norm of the reference
CPU_ACCURACY = 0.994
QUESTIONS = 1000  # later ones have videos, tools and schemas
PROMPTS = 32
CHECKS = ("tiny", "four_layers", *TOLERANCE)  # logits of two shapes; the built-in model in two types
SMALL = {"max_model_len": 2048, "max_num_seqs": 64, "use_tqdm": False, "kv_cache_gb": 1.0}


# --- logits and embeddings ----------------------------------------------------------------------------------------


def metadata(shape: str, folder: str) -> None:
    """The same picture and texts through both devices, with the weights of the GPU's."""
    for dtype, allowed in TOLERANCE.items():
        found = _outputs(shape, folder, DEVICE, dtype, None)
        expected = _outputs(shape, folder, "cpu", "float32", found.weights)
        errors = {
            "logits": _relative(found.logits, expected.logits),
            "embeddings": _relative(found.embeddings, expected.embeddings),
        }
        say(metadata=[{"shape": shape, "dtype": dtype, "allowed": allowed, **errors}])


class _Outputs:
    def __init__(self, weights: dict[str, Tensor], logits: Tensor, embeddings: Tensor) -> None:
        self.weights, self.logits, self.embeddings = weights, logits, embeddings


def _outputs(shape: str, folder: str, device: str, dtype: str, weights: dict[str, Tensor] | None) -> _Outputs:
    with mock.patch("saccade.runner.build.pack_where_faster"):  # weights are set below
        llm = LLM(folder, load_format="dummy", device=device, dtype=dtype, max_pixels=1280 * 28 * 28, **SMALL)
    runner = llm.engine.core.runner
    targets = runner.model.params.targets
    for name, tensor in (weights or {}).items():
        targets[name].copy_(tensor)
    inputs = Inputs("saccade", SHAPES[shape])
    prompts = [inputs.about([inputs.photo(448, 336)]), inputs.text(200), inputs.text(17)]
    watched = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    with _watching() as seen:
        for prompt in prompts:  # one at a time: the order of rows is then the same everywhere
            llm.generate(prompt, watched, use_tqdm=False)
    embeddings = next(runner.embeddings[key] for key in runner.embeddings).float().cpu()
    kept = {name: tensor.float().cpu() for name, tensor in targets.items()} if weights is None else {}
    llm.close()
    del llm, runner, targets
    _forget()
    return _Outputs(kept, torch.cat(seen), embeddings)


def _forget() -> None:
    """Engines hold themselves in circles; the next one needs their memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _watching() -> Iterator[list[Tensor]]:
    """The logits of all that is sampled meanwhile."""
    seen: list[Tensor] = []
    original = import_module("saccade.runner.sampler").sample

    def watched(logits: Tensor, rows: Sequence[Any]) -> Any:
        seen.append(logits.detach().float().cpu().clone())
        return original(logits, rows)

    names = ["saccade.runner.torch_forward", *(["saccade.runner.cuda.forward"] if DEVICE == "cuda" else [])]
    patches = [mock.patch.object(import_module(name), "sample", watched) for name in names]
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --- the built-in model -------------------------------------------------------------------------------------------


class Asked:
    """Questions of a set as conversations, made once: their noise takes a while to add."""

    def __init__(self, questions: QuestionSet) -> None:
        self.questions = questions.questions
        with ThreadPoolExecutor() as pool:
            self.chats = list(pool.map(lambda question: _messages(questions, question), self.questions))

    def answers(self, count: int | None, device: str, dtype: str) -> list[RequestOutput]:
        """Greedily, the pictures before the text, as `saccade eval` asks."""
        llm = LLM(device=device, dtype=dtype, **SMALL)
        outputs = llm.chat(self.chats[:count], SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
        llm.close()
        del llm
        _forget()
        return outputs


def built_in(asked: Asked, dtype: str) -> None:
    """How many of the first answers are the CPU's, letter by letter; how many of all are right."""
    expected = asked.answers(PROMPTS, "cpu", "float32")
    begun = time.perf_counter()
    outputs = asked.answers(None, DEVICE, dtype)
    same = sum(_text(a) == _text(b) for a, b in zip(outputs, expected, strict=False))
    say(texts=[{"dtype": dtype, "same": same, "of": len(expected)}])
    pairs = zip(asked.questions, outputs, strict=True)
    right = sum(output.error is None and question.rule.is_right(_text(output)) for question, output in pairs)
    say(accuracy=[{"dtype": dtype, "right": right, "of": len(outputs), "cpu": CPU_ACCURACY,
                   "seconds": time.perf_counter() - begun}])  # fmt: skip


def _messages(questions: QuestionSet, question: Question) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": questions.image(ref).data} for ref in question.images]
    return [{"role": "user", "content": [*images, {"type": "text", "text": question.text}]}]


def _text(output: RequestOutput) -> str:
    return output.outputs[0].text if output.outputs else ""


def check(name: str, *, is_quick: bool) -> None:
    if name in TOLERANCE:
        built_in(Asked(load_questions(limit=100 if is_quick else QUESTIONS)), name)
        return
    with tempfile.TemporaryDirectory() as folder:
        metadata(name, str(write_folder(SHAPES[name], Path(folder) / name)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"any of {', '.join(CHECKS)}; all of them without")
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    for name in args.checks or CHECKS:
        _attempt(name, partial(check, name, is_quick=args.quick))
    return 0


def _attempt(name: str, work: Any) -> None:
    begun = time.perf_counter()
    try:
        work()
    except Exception:  # one broken check must not cost the others
        traceback.print_exc()
        say(errors=[name])
    print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
