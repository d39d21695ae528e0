"""Requests whose tokens are found in one pass of a device, and what of them stays the same from step to step.

In most steps nobody comes or goes, so a group is made anew only when somebody does. Knows no token and no block.
"""

from __future__ import annotations

import numpy as np

from saccade.runner.batch import RequestState
from saccade.runner.cuda.block_table import BlockTables


class DecodeBatch:
    """One row per request, in the order of `states`. `device_sampled` and `sampled` are rows that are not greedy."""

    def __init__(self, states: list[RequestState], tables: BlockTables) -> None:
        self.states = states
        self.ids = [state.request.request_id for state in states]
        self.rows = tables.rows(self.ids)  # int32 [size], of the block tables
        self.shifts = np.array([state.shift for state in states], np.int32)  # from places to rotary positions
        self.device_sampled = [i for i, state in enumerate(states) if state.samples_on_device and not state.is_greedy]
        self.sampled = [i for i, state in enumerate(states) if not state.samples_on_device]  # by the host, from logits
