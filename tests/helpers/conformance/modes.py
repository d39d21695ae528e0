"""The ways in which a server computes an answer: alone, from the cache, beside others, in chunks, after preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams
from tests.helpers.conformance.theirs import Prompt, Theirs
from tests.helpers.families.quantize import quantize
from tests.helpers.families.zoo import second_half
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.media.images import make_photo

TOKENS = 12
SIZES: Mapping[str, Any] = {"kv_cache_gb": 0.02, "use_tqdm": False, "max_model_len": 2048}
CHUNK = 48  # tokens of a step: fewer than of most prompts

Answers = list[list[int] | str]  # a prompt that is refused has a reason
Mode = Callable[[LLM, Sequence[Any], SamplingParams], Answers]


class Result(NamedTuple):
    prompts: list[str]  # those that Transformers answers
    differences: list[str]  # "mode: prompt", none if all answers are equal


def prompts_of(entry: Entry) -> list[Prompt]:
    image = entry.image
    photo, tall, wide, dot = (make_photo(*size) for size in ((60, 50), (40, 90), (300, 40), (1, 1)))
    second = make_photo(60, 50, seed=1) if entry.pads_together else wide
    return [
        Prompt("picture", f"{image}What is it?", photo),
        Prompt("text around", f"The quick brown {image} fox jumps over it.", tall),
        Prompt("text", "The quick brown fox jumps over the lazy dog. " * 3),
        Prompt("two pictures", f"{image} and then {image} differ?", photo, second),
        Prompt("side by side", f"{image}{image} Which is larger?", second, photo),
        Prompt("wide", f"{image} Read it.", wide),
        Prompt("one pixel", f"{image} See?", dot),
        Prompt("large", f"{image} More.", make_photo(500, 400)),
    ]


def alone(llm: LLM, prompts: Sequence[Any], sampling: SamplingParams) -> Answers:
    return [answers(llm, [prompt], sampling)[0] for prompt in prompts]


def answers(llm: LLM, prompts: Sequence[Any], sampling: SamplingParams) -> Answers:
    outs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [out.outputs[0].token_ids if out.error is None else str(out.error) for out in outs]


def compare(name: str, entry: Entry, folder: Path, stored_as: str | None = None) -> Result:
    """Of a family's small checkpoint, made in this folder; `stored_as`: of what it means once it is quantised."""
    with second_half.libraries(name):
        entry.build(folder)
        served = folder if stored_as is None else _quantized(folder, stored_as)
        theirs = Theirs(folder)
        prompts, expected = _expected(entry, theirs)
        bias = dict.fromkeys(theirs.banned, -100.0)
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias=bias)
        found = list(_differences(served, entry, sampling, prompts, expected))
    return Result([prompt.name for prompt in prompts], found)


def _quantized(folder: Path, how: str) -> Path:
    """What is in the folder becomes what the quantised one stands for."""
    meant = quantize(folder, folder / how, how)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **meant}, file, {"format": "pt"})
    return folder / how


def _expected(entry: Entry, theirs: Theirs) -> tuple[list[Prompt], Answers]:
    """What Transformers answers; a prompt that its own code fails on is left out, unless it is one of the first."""
    prompts: list[Prompt] = []
    expected: Answers = []
    for number, prompt in enumerate(prompts_of(entry)):
        try:
            length = theirs.inputs(prompt)["input_ids"].shape[1]
            answer = theirs.greedy(prompt, TOKENS)
        except Exception:
            if number < 3:
                raise
            continue
        if length + TOKENS > entry.options.get("max_model_len", SIZES["max_model_len"]):
            continue
        prompts.append(prompt)
        expected.append(answer)
    return prompts, expected


def _differences(
    folder: Path, entry: Entry, sampling: SamplingParams, prompts: Sequence[Prompt], expected: Answers
) -> Iterator[str]:
    ours = [{"prompt": p.text, "multi_modal_data": {"image": p.images or None}} for p in prompts]
    sizes = {**SIZES, **entry.options}
    engines: list[tuple[dict[str, Any], list[tuple[str, Mode]]]] = [
        (sizes, [("alone", alone), ("warm", alone), ("together, warm", answers)]),
        ({**sizes, "enable_prefix_caching": False}, [("together", answers)]),
        ({**sizes, "max_num_batched_tokens": CHUNK, "max_num_seqs": 3}, [("in chunks", answers)]),
    ]
    for options, modes in engines:
        with LLM(str(folder), **options) as llm:
            for mode, run in modes:
                for prompt, got, wanted in zip(prompts, run(llm, ours, sampling), expected, strict=True):
                    if got != wanted:
                        yield f"{mode}: {prompt.name} {_difference(got, wanted)}"


def _difference(got: list[int] | str, wanted: list[int] | str) -> str:
    if isinstance(got, str):
        return got
    same = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
    return f"after {same} tokens"
