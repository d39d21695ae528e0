"""Accuracy of the built-in model in every format that we load, on 1,288 held-out questions.

    python -m tests.helpers.families.quantized_accuracy            all of them, in about an hour
    python -m tests.helpers.families.quantized_accuracy gptq awq   the unquantised model and these

Questions with a video or further fields of the request are left out. Prints a table in Markdown. Results are kept
in --work, so a run that was stopped goes on where it was. The tower is quantised in no format, so all models share
its embeddings; formats that stand for the same weights share replies.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.apps.evaluation.questions import Question, QuestionSet, load_questions
from tests.helpers.families.quantize import FORMATS, quantize

BUILTIN = Path("saccade/builtin")
PLAIN = "unquantised"
FP8_KV = "FP8 KV cache"
NAMES = (PLAIN, FP8_KV, *FORMATS)
GREEDY = SamplingParams(temperature=0, max_tokens=256)


class Row(NamedTuple):
    name: str
    error: float | None  # of the weights, relative
    right: dict[str, bool]  # by question

    def accuracy(self, skill: str = "") -> float:
        mine = [is_right for key, is_right in self.right.items() if key.startswith(skill)]
        return sum(mine) / len(mine)


def of_images_and_text(whole: QuestionSet) -> QuestionSet:
    """Those that `messages` shows whole."""
    return replace(whole, questions=[q for q in whole.questions if not q.video and not q.request])


def measure(name: str, questions: QuestionSet, work: Path) -> Row:
    """Quantise and ask, unless that was done."""
    if name not in FORMATS:
        settings = {"kv_cache_dtype": "fp8"} if name == FP8_KV else {}
        return Row(name, None, replies(name, BUILTIN, settings, questions, work))
    folder = work / "checkpoint"
    meant = quantize(BUILTIN, folder, name)
    return Row(name, relative_error(meant), replies(digest(meant), folder, {}, questions, work))


def replies(key: str, folder: Path, settings: dict[str, Any], questions: QuestionSet, work: Path) -> dict[str, bool]:
    """Which questions are answered right, by skill and id."""
    kept = work / f"{key.replace(' ', '-')}.json"
    if not kept.exists():
        same_keys = patch("saccade.processor.checkpoint_files.digest_of", lambda *parts: bytes(32))
        embeddings = str(work / "embeddings")
        with same_keys, LLM(model=str(folder), embedding_dir=embeddings, kv_cache_gb=0.5, **settings) as llm:
            found = llm.chat([messages(questions, question) for question in questions.questions], GREEDY)
        pairs = zip(questions.questions, found, strict=True)
        right = {f"{q.skill} {q.id}": q.rule.is_right(out.outputs[0].text) for q, out in pairs}
        kept.write_text(json.dumps(right))
    result: dict[str, bool] = json.loads(kept.read_text())
    return result


def messages(questions: QuestionSet, question: Question) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": questions.image(ref).data} for ref in question.images]
    return [{"role": "user", "content": [*images, {"type": "text", "text": question.text}]}]


def digest(meant: dict[str, Tensor]) -> str:
    """Of the weights that a checkpoint stands for."""
    found = hashlib.sha256()
    for name in sorted(meant):
        found.update(name.encode())
        found.update(meant[name].to(torch.float32).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def relative_error(meant: dict[str, Tensor]) -> float:
    """Of all quantised weights together: the norm of the difference over that of the weights."""
    sums: Counter[str] = Counter()
    for file in sorted(BUILTIN.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in meant.keys() & set(tensors.keys()):
                weight = tensors.get_tensor(name).double()
                sums["missed"] += float((meant[name].double() - weight).square().sum())
                sums["all"] += float(weight.square().sum())
    return float(sums["missed"] / sums["all"]) ** 0.5


def line(row: Row, plain: Row) -> str:
    """Lost and won: questions that only one of the two models answers right."""
    lost = sum(plain.right[key] and not row.right[key] for key in plain.right)
    won = sum(row.right[key] and not plain.right[key] for key in plain.right)
    error = "" if row.error is None else f"{row.error:.2%}"
    change = 100 * (row.accuracy() - plain.accuracy())
    shares = f"{row.accuracy():.1%} | {change:+.1f} | {lost} / {won} | {row.accuracy('table '):.1%}"
    return f"| {row.name} | {error} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--work", type=Path, default=Path("/tmp/quantized-accuracy"))
    parser.add_argument("--limit", type=int, help="ask only the first so many questions")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    questions = of_images_and_text(load_questions(limit=args.limit))
    plain = measure(PLAIN, questions, args.work)
    print("| format | error of weights | accuracy | points | lost / won | tables |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.names or NAMES:
        print(line(measure(name, questions, args.work), plain), flush=True)


if __name__ == "__main__":
    main()
