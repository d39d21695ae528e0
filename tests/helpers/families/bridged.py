"""Models that run through Transformers' code, with its layers although their decoder is one of our kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from saccade.models.bridge import load


@contextmanager
def transformers_layers() -> Iterator[None]:
    with mock.patch.object(load, "use_own_decoder", lambda *_: "not asked for"):
        yield
