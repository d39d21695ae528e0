"""What stands behind an answer, beside Transformers': prompt ids, positions, features, counts, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from saccade import LLM
from saccade.errors import RequestError
from saccade.models.bridge.entrance import Entrance
from saccade.outputs import RequestOutput
from tests.helpers.conformance.theirs import Expected, Prompt, Theirs, leaves_of
from tests.helpers.families.zoo.entry import Entry

LOGPROB_TOLERANCE = 2e-4  # rounding of float32, through a few layers with sharp weights
FEATURE_TOLERANCE = 1e-4  # of the largest value
SIZES_TRIED = 12

Ints = npt.NDArray[np.int32]
Pair = tuple[Tensor, Tensor]  # ours, theirs


def answer_difference(out: RequestOutput, expected: Expected) -> str | None:
    """Of its tokens, or of the log probabilities of each and of the likeliest in its place."""
    if out.error is not None:
        return str(out.error)
    answer = out.outputs[0]
    pairs = zip(answer.token_ids, expected.tokens, strict=True)
    if (same := next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)) is not None:
        return f"after {same} tokens"
    assert answer.logprobs is not None
    differences = [
        abs(entry.logprob - float(row[token]))
        for tokens, row in zip(answer.logprobs, expected.logprobs, strict=True)
        for token, entry in tokens.items()
        if row[token] > -torch.inf
    ]
    worst = max(differences)
    return None if worst <= LOGPROB_TOLERANCE else f"log probabilities differ by {worst:.1e}"


def input_differences(llm: LLM, prompt: Prompt, expected: Expected) -> Iterator[str]:
    """Of prompt ids, RoPE positions and what the encoder made of pictures, which the engine still has."""
    ours = llm.engine.processor.from_prompt(prompt.ours)
    if list(ours.token_ids) != expected.ids:
        yield "prompt ids"
        return
    model = llm.engine.core.runner.model
    if expected.positions is not None and not _same_positions(ours.positions[: model.axes], expected.positions.numpy()):
        yield "positions"
    if not ours.spans:
        return
    rows = torch.cat([llm.engine.core.runner.embeddings[span.key] for span in ours.spans])
    where = torch.cat([torch.arange(span.start, span.end) for span in ours.spans])
    pairs = {"embeddings": (rows[:, : expected.embeds.shape[1]], expected.embeds[where])}
    pairs |= dict(_beside(model.entrance, rows, where, expected))
    for name, (found, wanted) in pairs.items():
        largest = max(float(wanted.abs().max()), 1e-6)  # pictures of Granite 4 are in deep features alone
        if found.shape != wanted.shape or not (found - wanted).abs().max() <= FEATURE_TOLERANCE * largest:
            yield f"{name} of pictures"


def _same_positions(ours: Ints, theirs: Ints) -> bool:
    """Of text all axes may be one. RoPE goes by differences, and PaliGemma counts from one."""
    theirs = np.broadcast_to(theirs[-len(ours) :], ours.shape)
    return np.array_equal(ours - ours[0, 0], theirs - theirs[0, 0])


def _beside(entrance: Entrance, rows: Tensor, where: Tensor, expected: Expected) -> Iterator[tuple[str, Pair]]:
    """What the decoder takes beside embeddings of pictures, as numbers."""
    leaves = dict(leaves_of(entrance.arguments(rows[None])))
    for extra in entrance.extras:
        found, wanted = leaves[extra.path], expected.beside[extra.path]
        if not extra.dtype.is_floating_point:
            continue
        if extra.is_of_images:  # of those tokens of a picture that the tower makes
            yield extra.path, (found[found.flatten(1).any(1)], wanted)
        else:
            yield extra.path, (found[0], wanted[0, where])


def count_differences(llm: LLM, entry: Entry, theirs: Theirs) -> Iterator[str]:
    """Prompts of pictures of random sizes, of which ours decodes none."""
    for width, height in random_sizes():
        prompt = Prompt("count", f"{entry.image} Count.", Image.new("RGB", (width, height)))
        try:
            expected = theirs.inputs(prompt)["input_ids"][0].tolist()
        except Exception:  # a size that its code does not take
            expected = None
        try:
            ours = list(llm.engine.processor.from_prompt(prompt.ours).token_ids)
        except RequestError:
            ours = None
        if ours != expected:
            counts = [None if ids is None else len(ids) for ids in (ours, expected)]
            yield f"a picture of {width}x{height}: {counts[0]} tokens, and {counts[1]} expected"


def random_sizes() -> list[tuple[int, int]]:
    """Of 1 to 900 pixels a side, one at most nine times as long as the other."""
    random = np.random.default_rng(0)
    means, ratios = random.uniform(0, np.log(300), SIZES_TRIED), random.uniform(-1, 1, SIZES_TRIED) * np.log(3)
    sides = np.exp([means + ratios, means - ratios]).astype(int).clip(1)
    return [(width, height) for width, height in sides.T.tolist()]
