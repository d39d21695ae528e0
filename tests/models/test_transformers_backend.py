"""Families that our table does not know. That the engine gives their tokens is proven with all others, in
`test_parity` and `test_invariance`; here is what is counted, and what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from saccade import LLM
from saccade.checkpoint.hf_processor import load_processor
from saccade.cli.count import count_files
from saccade.errors import ConfigError, RequestError
from saccade.models import load_model
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.processor.families.base import Family
from saccade.processor.families.fallback import Counts, Fallback
from saccade.types.media import Size
from tests.helpers.families import family_fallback
from tests.helpers.families.quantize import quantize
from tests.helpers.media.images import make_photo
from tests.helpers.servers.serving import chat_body, photo_part, running_server, text_part

pytestmark = pytest.mark.transformers

KINDS: dict[str, tuple[Callable[..., Path], str]] = {
    "idefics3": (family_fallback.idefics3, "<image>"),
    "internvl": (family_fallback.internvl, "<IMG_CONTEXT>"),
    "deepseek_vl": (family_fallback.deepseek_vl, "<image_placeholder>"),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    build, token = KINDS[request.param]
    return build(tmp_path_factory.mktemp(request.param)), token


def rules(folder: Path) -> Family:
    checkpoint = open_checkpoint(str(folder))
    return family_for(checkpoint.config).from_checkpoint(checkpoint)


def test_tokens_of_any_size_are_those_of_the_models_own_processor(kind: tuple[Path, str]) -> None:
    folder, token = kind
    family, processor = rules(folder), load_processor(folder, "any")

    @settings(max_examples=15, deadline=None)
    @given(st.integers(14, 400), st.integers(14, 400))
    def check(width: int, height: int) -> None:
        geometry = family.geometry(Size(width, height), *family.policy(None, None))
        made = processor(text=[token], images=[Image.new("RGB", (width, height))], add_special_tokens=False)
        assert list(family.expand(geometry).token_ids) == list(made["input_ids"][0])
        assert geometry.tokens == len(made["input_ids"][0]) >= geometry.slots > 0

    check()


def test_files_are_priced_from_the_small_files_alone(kind: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = kind
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    image = tmp_path / "photo.png"
    make_photo(120, 90).save(image)
    ((priced,), errors) = count_files([str(image)], Options(model=str(tmp_path)))
    assert not errors and priced.tokens == rules(folder).geometry(Size(120, 90), 0, 0).tokens


def test_the_largest_image_bounds_common_ones(kind: tuple[Path, str]) -> None:
    family = rules(kind[0])
    largest = family.largest(0, 0).slots
    assert all(family.geometry(Size(w, h), 0, 0).slots <= largest for w, h in ((640, 480), (333, 777), (1920, 1080)))


def test_a_image_too_large_to_count_is_refused_with_its_size(kind: tuple[Path, str]) -> None:
    with pytest.raises(RequestError, match="9000x9000 pixels, and at most 25000000"):
        rules(kind[0]).geometry(Size(9000, 9000), 0, 0)


def test_a_image_that_the_models_own_processor_chokes_on_is_refused_in_our_words_and_once(
    kind: tuple[Path, str],
) -> None:
    tried = []

    def chokes(size: Size) -> Any:
        tried.append(size)
        raise ZeroDivisionError("library text at 0x7f00")

    family = rules(kind[0])
    assert isinstance(family, Fallback)
    family = replace(family, count=Counts(chokes))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"takes no pictures of 64x48 pixels$"):
            family.geometry(Size(64, 48), 0, 0)
    assert tried == [Size(64, 48)]


def test_loading_warns_of_transformers_code(kind: tuple[Path, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "saccade.models"):
        LLM(str(kind[0]), max_model_len=256, kv_cache_gb=0.01, use_tqdm=False).close()
    assert "runs through Transformers' code up to its decoder, which is one of ours" in caplog.text


def test_dummy_weights_need_no_weight_files(kind: tuple[Path, str], tmp_path: Path) -> None:
    for file in kind[0].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    LLM(str(tmp_path), load_format="dummy", max_model_len=256, kv_cache_gb=0.01, use_tqdm=False).close()


@pytest.mark.parametrize("how", ["fp8-blocks", "gptq-order"])
def test_quantised_weights_are_dequantised_as_they_load(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = family_fallback.internvl(tmp_path / "plain")
    meant = quantize(source, tmp_path / "quantised", how)
    quantised = parameters(tmp_path / "quantised", caplog)
    assert f"{len(meant)} weights are stored as" in caplog.text and "are dequantised as they load" in caplog.text
    whole = {**load_file(source / "model.safetensors"), **meant}
    save_file(whole, source / "model.safetensors", {"format": "pt"})
    expected = parameters(source, caplog)
    assert len(meant) >= 7 and quantised.keys() == expected.keys()
    assert all(torch.allclose(quantised[name], expected[name], rtol=1e-6, atol=1e-7) for name in expected)


def parameters(folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, torch.Tensor]:
    config = open_checkpoint(str(folder)).config
    with caplog.at_level(logging.INFO, "saccade.models"):
        model: Any = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=256)
    return dict(model.model.named_parameters())


def test_a_tensor_that_the_checkpoint_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = family_fallback.internvl(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"'internvl' .*lacks 1 tensors \(.*layers\.1\.mlp\.up_proj\.weight\)"):
        parameters(folder, caplog)


def test_quantised_weights_that_its_config_does_not_mention_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = family_fallback.internvl(tmp_path / "plain")
    quantize(source, tmp_path / "quantised", "fp8-tensor")
    (tmp_path / "quantised" / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"says nothing of quantised weights \(.*_proj\.weight_scale"):
        parameters(tmp_path / "quantised", caplog)


def test_a_changed_answer_of_the_tower_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof before serving can fail: here our way of encoding is spoiled."""
    from saccade.models.bridge.images import ImageInputs

    whole = ImageInputs.rows
    monkeypatch.setattr(ImageInputs, "rows", lambda self, image: whole(self, image).flip(0))
    with pytest.raises(ConfigError, match="logits differ"):
        LLM(str(family_fallback.internvl(tmp_path)), max_model_len=256, kv_cache_gb=0.01, use_tqdm=False)


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_fallback.internvl(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"'internvl'.*pip install saccade\[transformers\]"):
        LLM(str(folder), use_tqdm=False)


def test_a_type_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    folder = family_fallback.internvl(tmp_path)
    config = (folder / "config.json").read_text().replace('"internvl"', '"nonesuch"')
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="'nonesuch' is not in our table"):
        LLM(str(folder), use_tqdm=False)


def test_a_server_answers_about_a_image(tmp_path: Path) -> None:
    with running_server(family_fallback.idefics3(tmp_path)) as server:
        body = chat_body([photo_part(120, 90), text_part("What is it?")], max_tokens=4, ignore_eos=True)
        answer = server.post("/v1/chat/completions", body).json()
        bill = server.post("/v1/bill", body).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == bill["prompt_tokens"]
