"""What `benchmarks.gpu` prepares before a GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.gpu import MODELS, ROWS, interpreter
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_shapes import SHAPES, write_folder
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner.device_peaks import Peaks


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(SHAPES[request.param], tmp_path_factory.mktemp("shapes") / request.param)


def test_a_made_folder_opens_and_its_prompts_hold_one_image_token(folder: Path) -> None:
    config = open_checkpoint(str(folder), weights=False).config
    shape, tokenizer = SHAPES[folder.name], Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(shape.image).ids.count(config.image_token_id) == 1
    assert tokenizer.get_vocab_size() <= config.text.vocab_size


def test_every_row_has_a_floor_that_halves_when_the_device_is_twice_as_fast(folder: Path) -> None:
    slow, fast = (Floors(str(folder), Peaks(s * 4e12, s * 8e14)).rows() for s in (1, 2))
    assert set(slow) == set(ROWS)
    for row, title in ROWS.items():
        assert slow[row] == pytest.approx(fast[row] * (0.5 if "images/s" in title else 2))


def test_a_decode_step_reads_the_weights_and_the_context_of_every_request(folder: Path) -> None:
    floors = Floors(str(folder), Peaks(1e12, 1e18))
    one, two, three = (floors.decode(batch, 1000) for batch in (1, 2, 3))
    assert two - one == pytest.approx(three - two)
    assert one > 10 * (two - one)


def test_an_environment_is_asked_for_its_python(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert interpreter(str(tmp_path)) == str(python)
    assert interpreter("/usr/bin/python3.12") == "/usr/bin/python3.12"
