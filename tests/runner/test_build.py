"""What a runner is built of, as options say."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade import LLM
from tests.helpers.engine.async_engine import OPTIONS

pytestmark = pytest.mark.transformers


def test_flashinfer_may_be_asked_for_and_has_no_effect(two_layers: Path, caplog: pytest.LogCaptureFixture) -> None:
    LLM(str(two_layers), attention_backend="flashinfer", **OPTIONS)
    assert "attention_backend=flashinfer has no effect" in caplog.text
