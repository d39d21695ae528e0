"""The ways in which a server computes an answer: alone, from the cache, beside others, in chunks, preempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams
from saccade.outputs import RequestOutput
from tests.helpers.conformance.theirs import Expected, Prompt, Theirs
from tests.helpers.conformance.values import answer_difference, count_differences, input_differences
from tests.helpers.families.quantize import quantize
from tests.helpers.families.zoo import second_half
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.media.images import make_photo

TOKENS = 12
SIZES: Mapping[str, Any] = {"kv_cache_gb": 0.02, "use_tqdm": False, "max_model_len": 2048}
CHUNK = 48  # tokens of a step: fewer than of most prompts

Mode = Callable[[LLM, Sequence[Prompt], SamplingParams], list[RequestOutput]]


class Asked(NamedTuple):
    prompt: Prompt
    expected: Expected


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


def alone(llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
    return [together(llm, [prompt], sampling)[0] for prompt in prompts]


def together(llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
    return llm.generate([prompt.ours for prompt in prompts], sampling, use_tqdm=False)


def preempted(llm: LLM, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
    """Once all run there are no more KV blocks, so that one gives way to another."""
    engine, scheduler = llm.engine, llm.engine.core.scheduler
    before = scheduler.stats()["preemptions"]
    outs: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt.ours, sampling)
    while scheduler.stats()["waiting"]:
        outs.update({out.request_id: out for out in engine.step()})
    with _no_more_blocks(llm, prompts):
        while engine.has_unfinished_requests():
            outs.update({out.request_id: out for out in engine.step()})
    assert scheduler.stats()["preemptions"] > before, "no request gave way to another"
    return [outs[str(number)] for number in range(len(prompts))]


@contextmanager
def _no_more_blocks(llm: LLM, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Those that are free are taken away, as far as the longest request can still end alone."""
    pool = llm.engine.core.scheduler._kv_cache
    longest = max(len(llm.engine.processor.from_prompt(prompt.ours)) for prompt in prompts)
    taken = pool.allocate(min(pool.num_available, pool.num_blocks - pool.blocks_for(longest + TOKENS)))
    try:
        yield
    finally:
        pool.release(taken)


def compare(name: str, entry: Entry, folder: Path, stored_as: str | None = None) -> Result:
    """Of a family's small checkpoint, made in this folder; `stored_as`: of what it means once it is quantised."""
    with second_half.libraries(name):
        entry.build(folder)
        served = folder if stored_as is None else _quantized(folder, stored_as)
        theirs = Theirs(folder)
        asked = _asked(entry, theirs)
        bias = dict.fromkeys(theirs.banned, -100.0)
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias=bias, logprobs=5)
        found = list(_differences(served, entry, sampling, theirs, asked))
    return Result([prompt.name for prompt, _ in asked], found)


def _quantized(folder: Path, how: str) -> Path:
    """What is in the folder becomes what the quantised one stands for."""
    meant = quantize(folder, folder / how, how)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **meant}, file, {"format": "pt"})
    return folder / how


def _asked(entry: Entry, theirs: Theirs) -> list[Asked]:
    """With what Transformers answers. A prompt that its own code fails on is left out, unless one of the first."""
    asked: list[Asked] = []
    for number, prompt in enumerate(prompts_of(entry)):
        try:
            expected = theirs.expected(prompt, TOKENS)
        except Exception:
            if number < 3:
                raise
            continue
        if len(expected.ids) + TOKENS <= entry.options.get("max_model_len", SIZES["max_model_len"]):
            asked.append(Asked(prompt, expected))
    return asked


def _differences(
    folder: Path, entry: Entry, sampling: SamplingParams, theirs: Theirs, asked: Sequence[Asked]
) -> Iterator[str]:
    sizes = {**SIZES, **entry.options}
    engines: list[tuple[dict[str, Any], list[tuple[str, Mode]]]] = [
        (sizes, [("alone", alone), ("warm", alone), ("together, warm", together)]),
        ({**sizes, "enable_prefix_caching": False}, [("together", together), ("preempted", preempted)]),
        ({**sizes, "max_num_batched_tokens": CHUNK, "max_num_seqs": 3}, [("in chunks", together)]),
    ]
    for options, modes in engines:
        with LLM(str(folder), **options) as llm:
            for mode, run in modes:
                outs = run(llm, [prompt for prompt, _ in asked], sampling)
                for (prompt, expected), out in zip(asked, outs, strict=True):
                    if difference := answer_difference(out, expected):
                        yield f"{mode}: {prompt.name} {difference}"
            if options is sizes:
                for prompt, expected in asked:
                    for difference in input_differences(llm, prompt, expected):
                        yield f"{prompt.name}: {difference}"
                yield from count_differences(llm, entry, theirs)
