"""Layouts that were published for remote code: the same answers as Transformers' class on the same weights."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from saccade import LLM, SamplingParams
from saccade.checkpoint.hf_processor import auto_config
from saccade.checkpoint.layout_table import LAYOUTS, NOT_READ
from saccade.checkpoint.layouts import in_words
from saccade.errors import ConfigError
from saccade.models.bridge.published import weights_of
from saccade.models.tensor_files import TensorFiles
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import built_in_template
from saccade.processor.template import render
from tests.helpers.conformance.modes import SIZES, prompts_of
from tests.helpers.conformance.theirs import Prompt
from tests.helpers.families.layouts import PUBLISHED, Published
from tests.helpers.families.zoo import stand_in_torchvision
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

TOKENS = 8
ASKED = ("picture", "text around", "text", "two pictures", "wide", "large")
A_FEW = {  # one of each kind; all are in `make conformance`
    "internvl 2.5, InternLM2": "weights of several parts",
    "intern_s2": "a family of ours",
    "nemotron_v2": "tiles as patches",
}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def _case(name: str) -> object:
    return name if name in A_FEW else pytest.param(name, marks=pytest.mark.conformance)


@pytest.mark.parametrize("name", [_case(name) for name in PUBLISHED])
def test_a_published_layout_answers_as_transformers_class_does(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    with stand_in_torchvision.provided(), published.shrunk():
        _compare(published, tmp_path)


def _compare(published: Published, tmp_path: Path) -> None:
    original = published.original(tmp_path / "original")
    folder = published.write(original, tmp_path / "published")
    theirs = published.theirs(original)
    prompts = [prompt for prompt in prompts_of(Entry(published.original, published.image)) if prompt.name in ASKED]
    if published.large is not None:
        prompts = [*prompts[:3], Prompt("tiles", f"{published.image} Read.", make_photo(*published.large))]
    bias = dict.fromkeys(theirs.banned, -100.0)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logit_bias=bias)
    with LLM(str(folder), **SIZES) as llm:
        ours = [{"prompt": p.text, "multi_modal_data": {"image": p.images or None}} for p in prompts]
        outs = llm.generate(ours, sampling)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.prompt_token_ids == theirs.inputs(prompt)["input_ids"][0].tolist(), prompt.name
        assert out.outputs[0].token_ids == theirs.greedy(prompt, TOKENS), prompt.name


@pytest.fixture
def internvl(tmp_path: Path) -> Path:
    published = PUBLISHED["internvl 3.5"]
    return published.write(published.original(tmp_path / "original"), tmp_path / "published")


def test_a_template_that_takes_texts_alone_has_pictures_in_them(internvl: Path) -> None:
    file = internvl / "tokenizer_config.json"
    template = "{% for message in messages %}<|im_start|>{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    photo = make_photo(60, 50)
    question = [{"type": "image", "image": photo}, {"type": "text", "text": "What is it?"}]
    with LLM(str(internvl), **SIZES) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=1)
        chat = llm.chat([{"role": "user", "content": question}], sampling)[0]
        written = "<|im_start|><IMG_CONTEXT>\nWhat is it?<|im_end|>\n"
        plain = llm.generate([{"prompt": written, "multi_modal_data": {"image": photo}}], sampling)[0]
        assert chat.prompt_token_ids == plain.prompt_token_ids


def _changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """What the start says of a config.json that was changed."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        open_checkpoint(str(folder))
    return str(error.value)


def test_what_a_layout_has_otherwise_is_refused_with_its_value(internvl: Path) -> None:
    said = _changed(internvl, lambda config: config.update(ps_version="v1"))
    assert said == "config.json: ps_version is 'v1', and only 'v2' is supported for the architecture InternVLChatModel"
    said = _changed(internvl, lambda config: config.update(ps_version="v2") or config.pop("llm_config"))
    assert said == (
        "config.json is not of the layout that InternVLChatModel has ('llm_config' is missing or of another type);"
        " download it again"
    )
    said = _changed(internvl, lambda config: config.update(llm_config={"model_type": "qwen9"}))
    assert "model_type 'internvl' is not in our table" in said and "\n" not in said


def test_a_vocabulary_without_the_token_of_pictures_is_refused(internvl: Path) -> None:
    file = internvl / "tokenizer.json"
    file.write_text(file.read_text().replace("<IMG_CONTEXT>", "<OTHER>"))
    with pytest.raises(ConfigError, match=r"has no token '<IMG_CONTEXT>', which stands for a picture"):
        open_checkpoint(str(internvl))


@pytest.mark.parametrize("architecture", NOT_READ)
def test_remote_code_without_a_class_is_refused_with_its_reason(architecture: str, tmp_path: Path) -> None:
    remote = {"AutoModel": "modeling.Model"}
    config = {"architectures": [architecture], "model_type": architecture, "auto_map": remote}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        open_checkpoint(str(tmp_path), weights=False)
    reason = f"code that comes with a checkpoint is never run, and {NOT_READ[architecture]}"
    assert reason in str(error.value)


def test_deepseek_ocr_2_becomes_the_config_of_its_class(tmp_path: Path) -> None:
    """As published. Its fixed sizes are too large for a small checkpoint."""
    published = PUBLISHED["deepseek_ocr"]
    with stand_in_torchvision.provided():
        folder = published.write(published.original(tmp_path / "original"), tmp_path / "published")
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = ["DeepseekOCR2ForCausalLM"]
    raw["vision_config"]["width"]["qwen2-0-5b"] = {"dim": 896}
    (folder / "config.json").write_text(json.dumps(raw))
    config = auto_config(folder)
    assert config.model_type == "deepseek_ocr2" and config.image_token_id == in_words(raw, folder)["image_token_id"]
    assert config.text_config.mlp_layer_types == ["dense", "sparse"] and config.text_config.n_routed_experts == 4
    encoder, sam = config.vision_config.encoder_config, config.vision_config.sam_config
    assert (encoder.hidden_size, encoder.num_hidden_layers, encoder.num_key_value_heads) == (896, 24, 2)
    assert sam.downsample_channels == [512, 896] and sam.hidden_size == 32


def test_a_reader_without_a_template_is_asked_by_the_text_alone() -> None:
    config = Namespace(model_type="unlimited_ocr", raw={})
    parts = [{"type": "image"}, {"type": "text", "text": "Free OCR."}]
    said = render(built_in_template(config), [{"role": "user", "content": parts}], bos_token="<s>")
    assert said == "<s><image>\nFree OCR."


def test_the_adapter_for_pictures_is_added_and_no_other(tmp_path: Path) -> None:
    base, first, second = torch.randn(6, 4), torch.randn(2, 4), torch.randn(6, 2)
    stem = "model.layers.0.mlp.down_proj"
    weights = {f"{stem}.base_layer.weight": base, "model.norm.weight": torch.ones(4)}
    weights |= {f"{stem}.lora_A.vision.weight": first, f"{stem}.lora_B.vision.weight": second}
    weights |= {f"{stem}.lora_A.speech.weight": first + 1, f"{stem}.lora_B.speech.weight": second + 1}
    save_file(weights, tmp_path / "model.safetensors")
    raw = {"vision_lora": {"lora_alpha": 6, "r": 2}}
    found = weights_of(TensorFiles(tmp_path), LAYOUTS["Phi4MMForCausalLM"], raw, torch.float32)
    assert found.keys() == {f"{stem}.weight", "model.norm.weight"}
    torch.testing.assert_close(found[f"{stem}.weight"], base + 3 * second @ first)


def test_the_page_says_of_every_layout_how_it_is_served() -> None:
    _, _, section = PAGE.read_text().partition("**Layouts of remote code.**")
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    served = {name: row[1] for row in rows for name in row[0].split("`")[1::2]}
    assert served.keys() == LAYOUTS.keys() | NOT_READ.keys()
    for name, reason in NOT_READ.items():
        assert served[name] == f"refused: {reason}"
    for name, published in PUBLISHED.items():
        assert f"`{name.partition(',')[0]}`" in section, published.image
