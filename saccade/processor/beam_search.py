"""Beam search: which continuations of a prompt are kept. What calls it has the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from saccade.errors import RequestError
from saccade.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, TokenLogprobs
from saccade.processor.families.base import FramesPrompt
from saccade.processor.input_processor import Processor
from saccade.processor.prompt_parts import by_key
from saccade.sampling_params import BeamSearchParams, SamplingParams
from saccade.types.events import FinishReason


class Beam(NamedTuple):
    token_ids: tuple[int, ...] = ()  # after the prompt
    cum_logprob: float = 0.0
    is_ended: bool = False  # by an end token, which is its last one

    def score(self, length_penalty: float) -> float:
        """The mean log probability, where the penalty is 1."""
        return self.cum_logprob / float(max(1, len(self.token_ids)) ** length_penalty)


NextTokens = Callable[[Sequence[Beam]], Sequence[TokenLogprobs]]
"""The most likely tokens after each beam."""


def search(params: BeamSearchParams, end_ids: Collection[int], next_tokens: NextTokens) -> list[Beam]:
    """The best beams, best first. As many as `beam_width`, fewer where the model's tokens do not suffice."""
    width = params.beam_width
    penalty = params.length_penalty
    ends = frozenset(() if params.ignore_eos else end_ids)
    complete: list[Beam] = []
    beams = [Beam()]
    for _ in range(params.max_tokens):
        grown = [
            Beam((*beam.token_ids, token), beam.cum_logprob + value, token in ends)
            for beam, entry in zip(beams, next_tokens(beams), strict=True)
            for token, value in entry.top
        ]
        complete += [beam for beam in grown if beam.is_ended]
        going = sorted((beam for beam in grown if not beam.is_ended), key=lambda beam: -beam.cum_logprob)
        beams = going[:width]
        if not beams or len(complete) >= width:
            break
    return sorted([*complete, *beams], key=lambda beam: -beam.score(penalty))[:width]


Generate = Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]


def best_sequences(
    prompt: str | Mapping[str, Any], params: BeamSearchParams, processor: Processor, generate: Generate
) -> BeamSearchOutput:
    """The best beams of one prompt, of which `generate` computes one more token for all beams at a time."""
    family = processor.family
    if isinstance(family, FramesPrompt) and not family.grows:
        reason = "tokens of its prompts are read by what comes after them"
        raise RequestError(f"beam search cannot be used with this model: {reason}; use generate")
    fields = dict(by_key(prompt))
    text = fields.pop("prompt", None)
    ids = list(fields.pop("prompt_token_ids", ()) if text is None else processor.tokenizer.encode(text))
    once = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.beam_width, ignore_eos=True)

    def next_tokens(beams: Sequence[Beam]) -> list[TokenLogprobs]:
        outs = generate([{**fields, "prompt_token_ids": [*ids, *beam.token_ids]} for beam in beams], once)
        for error in (out.error for out in outs if out.error):
            raise error
        return [out.outputs[0].logprobs[0] for out in outs if out.outputs[0].logprobs]

    beams = search(params, processor.eos_token_ids, next_tokens)
    return BeamSearchOutput([_sequence(ids, beam, processor) for beam in beams])


def _sequence(prompt_ids: Sequence[int], beam: Beam, processor: Processor) -> BeamSearchSequence:
    text = processor.tokenizer.decode(list(beam.token_ids))
    reason: FinishReason = "stop" if beam.is_ended else "length"
    return BeamSearchSequence([*prompt_ids, *beam.token_ids], text, beam.cum_logprob, reason)
