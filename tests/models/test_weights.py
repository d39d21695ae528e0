"""Loading: every layout, streaming, and an error a person can act on for each way a folder can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import checkpoints
from saccade.checkpoint.config import model_config
from saccade.errors import ConfigError
from saccade.models import load_model, tensor_files
from saccade.models.interface import VisionLanguageModel
from saccade.models.tensor_files import TensorFiles
from saccade.models.weights import Rule, fill_random, load_weights, under

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(folder: Path, **kwargs: Any) -> VisionLanguageModel:
    config = model_config(json.loads((folder / "config.json").read_text()))
    return load_model(folder, config, **{"dtype": torch.float32, "device": CPU, "progress": False, **kwargs})


def edit(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def targets_of(model: VisionLanguageModel) -> Tensors:
    found: Tensors = model.params.targets  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("family", [checkpoints.qwen2_vl, checkpoints.llava], ids=["qwen2_vl", "llava"])
def test_shards_load_like_a_single_file(tmp_path: Path, family: Callable[..., Path]) -> None:
    single = targets_of(load(family(tmp_path / "single")))
    folder = family(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = targets_of(load(folder))
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_a_file_that_is_closed_while_it_is_read_loads_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.qwen2_vl(tmp_path)
    expected = targets_of(load(folder))
    monkeypatch.setattr(tensor_files, "_MAPPED", 0)
    found = targets_of(load(folder))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", [checkpoints.qwen2_vl, checkpoints.llava], ids=["qwen2_vl", "llava"])
def test_both_layouts_load_the_same_weights(tmp_path: Path, family: Callable[..., Path]) -> None:
    saved = targets_of(load(family(tmp_path / "saved")))
    published = targets_of(load(family(tmp_path / "published", layout="published")))
    assert all(torch.equal(saved[name], published[name]) for name in saved)


NEWER_NAMES = {
    "visual.": "model.visual.",
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "model.": "model.language_model.",
}


@pytest.mark.parametrize("layout", ["saved", "published"])
@pytest.mark.parametrize("family", [checkpoints.qwen2_vl, checkpoints.llava], ids=["qwen2_vl", "llava"])
def test_names_with_the_parts_below_model_load_too(tmp_path: Path, family: Callable[..., Path], layout: str) -> None:
    """Transformers keeps its modules in this order; some of its versions also save the names like that."""

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            old, new = next(pair for pair in NEWER_NAMES.items() if name.startswith(pair[0]))
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    before = targets_of(load(family(tmp_path, layout=layout)))
    after = targets_of(load(edit(tmp_path, rename)))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_are_converted_on_the_way(tmp_path: Path) -> None:
    model = load(checkpoints.qwen2_vl(tmp_path), dtype=torch.bfloat16)
    assert {t.dtype for t in targets_of(model).values()} == {torch.bfloat16}


def test_known_leftovers_are_not_an_error(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]

    load(edit(checkpoints.llava(tmp_path, layout="published"), add))


def test_a_tied_head_that_is_stored_too_is_not_an_error(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(edit(checkpoints.qwen2_vl(tmp_path), add))


def test_clip_layers_behind_the_features_are_not_loaded(tmp_path: Path) -> None:
    names = targets_of(load(checkpoints.llava(tmp_path)))
    assert "vision.blocks.2.up.weight" in names
    assert not any(name.startswith("vision.blocks.3.") for name in names)


def test_a_progress_bar_counts_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(checkpoints.llava(tmp_path), progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err


# --- folders that are wrong ---------------------------------------------------------------------------------------


def test_missing_tensors_are_named_as_the_checkpoint_names_its_own(tmp_path: Path) -> None:
    folder = checkpoints.qwen2_vl(tmp_path, layout="published")
    edit(folder, lambda t: [t.pop("model.layers.1.mlp.up_proj.weight"), t.pop("visual.blocks.0.attn.qkv.bias")])
    with pytest.raises(ConfigError, match=r"lacks 2 tensors .*model\.layers\.1\.mlp\.up_proj\.weight, visual\.blocks"):
        load(folder)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    edit(folder, lambda t: t.update({"model.language_model.layers.7.input_layernorm.weight": torch.ones(64)}))
    with pytest.raises(ConfigError, match=r"1 tensors .*no place for .*layers\.7\.input_layernorm"):
        load(folder)


def test_a_tensor_under_two_names_is_an_error(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": t["language_model.lm_head.weight"].clone()}))
    with pytest.raises(ConfigError, match=r"1 tensors under two names \(.*lm_head\.weight and .*lm_head\.weight\)"):
        load(folder)


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    edit(folder, lambda t: t.update({f"extra.{i}": torch.ones(1) for i in range(9)}))
    with pytest.raises(ConfigError, match=r"9 tensors .*extra\.4, \.\.\.\)"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    edit(folder, lambda t: t.update({"language_model.lm_head.weight": torch.ones(3, 64)}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight in model\.safetensors has the shape \[3, 64\], .*, 64\]"):
        load(folder)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=rf"lacks 1 of the {len(shards)} weight files .*{shards[1].name}.*incomplete"):
        load(folder)


def test_a_broken_index_is_an_error(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path, max_shard_size="100KB")
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json is not a readable list"):
        load(folder)


def test_a_cut_off_file_is_an_error(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="damaged or half-downloaded"):
        load(folder)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.llava(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \.safetensors file; pytorch_model\.bin cannot be read"):
        load(folder)


# --- rules --------------------------------------------------------------------------------------------------------


def test_a_rule_carries_layer_number_and_kind_over(tmp_path: Path) -> None:
    save_file({"old.layers.12.fc.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    target = torch.zeros(2)
    rules = under([Rule("layers.{}.fc.*", "blocks.{}.up.*")], ("new.", "old."), "tower.")
    load_weights(TensorFiles(tmp_path), {"tower.blocks.12.up.bias": target}, rules, progress=False)
    assert target.tolist() == [1, 1]


# --- random weights -----------------------------------------------------------------------------------------------


def test_dummy_weights_repeat_with_their_seed(tmp_path: Path) -> None:
    folder = checkpoints.qwen2_vl(tmp_path)
    first, again, other = (targets_of(load(folder, load_format="dummy", seed=s)) for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["decoder.embed.weight"], other["decoder.embed.weight"])


def test_dummy_weights_keep_the_scale_of_what_they_multiply() -> None:
    weight, norm, bias = torch.empty(400, 900), torch.empty(5), torch.empty(5)
    fill_random({"a.weight": weight, "norm.weight": norm, "norm.bias": bias}, seed=0)
    assert (torch.randn(300, 900) @ weight.T).std().item() == pytest.approx(1, abs=0.05)
    assert norm.tolist() == [1] * 5
    assert bias.tolist() == [0] * 5


# --- memory -------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys
from pathlib import Path
import torch
from saccade.checkpoint.config import model_config
from saccade.models import load_model, tensor_files
folder = Path(sys.argv[1])
config = model_config(json.loads((folder / "config.json").read_text()))
arguments = dict(dtype=torch.float32, device=torch.device("cpu"), progress=False)
load_model(Path(sys.argv[2]), model_config(json.loads((Path(sys.argv[2]) / "config.json").read_text())), **arguments)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(folder, config, **arguments)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_loading_needs_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """A small checkpoint is loaded first, so that only the weights of the large one count."""
    small = checkpoints.qwen2_vl(tmp_path / "small")
    text = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4000}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}}
    large = checkpoints.qwen2_vl(tmp_path / "large", text={**text, **rope})
    weights = (large / "model.safetensors").stat().st_size
    assert weights > 190e6
    run = subprocess.run([sys.executable, "-c", MEASURE, large, small], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1.2 * weights
