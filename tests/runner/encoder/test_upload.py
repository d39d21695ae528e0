"""What goes to the device. CUDA's streams are stood in for: order and locks are what counts here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from saccade.runner.encoder.upload import PixelUpload
from saccade.types.media import Geometry, Grid, Size


class NoEvent:
    def __init__(self, **_: Any) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def test_pictures_that_the_host_prepares_are_prepared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.Event", NoEvent)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    both = Barrier(2)

    class OnHost:
        def prepare_on_host(self, image: Any, size: Any, clip: Any = None) -> torch.Tensor:
            both.wait(timeout=20)  # under the upload's lock the second would never come
            return torch.from_numpy(image).flatten()

    upload: Any = PixelUpload(OnHost(), torch.device("cpu"))  # type: ignore[arg-type]
    geometry = Geometry(Size(2, 2), Grid(1, 1, 1), 1, 1)
    images = [np.full((2, 2, 3), value, np.uint8) for value in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda image: upload(image, geometry), images))
    assert [part.tolist() for part in made] == [[1] * 12, [2] * 12]
