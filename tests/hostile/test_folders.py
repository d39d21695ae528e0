"""Checkpoint folders made to hurt whoever opens them: one sentence that names the file, and nothing else is opened."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from saccade import LLM
from saccade.checkpoint.files import SETTINGS_BYTES, TEMPLATE_BYTES, links_out
from saccade.checkpoint.hf_processor import load_processor
from saccade.checkpoint.schema import CONFIG, first_wrong
from saccade.checkpoint.tokenizer_json import read_tokenizer
from saccade.errors import ConfigError
from saccade.models.tensor_files import TensorFiles
from saccade.models.weights import load_weights
from saccade.processor import checkpoint_files as checkpoint_module
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.tokenizer import Tokenizer
from saccade.server.service import _name_of
from tests.helpers.media.prompts import make

pytestmark = pytest.mark.transformers

INDEX = "model.safetensors.index.json"
DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000
JUST_TOO_DEEP = '{"model_type": ' + "[" * 64 + "]" * 64 + "}"


@pytest.fixture
def folder(qwen2_vl_folder: Path, tmp_path: Path) -> Path:
    """A whole checkpoint to spoil."""
    target = tmp_path / "checkpoint"
    shutil.copytree(qwen2_vl_folder, target)
    return target


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        make(folder)
    return str(caught.value)


def edit(file: Path, **values: Any) -> None:
    whole = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**whole, **values}))


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\\b", "a\0b", "x" * 300, 3, ["a"], None]
)
def test_a_weight_file_outside_of_the_folder_is_never_looked_for(folder: Path, name: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert INDEX in refusal(folder)
    with pytest.raises(ConfigError, match=INDEX):  # as the engine's process reads it
        load_weights(TensorFiles(folder), {}, (), progress=False)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', DEEP])
def test_an_index_that_is_no_list_of_files_is_named(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert "not a readable list of weight files" in refusal(folder)


def test_names_that_another_library_would_open_are_checked_first(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", fast_tokenizer_files=["../../tokenizer.4.0.json"])
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json names the file '\.\./\.\./tokenizer"):
        load_processor(folder, "anything")


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    edit(folder / "config.json", model_type="nobody_knows_it", auto_map={"AutoConfig": "code.Mine"})
    with pytest.raises(ConfigError, match="nobody_knows_it"):
        open_checkpoint(str(folder))
    load_processor(folder, "nobody_knows_it")
    assert not asked and not (tmp_path / "ran").exists()


# --- links --------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert make(snapshot).checkpoint.chat_template
    assert links_out(snapshot) == []


def test_links_of_the_operator_are_followed_and_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to("loop")
    open_checkpoint(str(folder))
    assert "has links that lead out of it: model.safetensors" in caplog.text


# --- JSON ---------------------------------------------------------------------------------------------------------

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
)


@pytest.mark.parametrize("content", [DEEP, JUST_TOO_DEEP, "[" * 100_000], ids=["deep", "just too deep", "cut off"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_nested_too_deeply_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    said = refusal(folder)
    assert name in said and len(said) < 500


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.json"])
def test_a_file_of_settings_has_a_size(folder: Path, name: str) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / name).write_text("{" + " " * SETTINGS_BYTES + "}")
    assert f"{name} has {SETTINGS_BYTES + 2} bytes, and at most {SETTINGS_BYTES} are read" in refusal(folder)


def test_a_template_has_a_size_wherever_it_is(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x" * (TEMPLATE_BYTES + 1))
    assert "chat_template.jinja has" in refusal(folder)
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template="x" * (TEMPLATE_BYTES + 1))
    assert "has a chat template of" in refusal(folder)


@pytest.mark.parametrize("given", [[3, {}, {"name": "default"}, {"name": ["default"]}], {"default": "x"}, 3])
def test_templates_that_are_no_text_are_none(folder: Path, given: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=given)
    assert open_checkpoint(str(folder)).chat_template is None


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"{", b"3", b"\x00", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_file_that_is_no_json_is_named(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    assert "generation_config.json" in refusal(folder)


def test_folders_and_pipes_with_the_names_of_files_are_left_alone(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")
    (folder / "other.json").mkdir()
    (folder / "other.safetensors").mkdir()
    opened = threading.Event()
    threading.Thread(target=lambda: (open_checkpoint(str(folder)), opened.set()), daemon=True).start()
    assert opened.wait(120)  # a pipe that is opened is waited for


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "hidden_size"])
def test_numbers_that_no_float_holds_are_refused(name: str, value: float) -> None:
    assert f"{name} is " in (first_wrong({name: value}, CONFIG) or "")


def test_lists_have_a_length() -> None:
    said = first_wrong({"image_grid_pinpoints": [[336, 336]] * 100_000}, CONFIG)
    assert said is not None and said.endswith("with at most 4096 values, not 100000")


def test_a_model_that_no_memory_holds_is_refused_before_any_is_taken(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    huge = {"hidden_size": 1 << 24, "head_dim": 64, "num_hidden_layers": 4096}
    edit(folder / "config.json", **huge, text_config={**raw.get("text_config", {}), **huge})
    with pytest.raises(ConfigError, match=r"config\.json describes needs [\d.]+ GiB more than are free"):
        LLM(str(folder), device="cpu", kv_cache_gb=0.01, use_tqdm=False)


def test_thousands_of_layers_that_no_file_has_are_refused_at_once(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    many = {"num_hidden_layers": 1000}
    edit(folder / "config.json", **many, text_config={**raw.get("text_config", {}), **many})
    with pytest.raises(ConfigError, match=r"lacks \d{5} tensors that config.json asks for \(model.*, \.\.\.\)"):
        LLM(str(folder), device="cpu", kv_cache_gb=0.01, use_tqdm=False)


def test_the_header_of_a_weight_file_is_read_as_far_as_its_format_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(checkpoint_module.files, "HEADER_BYTES", 1 << 20)
    plain = checkpoint_module._safetensors_header
    monkeypatch.setattr(checkpoint_module, "_safetensors_header", lambda file: read.append(len(plain(file))) or b"")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write((1 << 60).to_bytes(8, "little"))
        stream.truncate(1 << 32)  # sparse: it takes no room
    open_checkpoint(str(folder))
    assert read == [1 << 20]


# --- tokenizers ---------------------------------------------------------------------------------------------------

SPOILED: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "a normalizer at which the library panics": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    },
    "a frame of unknown tokens, at which it panics with the first text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "added tokens that are none": {"added_tokens": [3]},
    "an expression that cannot be compiled": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_tokenizer_that_cannot_work_is_named(folder: Path, name: str) -> None:
    edit(folder / "tokenizer.json", **SPOILED[name])
    assert "tokenizer.json cannot be read as a tokenizer" in refusal(folder)


def test_a_tokenizer_may_have_no_added_tokens(tmp_path: Path) -> None:
    spec = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).to_str())
    del spec["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(tmp_path).encode_template("a") == [0]


def test_a_token_of_a_list_of_ranks_has_a_length(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text("YWFh" * 1000 + " 0\n")
    with pytest.raises(ConfigError, match="has a token of 3000 bytes; at most 1024"):
        read_tokenizer(tmp_path)


# --- the name that clients see ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "owner/name"])
def test_a_model_that_is_no_folder_keeps_its_name(model: str | None) -> None:
    assert _name_of(model) == (model or "saccade-builtin")


def test_a_folder_is_known_by_its_last_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _name_of(str(folder)) == "checkpoint"
    monkeypatch.chdir(folder)
    assert _name_of(".") == "checkpoint"
    assert _name_of("/") == "model"
