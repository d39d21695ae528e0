"""Is the GPU right? `python -m benchmarks.gpu_correct`; `benchmarks.gpu` runs it.

Logits and embeddings in float32 and bfloat16 against float32 on the CPU, with the same weights; the built-in model's
texts on 32 questions; its accuracy on the first 1,000 held-out questions, which on a CPU in float32 is 99.4 %; its
tokens with an FP8 cache.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_shapes import SHAPES, write_folder
from benchmarks.gpu_work import Inputs, attempt, say
from saccade import LLM, SamplingParams
from saccade.apps.evaluation.questions import Question, QuestionSet, load_questions
from saccade.outputs import RequestOutput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-2}  # of the norm of the difference over the norm of the reference
CPU_ACCURACY = 0.994
QUESTIONS = 1000  # later ones have videos, tools and schemas
PROMPTS = 32
SHARES = {"float32": 0.9, "bfloat16": 0.6}  # of tokens that equal the CPU's, until one differs, with an FP8 cache
WORDS = ("Light", "Water", "Stone", "Music", "Paper", "Green", "River", "Bread")  # that begin a text each
TOKENS = 48  # of each
CHECKS = ("tiny", "four_layers", *TOLERANCE, "fp8_cache")  # logits of two shapes; the built-in model
SMALL = {"max_model_len": 2048, "max_num_seqs": 64, "use_tqdm": False, "kv_cache_gb": 1.0}


# --- logits and embeddings ----------------------------------------------------------------------------------------


def numbers(shape: str, folder: str) -> None:
    """The same image and texts through both devices, with the weights of the GPU's."""
    for dtype, limit in TOLERANCE.items():
        ours = _outputs(shape, folder, DEVICE, dtype, None)
        expected = _outputs(shape, folder, "cpu", "float32", ours.weights)
        errors = {
            "logits": _relative(ours.logits, expected.logits),
            "embeddings": _relative(ours.embeddings, expected.embeddings),
        }
        say(numbers=[{"shape": shape, "dtype": dtype, "allowed": limit, **errors}])


class _Outputs(NamedTuple):
    weights: dict[str, Tensor]
    logits: Tensor
    embeddings: Tensor


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
    with _watching() as logits:
        for prompt in prompts:  # one at a time: the order of rows is then the same everywhere
            llm.generate(prompt, watched, use_tqdm=False)
    embeddings = next(runner.embeddings[key] for key in runner.embeddings).float().cpu()
    copies = {name: tensor.float().cpu() for name, tensor in targets.items()} if weights is None else {}
    llm.close()
    del llm, runner, targets
    _forget()
    return _Outputs(copies, torch.cat(logits), embeddings)


def _forget() -> None:
    """Engines hold themselves in circles; the next one needs their memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _watching() -> Iterator[list[Tensor]]:
    """The logits of all that is sampled meanwhile."""
    rows_of_logits: list[Tensor] = []
    original = import_module("saccade.runner.sampler").sample

    def watched(logits: Tensor, rows: Sequence[Any]) -> Any:
        rows_of_logits.append(logits.detach().float().cpu().clone())
        return original(logits, rows)

    with mock.patch.object(import_module("saccade.runner.pooling"), "sample", watched):
        yield rows_of_logits


def _relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


# --- the built-in model -------------------------------------------------------------------------------------------


class Conversations:
    """Questions of a set as conversations, made once: their noise takes a while to add."""

    def __init__(self, questions: QuestionSet) -> None:
        self.questions = questions.questions
        with ThreadPoolExecutor() as pool:
            self.chats = list(pool.map(lambda question: _messages(questions, question), self.questions))

    def answers(self, count: int | None, device: str, dtype: str) -> list[RequestOutput]:
        """Greedily, the images before the text, as `saccade eval` asks."""
        llm = LLM(device=device, dtype=dtype, **SMALL)
        outputs = llm.chat(self.chats[:count], SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
        llm.close()
        del llm
        _forget()
        return outputs


def built_in(conversations: Conversations, dtype: str) -> None:
    """How many of the first answers are the CPU's, letter by letter; how many of all are right."""
    expected = conversations.answers(PROMPTS, "cpu", "float32")
    start = time.perf_counter()
    outputs = conversations.answers(None, DEVICE, dtype)
    same = sum(_text(a) == _text(b) for a, b in zip(outputs, expected, strict=False))
    say(texts=[{"dtype": dtype, "same": same, "of": len(expected)}])
    pairs = zip(conversations.questions, outputs, strict=True)
    right = sum(output.error is None and question.rule.is_right(_text(output)) for question, output in pairs)
    say(accuracy=[{"dtype": dtype, "right": right, "of": len(outputs), "cpu": CPU_ACCURACY,
                   "seconds": time.perf_counter() - start}])  # fmt: skip


def _messages(questions: QuestionSet, question: Question) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": questions.image(ref).data} for ref in question.images]
    return [{"role": "user", "content": [*images, {"type": "text", "text": question.text}]}]


def _text(output: RequestOutput) -> str:
    return output.outputs[0].text if output.outputs else ""


def fp8_cache() -> None:
    """The built-in model with an FP8 cache, on both devices."""
    expected = _continuations("cpu", "float32")
    for dtype, limit in SHARES.items():
        pairs = zip(_continuations(DEVICE, dtype), expected, strict=True)
        same = sum(next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), TOKENS) for pair in pairs)
        say(fp8_cache=[{"dtype": dtype, "share": same / sum(map(len, expected)), "allowed": limit}])


def _continuations(device: str, dtype: str) -> list[list[int]]:
    llm = LLM(device=device, dtype=dtype, kv_cache_dtype="fp8", **SMALL)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([f"{word} is a word that" for word in WORDS], params, use_tqdm=False)
    llm.close()
    _forget()
    return [output.outputs[0].token_ids for output in outputs]


def check(name: str, *, is_quick: bool) -> None:
    if name == "fp8_cache":
        fp8_cache()
        return
    if name in TOLERANCE:
        built_in(Conversations(load_questions(limit=100 if is_quick else QUESTIONS)), name)
        return
    with tempfile.TemporaryDirectory() as folder:
        numbers(name, str(write_folder(SHAPES[name], Path(folder) / name)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"any of {', '.join(CHECKS)}; all of them without")
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    for name in args.checks or CHECKS:
        attempt(name, partial(check, name, is_quick=args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
