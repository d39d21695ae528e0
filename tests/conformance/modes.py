"""The ways in which a server computes an answer: alone, from the cache, beside others, in chunks, after a preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from saccade import LLM, SamplingParams
from tests.conformance.theirs import Prompt, Theirs
from tests.helpers.families.zoo import second_half
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.media.images import make_photo

TOKENS = 12
SAMPLING = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SIZES: Mapping[str, Any] = {"kv_cache_gb": 0.02, "use_tqdm": False, "max_model_len": 2048}
CHUNK = 48  # tokens of a step: fewer than of most prompts

Answers = list[list[int] | str]  # a prompt that is refused has a reason
Mode = Callable[[LLM, Sequence[Any]], Answers]


class Result(NamedTuple):
    prompts: list[str]  # those that Transformers answers
    differences: list[str]  # "mode: prompt", none if all answers are equal


def prompts_of(image: str) -> list[Prompt]:
    photo, tall, wide, dot = (make_photo(*size) for size in ((60, 50), (40, 90), (300, 40), (1, 1)))
    return [
        Prompt("picture", f"{image}What is it?", photo),
        Prompt("text around", f"The quick brown {image} fox jumps over it.", tall),
        Prompt("text", "The quick brown fox jumps over the lazy dog. " * 3),
        Prompt("two pictures", f"{image} and then {image} differ?", photo, wide),
        Prompt("side by side", f"{image}{image} Which is larger?", tall, photo),
        Prompt("wide", f"{image} Read it.", wide),
        Prompt("one pixel", f"{image} See?", dot),
        Prompt("large", f"{image} More.", make_photo(500, 400)),
    ]


def alone(llm: LLM, prompts: Sequence[Any]) -> Answers:
    return [answers(llm, [prompt])[0] for prompt in prompts]


def answers(llm: LLM, prompts: Sequence[Any]) -> Answers:
    outs = llm.generate(list(prompts), SAMPLING, use_tqdm=False)
    return [out.outputs[0].token_ids if out.error is None else str(out.error) for out in outs]


def compare(name: str, entry: Entry, folder: Path) -> Result:
    """Of a family's small checkpoint, made in this folder."""
    with second_half.libraries(name):
        entry.build(folder)
        prompts, expected = _expected(entry, folder)
        ours = [{"prompt": p.text, "multi_modal_data": {"image": p.images or None}} for p in prompts]
        found = list(_differences(folder, entry, ours, prompts, expected))
    return Result([prompt.name for prompt in prompts], found)


def _expected(entry: Entry, folder: Path) -> tuple[list[Prompt], Answers]:
    """What Transformers answers; a prompt that its own code fails on is left out, unless it is one of the first."""
    theirs = Theirs(folder)
    prompts: list[Prompt] = []
    expected: Answers = []
    for number, prompt in enumerate(prompts_of(entry.image)):
        try:
            answer = theirs.greedy(prompt, TOKENS)
        except Exception:
            if number < 3:
                raise
            continue
        prompts.append(prompt)
        expected.append(answer)
    return prompts, expected


def _differences(
    folder: Path, entry: Entry, ours: Sequence[Any], prompts: Sequence[Prompt], expected: Answers
) -> Iterator[str]:
    sizes = {**SIZES, **entry.options}
    engines: list[tuple[dict[str, Any], list[tuple[str, Mode]]]] = [
        (sizes, [("alone", alone), ("warm", alone), ("together, warm", answers)]),
        ({**sizes, "enable_prefix_caching": False}, [("together", answers)]),
        ({**sizes, "max_num_batched_tokens": CHUNK, "max_num_seqs": 3}, [("in chunks", answers)]),
    ]
    for options, modes in engines:
        with LLM(str(folder), **options) as llm:
            for mode, run in modes:
                for prompt, got, wanted in zip(prompts, run(llm, ours), expected, strict=True):
                    if got != wanted:
                        yield f"{mode}: {prompt.name} {_difference(got, wanted)}"


def _difference(got: list[int] | str, wanted: list[int] | str) -> str:
    if isinstance(got, str):
        return got
    same = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
    return f"after {same} tokens"
