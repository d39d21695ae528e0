"""Where a model's thinking begins and ends, by the markers that its chat template knows."""

from __future__ import annotations

from typing import NamedTuple

from saccade.types.request import Thinking


class ThinkingDialect(NamedTuple):
    open: str
    close: str
    label: str = ""  # a word after the opening marker that is no part of the text
    always: bool = False  # outputs begin with thinking, even where neither prompt nor output says so

    def after(self, prompt: str) -> Thinking | None:
        """What an output may begin with, by the end of its rendered prompt. None: no thinking.

        Templates write the opening marker themselves, or both markers for a model that is not to think.
        """
        end = prompt.rstrip().removesuffix(self.label).rstrip()
        if end.endswith(self.close):
            return None
        return Thinking(self.open, self.close, is_open=self.always or end.endswith(self.open))
