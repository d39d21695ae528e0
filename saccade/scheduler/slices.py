"""How far the encoder advances in a step, and how many prompt tokens that leaves. Knows neither requests nor blocks."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.options import SchedulerConfig
from saccade.scheduler.budget import StepBudget, encodes_now, layers_in_bounded_step
from saccade.scheduler.cpu_latency import CpuStepTime
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.latency import max_work, mixed_is_faster, mixed_tokens, split_spare_time
from saccade.types import LatencyProfile, ScheduledWindow


class EncoderPacing:
    def __init__(
        self, config: SchedulerConfig, encoder_scheduler: EncoderScheduler, cpu_step_time: CpuStepTime | None = None
    ) -> None:
        self.config = config
        self._tempo = cpu_step_time
        self.latency_bounded = True  # whether anyone wants tokens as they come: then steps keep to the pace
        self._gate = encoder_scheduler
        self.max_work: int | None = None  # embeddings that may be made at a time in this step; None: all of the budget
        self._is_prompts_turn = False  # where prompts and pictures take turns

    def layers(self, step: int, budget: StepBudget, *, is_decoding: bool, can_fuse: bool) -> int | None:
        """None: this step finishes the pictures it starts. Otherwise how far the encoder advances beside the rest.

        `can_fuse`: the step's decodes run already, so its prompts may go along with the next ones.
        """
        config, self.max_work = self.config, None
        if config.latency is not None:
            return self._paced(config.latency, budget, can_fuse)
        maximum = self._tempo.layers if self._tempo else config.encode_layers_per_step
        if maximum is None:
            return None
        if not config.always_slice and not is_decoding:
            return None
        if not encodes_now(step, budget, is_text_first=config.is_text_first):
            return 0
        if not config.always_slice:
            return maximum
        return layers_in_bounded_step(maximum, step, budget)

    def _paced(self, latency: LatencyProfile, budget: StepBudget, can_fuse: bool) -> int | None:
        """Where someone waits for tokens, prompts and pictures get the time that is left; otherwise all they want."""
        if not self.latency_bounded or not budget.num_decoding:
            return None
        self.max_work = max_work(latency, budget.num_decoding)
        flying = self._gate.work_in_flight
        work = max(flying, budget.work_wanted)
        prompts, layers = split_spare_time(latency, budget.num_decoding, work)
        # A prompt however short reads all weights: halves of a step would be dear. Whose picture is at hand is counted
        # as waiting for it until it goes on, so where prompts had the last step pictures get this one in any case.
        if (work and budget.num_prompts) or (flying and self._is_prompts_turn):
            self._is_prompts_turn = not self._is_prompts_turn
            prompts, layers = (prompts, 0) if self._is_prompts_turn else (0, layers)
        budget.bound(prompts, mixed_tokens(latency, budget.num_decoding) if can_fuse and prompts else 0)
        return layers

    def settled(self, layers: int | None, budget: StepBudget) -> int | None:
        """The same once it is known what the step starts: all pictures in flight may go through the tower together.

        None goes where prompts have taken the step, because before they did no picture was in sight.
        """
        latency, work = self.config.latency, self._gate.work_in_flight
        if not (latency and layers and work):
            return layers
        self._is_prompts_turn = budget.num_windows > 0
        return 0 if self._is_prompts_turn else split_spare_time(latency, budget.num_decoding, work).encode_layers

    def rides(self, windows: Sequence[ScheduledWindow], budget: StepBudget) -> bool:
        """Whether what a step computes beside its decodes, which run, goes along with the next ones."""
        latency, tokens = self.config.latency, sum(work.end - work.start for work in windows)
        if latency is None or not tokens or any(work.samples for work in windows):
            return False
        return mixed_is_faster(latency, budget.num_decoding, tokens)
