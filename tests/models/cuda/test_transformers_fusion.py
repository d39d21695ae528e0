"""Our kernels inside the layers of Transformers' text models, against the same layers without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from saccade.kernels.gemm.skinny import MAX_ROWS, SplitWorkspace
from saccade.models import load_model
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_gates import check_gates
from saccade.models.bridge.own_modules import modules_of
from saccade.models.bridge.stored import Stored
from saccade.models.bridge.stored_load import quantize_layers
from saccade.models.cuda import transformers_fusion
from saccade.models.cuda.transformers_decoder import TransformersDecoder, _whole
from saccade.models.cuda.transformers_fusion import Fusion
from saccade.models.fp8_weights import Fp8Weights
from saccade.models.int4_weights import Int4Format, Int4Weights
from saccade.models.layers.torch_attention import PagedKV
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.families import family_fallback
from tests.helpers.families.bridged import transformers_layers

pytestmark = pytest.mark.transformers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ALL = "MLPs 1 of 1, RMS norms 3 of 3, RoPE 1 of 1, q/k/v 1 of 1"
FUSED = {
    "Qwen2": ALL,  # biases
    "Llama": ALL,
    "Gemma": ALL,  # 1 + weight, GELU
    "Phi3": ALL.removesuffix(", q/k/v 1 of 1"),  # one projection already
    "Qwen3": ALL.replace("3 of 3", "5 of 5"),  # norms of heads
    "Gemma3Text": ALL.replace("3 of 3", "7 of 7"),  # the same after a transpose, and of what is added
    "Cohere2": "MLPs 1 of 1, RoPE 1 of 1, q/k/v 1 of 1",  # neighbours rotate as a pair; layer norms
    "Glm4": ALL.replace("3 of 3", "5 of 5"),  # so here, with angles side by side as for halves
    "Mixtral": "RMS norms 3 of 3, RoPE 1 of 1, experts 1 of 1, q/k/v 1 of 1",
    "AriaText": ALL.replace(", q/k/v", ", experts 1 of 1, q/k/v"),  # transposed experts beside a shared one
    # GELU, one tensor at a time rotated, values normed, too, without a weight; experts beside the MLP
    "Gemma4Text": "MLPs 1 of 1, RMS norms 12 of 12, RoPE 1 of 1, experts 1 of 1, q/k/v 1 of 1",
}
MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "AriaText": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "Gemma4Text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    | {"layer_types": ["sliding_attention"], "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 50},
}


def text_model(name: str, dtype: torch.dtype, **shape: int) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **MORE.get(name, {}), **shape})
    kind = name.removesuffix("Text") + "TextModel" if name.endswith("Text") else f"{name}Model"
    model = getattr(transformers, kind)(config).eval()
    for param in model.parameters():
        param.data.add_(torch.randn_like(param), alpha=0.1)
    return model.to(DEVICE, dtype)


def fusion_of(model: nn.Module) -> Fusion:
    return Fusion(model, SplitWorkspace.allocate(MAX_ROWS, DEVICE))


def rows(*shape: int, dtype: torch.dtype, seed: int = 0, width: int = 64) -> Tensor:
    return torch.randn(*shape, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def outputs(model: Any, requests: int, dtype: torch.dtype, width: int = 64) -> Tensor:
    """Of prompts of five tokens, and of one token after them."""
    prompts = model(inputs_embeds=rows(requests, 5, dtype=dtype, width=width), use_cache=True)
    more = model(
        inputs_embeds=rows(requests, 1, dtype=dtype, seed=1, width=width), past_key_values=prompts.past_key_values
    )
    return torch.cat((prompts.last_hidden_state, more.last_hidden_state), dim=1).float()


@pytest.mark.parametrize(("name", "requests"), [*((name, 1) for name in FUSED), ("Qwen3", 3)])
@torch.inference_mode()
def test_prefill_and_decode_are_those_of_the_models_own_layers(name: str, requests: int) -> None:
    dtype = torch.float16
    model = text_model(name, dtype)
    expected = outputs(model, requests, dtype)
    fusion = fusion_of(model)
    with fusion:
        model(inputs_embeds=rows(1, 2, dtype=dtype))  # RoPE shows whether it is ours
        found = outputs(model, requests, dtype)
    assert str(fusion) == FUSED[name]
    assert (found - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize(
    "kinds",
    [
        Fp8Weights(in_blocks=False),
        Fp8Weights(in_blocks=True),
        Int4Weights({}, default=Int4Format(64, has_zeros=True, dtype=torch.float16)),
    ],
)
@torch.inference_mode()
def test_quantised_weights_are_read_as_they_are(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16
    model = text_model("Qwen2", dtype, hidden_size=128, head_dim=64, intermediate_size=128)
    quantize_layers(model, kinds, dtype, DEVICE)
    expected = outputs(model, 1, dtype, 128)
    fusion = fusion_of(model)
    monkeypatch.setattr(Stored, "dequantized", None)  # no kernel asks for it
    with fusion:
        found = outputs(model, 1, dtype, 128)
    assert str(fusion).startswith("MLPs 1 of 1, RMS norms 3 of 3, RoPE 1 of 1, q/k/v 1 of 1")
    assert (found - expected).abs().max() < 4e-3 * expected.abs().max()


@torch.inference_mode()
def test_outside_the_models_own_code_runs() -> None:
    model = text_model("Qwen3", torch.float32)
    own = outputs(model, 1, torch.float32)
    modules = dict(model.named_modules())
    with fusion_of(model):
        assert "forward" in vars(modules["layers.0.mlp"])
    assert not any("forward" in vars(module) for module in modules.values())
    torch.testing.assert_close(outputs(model, 1, torch.float32), own)


def test_no_weight_is_held_twice() -> None:
    model = text_model("Qwen2", torch.float16)
    before = sum(param.nbytes for param in model.parameters())
    fusion = fusion_of(model)
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in model.parameters()}
    assert sum(storages.values()) == before
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for merged in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        assert len({linear.weight.untyped_storage().data_ptr() for linear in merged}) == 1
    del fusion


class Centred(nn.Module):
    """A norm by its name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, device=DEVICE))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True))


CenteredRMSNorm = type("CenteredRMSNorm", (Centred,), {})


class Doubled(nn.Module):
    """An MLP by its parts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(2 * self.gate_proj(x) * self.up_proj(x))
        return found


class Clamped(Doubled):
    """Large values alone are changed."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.silu(self.gate_proj(x)), self.up_proj(x)
        found: Tensor = self.down_proj(gate.clamp(max=16) * up.clamp(min=-16, max=16))
        return found


class ClampedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(2, *shape)) for shape in ((64, 16), (16, 32)))

    def forward(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eoh->teo", x, self.gate_up_proj).chunk(2, dim=-1)
        outputs = torch.einsum("tei,ehi->teh", nn.functional.silu(gate).clamp(max=40) * up, self.down_proj)
        return (outputs.gather(1, experts[..., None].expand(-1, -1, 16)) * shares[..., None]).sum(1)


@torch.inference_mode()
def test_modules_of_another_formula_stay_as_they_are() -> None:
    layers = nn.Sequential(CenteredRMSNorm(), Doubled(), Clamped(), ClampedExperts()).to(DEVICE)
    x = torch.randn(1, 3, 16, device=DEVICE)
    expected = layers[:3](x)
    fusion = fusion_of(layers)
    norms = "RMS norms 0 of 1 (another formula)"
    assert str(fusion) == f"MLPs 0 of 2 (another formula), {norms}, experts 0 of 1 (another formula)"
    with fusion:
        torch.testing.assert_close(layers[:3](x), expected)


@torch.no_grad()
def test_a_decoder_of_ours_takes_no_place_of_clamps() -> None:
    clamped, experts = Clamped(), ClampedExperts()
    gates = [clamped.gate_proj, clamped.up_proj]
    with pytest.raises(Unfit, match="large values"):
        check_gates(nn.Sequential(clamped), {"gate_up": gates, "down": [clamped.down_proj]}, gelu=False)
    with pytest.raises(Unfit, match="large values"):
        check_gates(nn.Sequential(experts), {"experts": [experts]}, gelu=False)
    layer = text_model("AriaText", torch.float32).layers[0]
    check_gates(layer, modules_of(layer), gelu=False)


class Record(NamedTuple):
    decoder: TransformersDecoder
    said: str


def decoder(folder: Path, caplog: pytest.LogCaptureFixture) -> Record:
    config = open_checkpoint(str(folder)).config
    with transformers_layers():
        model: Any = load_model(folder, config, dtype=torch.float32, device=DEVICE)
    caplog.clear()
    with caplog.at_level(logging.INFO, "saccade.models"):
        made = TransformersDecoder(model.decoder, PagedKV.allocate(config.text, 2, 16, torch.float32, DEVICE))
    return Record(made, caplog.text)


def test_one_line_says_what_is_fused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = decoder(family_fallback.internvl(tmp_path), caplog)
    assert isinstance(made.decoder._fusion, Fusion)
    counts = "MLPs 2 of 2, RMS norms 5 of 5, RoPE 2 of 2, q/k/v 2 of 2"
    assert f"our kernels inside Transformers' layers: {counts}\n" in made.said


def test_kernels_that_change_the_output_are_not_used_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = transformers_fusion.rows_by
    monkeypatch.setattr(transformers_fusion, "rows_by", lambda *given: 2 * linear(*given))
    made = decoder(family_fallback.internvl(tmp_path), caplog)
    assert not isinstance(made.decoder._fusion, Fusion)
    assert "Transformers' layers run as they are, without kernels of ours inside: its output would differ" in made.said


@pytest.mark.parametrize("tokens", [1, 4])
def test_slices_of_one_gemm_reach_attention_without_a_copy(tokens: int) -> None:
    whole = torch.randn(tokens, 8 * 16)
    sizes = [4 * 16, 2 * 16, 2 * 16]
    # As Transformers' layers hand them over: [1, heads, T, d], of which attention takes [T, heads, d].
    parts = [part.view(1, tokens, -1, 16).transpose(1, 2) for part in whole[None].split(sizes, dim=-1)]
    q, k, v = (part[0].transpose(0, 1) for part in parts)
    found = _whole(q, k, v)
    assert found.data_ptr() == whole.data_ptr() and torch.equal(found, whole.view(tokens, 8, 16))
    assert torch.equal(_whole(q, k.clone(), v), found)
    assert torch.equal(_whole(q.clone(), k, v), found)
