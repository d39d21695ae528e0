"""An encoder worker's stage: the tower alone gives the bits of the whole model's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.runner.build_encoder import build_encoder, plan_encoder
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.weight_packing import pack_where_faster
from saccade.types.media import Key, MediaItem
from tests.helpers.families.families import FAMILIES
from tests.helpers.media.images import make_photo

OPTIONS = Options(device="cpu", dtype="float32", max_pixels=50_000, image_decode_threads=1)


def encoded(encoder: LocalEncoder, items: Sequence[MediaItem]) -> dict[Key, Tensor]:
    with torch.inference_mode():
        encoder.submit(items)
        encoder.advance(None)
        return encoder.poll().embeddings


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava_next", "mllama", "deepseek_vl"])
def test_a_worker_makes_the_bits_that_the_engine_makes(name: str, tmp_path: Path) -> None:
    """Also with deepstack vectors, tiles, keys and values for cross-attention, and through Transformers' code."""
    family = FAMILIES[name]
    folder = family.build(tmp_path)
    checkpoint = open_checkpoint(str(folder))
    processor = Processor(checkpoint, MediaPolicy.of(OPTIONS))
    photos = [make_photo(140, 84, seed=seed) for seed in range(3)]
    prompt = {"prompt": f"{family.image * 3}What?", "multi_modal_data": {"image": photos}}
    items = processor.from_prompt(prompt).items
    largest = processor.largest_item()
    assert largest is not None
    files = (folder, checkpoint.config, checkpoint.image_processor)
    plan = plan_encoder(OPTIONS, checkpoint.config, largest)
    worker, seconds = build_encoder(*files, OPTIONS, plan, largest, progress=False)
    whole = load_model(
        *files[:2],
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=False,
        image_processor=checkpoint.image_processor,
    )
    pack_where_faster(whole, plan.dtype, plan.device)
    engine = LocalEncoder(whole, plan.max_patches, 1)
    expected = encoded(engine, items)
    together = encoded(worker, items)
    assert seconds > 0 and worker.model.decoder.table.is_meta is not plan.is_whole
    for item in items:
        assert torch.equal(together[item.key], expected[item.key])
        assert torch.equal(encoded(worker, [item])[item.key], expected[item.key])  # packed or alone
    worker.close()
    engine.close()


def test_encoders_for_a_model_without_images_are_refused(tmp_path: Path) -> None:
    config = open_checkpoint(str(FAMILIES["qwen2_vl"].build(tmp_path))).config
    with pytest.raises(ConfigError, match="leave out --encoders"):
        plan_encoder(OPTIONS, config, None)


def test_a_decoder_that_is_left_out_loads_no_compiler() -> None:
    """Triton, too, would come with it, and prints at the end of its process."""
    code = (
        "import sys, torch\n"
        "from saccade.models import load_model\n"
        "from saccade.options.engine import Options\n"
        "from saccade.processor.checkpoint_files import open_checkpoint\n"
        "files = open_checkpoint(Options().model)\n"
        "how = dict(dtype=torch.float32, device=torch.device('cpu'), progress=False, is_encoder=True)\n"
        "load_model(files.path, files.config, image_processor=files.image_processor, **how)\n"
        "sys.exit(bool({'torch._dynamo', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
