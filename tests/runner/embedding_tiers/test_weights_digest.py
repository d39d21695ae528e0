"""Which tensors encoding reads, and that their digest tells fine-tunes apart."""

from __future__ import annotations

from pathlib import Path

import torch

from saccade.models import load_model
from saccade.models.interface import VisionLanguageModel
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.runner.embedding_tiers.weights_digest import weights_digest
from saccade.runner.encoder.graph_capture import blank_patches


def loaded(folder: Path) -> VisionLanguageModel:
    checkpoint = open_checkpoint(str(folder))
    how = {"dtype": torch.float32, "device": torch.device("cpu"), "progress": False}
    return load_model(checkpoint.path, checkpoint.config, image_processor=checkpoint.image_processor, **how)


@torch.inference_mode()
def test_encoding_reads_no_tensor_that_the_digest_leaves_out(family_folder: Path) -> None:
    model = loaded(family_folder)
    processor = Processor(open_checkpoint(str(family_folder)), MediaPolicy.of(Options(max_pixels=20_000)))
    largest = processor.largest_item()
    processor.close()
    assert largest is not None
    weights = model.encoder_weights()
    kept = {own.untyped_storage().data_ptr() for own in weights.values()}
    everything = model.params.targets.values() if hasattr(model, "params") else model.model.parameters()
    others = [own for own in everything if own.untyped_storage().data_ptr() not in kept]
    assert weights and others
    for own in others:
        own.fill_(torch.nan)
    encoding = model.encode(blank_patches_of(model, largest.grid), [largest.grid])
    while True:
        try:
            next(encoding)
        except StopIteration as stop:
            assert not any(part.isnan().any() for part in stop.value)
            return


def blank_patches_of(model: VisionLanguageModel, grid: object) -> torch.Tensor:
    return torch.ones_like(blank_patches(model, [grid]))  # type: ignore[list-item]


def test_two_fine_tunes_of_one_shape_have_two_digests(llava_folder: Path) -> None:
    model = loaded(llava_folder)
    before = weights_digest(model.encoder_weights())
    assert before == weights_digest(loaded(llava_folder).encoder_weights())
    for name, own in model.encoder_weights().items():
        if own.numel() > 1:
            saved = own.flatten()[0].clone()
            own.view(-1)[0] += 1
            assert weights_digest(model.encoder_weights()) != before, name
            own.view(-1)[0] = saved
    assert weights_digest(model.encoder_weights()) == before


def test_a_fine_tune_of_the_decoder_alone_keeps_the_digest(llava_folder: Path) -> None:
    model = loaded(llava_folder)
    before = weights_digest(model.encoder_weights())
    model.decoder.table += 1
    assert weights_digest(model.encoder_weights()) == before


def test_equal_bytes_under_another_name_or_shape_are_other_weights() -> None:
    ones = torch.ones(2, 3)
    digests = [weights_digest({"a": ones}), weights_digest({"b": ones}), weights_digest({"a": ones.view(3, 2)})]
    digests.append(weights_digest({"a": ones.view(torch.int32)}))
    assert len(set(digests)) == 4
    assert weights_digest({"a": ones, "b": ones}) == weights_digest({"b": ones, "a": ones})
