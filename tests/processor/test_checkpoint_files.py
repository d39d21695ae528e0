"""Opening folders: both layouts, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from benchmarks import checkpoints
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint

pytestmark = pytest.mark.transformers


@pytest.fixture
def folder(tmp_path: Path, qwen2_vl_folder: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(qwen2_vl_folder, tmp_path / "copy"))


@pytest.fixture(scope="session", params=["saved", "published"])
def llava_layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llava(tmp_path_factory.mktemp("llava"), layout=request.param)


def refusal(model: str | Path, **how: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(model), **how)
    return str(caught.value)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_both_layouts_say_the_same(llava_layout: Path) -> None:
    checkpoint = open_checkpoint(str(llava_layout))
    assert checkpoint.config.model_type == "llava"
    assert checkpoint.image_processor["crop_size"] == {"height": 56, "width": 56}
    assert checkpoint.processor["num_additional_image_tokens"] == 1
    assert "image_processor" not in checkpoint.processor
    assert checkpoint.tokenizer_config["bos_token"] == "<s>"
    assert checkpoint.chat_template == checkpoints.LLAVA_TEMPLATE


def test_end_tokens_come_from_the_generation_config(qwen2_vl_folder: Path) -> None:
    named = json.loads((qwen2_vl_folder / "generation_config.json").read_text())["eos_token_id"]
    assert open_checkpoint(str(qwen2_vl_folder)).config.eos_token_ids == frozenset(named)


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_a_chat_template_may_be_in_a_json_file(folder: Path, name: str) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / name).write_text(json.dumps({"chat_template": "hello"}))
    assert open_checkpoint(str(folder)).chat_template == "hello"


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(str(folder)).chat_template == "b"


def test_a_folder_without_a_template_opens(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert open_checkpoint(str(folder)).chat_template is None


# --- fingerprint --------------------------------------------------------------------------------------------------


def test_equal_folders_have_equal_fingerprints(folder: Path, qwen2_vl_folder: Path) -> None:
    assert open_checkpoint(str(folder)).fingerprint == open_checkpoint(str(qwen2_vl_folder)).fingerprint


def test_a_changed_setting_changes_the_fingerprint(folder: Path, qwen2_vl_folder: Path) -> None:
    edit(folder / "processor_config.json", note=1)
    assert open_checkpoint(str(folder)).fingerprint != open_checkpoint(str(qwen2_vl_folder)).fingerprint


def test_another_weight_file_changes_the_fingerprint(folder: Path, qwen2_vl_folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    assert open_checkpoint(str(folder)).fingerprint != open_checkpoint(str(qwen2_vl_folder)).fingerprint


def test_a_folder_without_weights_has_a_fingerprint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert len(open_checkpoint(str(folder), weights=False).fingerprint) == 32


def test_weights_are_not_read_whole(folder: Path) -> None:
    with (folder / "huge.safetensors").open("wb") as stream:
        stream.write((2).to_bytes(8, "little") + b"{}")
        stream.truncate(1 << 36)
    assert open_checkpoint(str(folder)).fingerprint


# --- wrong folders ------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_is_named() -> None:
    assert "/nowhere/model" in refusal("/nowhere/model")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file" in refusal(folder / "config.json")


def test_a_folder_without_config_is_no_checkpoint(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize("content", ["{broken", "[1]", ""])
def test_broken_json_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder) and "download it again" in refusal(folder)


def test_missing_shards_are_counted_and_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 of 3 weight files are missing" in refusal(folder) and "model-1.safetensors" in refusal(folder)
    assert open_checkpoint(str(folder), weights=False)


def test_a_download_that_was_cut_off_is_noticed(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.incomplete").touch()
    assert "half-downloaded" in refusal(folder)


def test_a_model_type_that_nobody_knows_is_refused_by_name(folder: Path) -> None:
    edit(folder / "config.json", model_type="mystery")
    assert "'mystery' is not in our table and cannot be served through Transformers" in refusal(folder)


# --- the hub ------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_without_weights_when_none_are_wanted(folder: Path, monkeypatch: Any) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str], local_files_only: bool, **where: Any) -> str:
        assert where == {"revision": None, "cache_dir": None}
        asked.append((name, "*.safetensors" in allow_patterns, local_files_only))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint("owner/name", weights=False)
    assert open_checkpoint("owner/name").path == folder
    open_checkpoint("owner/name", weights=False, is_local=True)
    assert asked == [("owner/name", False, False), ("owner/name", True, False), ("owner/name", False, True)]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: Any) -> None:
    def download(name: str, **how: Any) -> str:
        raise LocalEntryNotFoundError("a long story\nover several lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = refusal("owner/name")
    assert "owner/name" in message and "HF_TOKEN" in message and "\n" not in message


def test_a_revision_a_folder_for_downloads_and_another_tokenizer_reach_the_hub(folder: Path, monkeypatch: Any) -> None:
    asked = []

    def download(name: str, revision: str, cache_dir: str, **how: Any) -> str:
        asked.append((name, revision, cache_dir))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = Options(revision="v1", download_dir="cache", tokenizer="owner/words", tokenizer_revision="v2")
    open_checkpoint("owner/name", options=options)
    open_checkpoint("owner/name", options=Options(tokenizer_revision="v2"))
    assert asked == [
        ("owner/name", "v1", "cache"),
        ("owner/words", "v2", "cache"),
        ("owner/name", None, None),
        ("owner/name", "v2", None),
    ]


def test_another_tokenizer_brings_its_files_and_its_template(folder: Path, qwen2_vl_folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("words")
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    opened = open_checkpoint(str(qwen2_vl_folder), options=Options(tokenizer=str(folder)))
    assert opened.path == qwen2_vl_folder and opened.tokenizer_path == folder
    assert opened.chat_template == "words" and opened.tokenizer_config["eos_token"] == "<|endoftext|>"
    (folder / "chat_template.jinja").unlink()
    own = open_checkpoint(str(qwen2_vl_folder)).chat_template
    assert open_checkpoint(str(qwen2_vl_folder), options=Options(tokenizer=str(folder))).chat_template == own


def test_a_chat_template_is_a_file_or_a_text(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("from a file")
    assert open_checkpoint(str(folder), options=Options(chat_template=str(file))).chat_template == "from a file"
    assert open_checkpoint(str(folder), options=Options(chat_template="{{ x }}")).chat_template == "{{ x }}"
    assert "is no file" in refusal(folder, options=Options(chat_template="nowhere.jinja"))
    assert "empty" in refusal(folder, options=Options(chat_template=" "))
    assert "characters; at most" in refusal(folder, options=Options(chat_template="{" * (1 << 21)))


def test_overrides_replace_values_of_the_config_and_change_the_identity(folder: Path) -> None:
    plain = open_checkpoint(str(folder))
    changes = {"vision_config": {"depth": 1}, "rope_theta": 5e5}
    changed = open_checkpoint(str(folder), options=Options(hf_overrides=changes))
    assert plain.config.vision is not None and changed.config.vision is not None
    assert changed.config.vision.num_layers == 1 != plain.config.vision.num_layers
    assert changed.config.vision.hidden_size == plain.config.vision.hidden_size
    assert changed.fingerprint != plain.fingerprint
    assert "hidden_size" in refusal(folder, options=Options(hf_overrides={"hidden_size": "wide", "text_config": None}))


def test_overrides_of_a_family_that_transformers_reads_are_refused(folder: Path) -> None:
    edit(folder / "config.json", model_type="nobody_knows")
    assert "Transformers reads the files" in refusal(folder, options=Options(hf_overrides={"a": 1}))
