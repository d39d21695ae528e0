"""Our kernels inside the layers of a Transformers text model, of which nothing else is known.

    module                             launches    fused                                              launches
    q_proj, k_proj, v_proj                3        one GEMM; each returns its slice                      1
    RMS norm                              6        `rms_norm`; of q and k in place                       1
    apply_rotary_pos_emb                 10        `rotary`, in place, also of one tensor                1
    down(act(gate(x)) * up(x))            5        gate and up in one GEMM, with the gate inside; down   2
    experts of tokens                  many        `run_experts`                                     2 to 6
    any other linear                      1        the GEMM that suits the number of rows                1

A norm, an MLP or RoPE that gives something else on a few rows stays as it is. Modules compute in this way
within `with fusion:`; outside, they run their own code. Merged weights are held once: those of the modules
become views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from saccade.kernels.attention.rope_store_kv import HALVES, Pairs, rotary
from saccade.kernels.gemm.skinny import SplitWorkspace
from saccade.kernels.ops.norm import rms_norm
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.bridge.own_gates import large_rows
from saccade.models.bridge.own_modules import linear_of
from saccade.models.bridge.stored import dtype_of, is_matrix, kind_of
from saccade.models.cuda.gemm_table import GATED, WHOLE
from saccade.models.cuda.gemm_weights import Int4, Plain, weight_of
from saccade.models.cuda.gemms import rows_by
from saccade.models.cuda.transformers_experts import are_experts, fused_experts

_ROTARY = "apply_rotary_pos_emb"  # the function of Transformers' modeling files
_PAIRS = (HALVES, Pairs(are_neighbours=True), Pairs(are_neighbours=True, angles_are=True))
_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm", "v_norm")
_OTHER = "another formula"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest value

_Forward = Callable[[Tensor], Tensor]


class Fusion:
    def __init__(self, layers: nn.Module, workspace: SplitWorkspace) -> None:
        self.workspace = workspace
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}  # what modules compute within `with`
        self._found = Counter[str]()
        self._fused = Counter[str]()
        self._reasons: dict[str, str] = {}  # why some are not
        self._rotaries: list[_Rotary] = []
        self._head_norms = set[Any]()
        self._like = next(layers.parameters())  # in dtype and device
        modules = [module for module in layers.modules() if "forward" not in vars(module)]
        for module in modules:
            self._fuse_parts(module)
        for module in modules:
            if is_matrix(module) and module not in self._forwards:
                self._forwards[module] = partial(self._linear, self._weight_of([module]))
        if workspace.partials.is_cuda:
            torch.cuda.empty_cache()  # weights as they were: the memory of CUDA graphs is apart from others'

    def __enter__(self) -> None:
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for module in self._forwards:
            del vars(module)["forward"]

    def __str__(self) -> str:
        """What is fused, and what is not and why. RoPE shows itself in the first pass."""
        fused = self._fused + Counter({"RoPE": sum(one.is_same is True for one in self._rotaries)})
        reasons = dict(self._reasons)
        if any(one.is_same is False for one in self._rotaries):
            reasons["RoPE"] = _OTHER
        kinds = []
        for kind, count in sorted(self._found.items()):
            why = f" ({reasons[kind]})" if kind in reasons else ""
            kinds.append(f"{kind} {fused[kind]} of {count}{why}")
        return ", ".join(kinds)

    def _fuse_parts(self, module: nn.Module) -> None:
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            norms: Sequence[Any] = _norms(module)
            if module in self._head_norms:
                norms = [partial(_norm_heads, norm) for norm in norms]
            self._fuse("RMS norms", module, norms)
        if are_experts(module):
            experts = list(fused_experts(module))
            self._fuse("experts", module, experts, lambda: list(experts[0].examples()))
        if is_matrix(getattr(module, "down_proj", None)):
            self._fuse_mlp(module)
        if all(hasattr(module, linear) for linear in _QKV):
            self._fuse_qkv(module)
        if name.endswith("Attention"):
            self._fuse_rotary(module)

    def _fuse(
        self,
        kind: str,
        module: nn.Module,
        candidates: Sequence[Callable[..., Tensor]],
        examples: Callable[[], Sequence[tuple[Tensor, ...]]] | None = None,
    ) -> None:
        """The first that computes the same of each example: a few random rows, if nothing else."""
        self._found[kind] += 1
        reason: str | None = "other parts"
        examples = examples or (lambda: [self._rows(module)])
        for forward in candidates:
            reason = _difference(module, forward, examples)
            if reason is None:
                self._forwards[module] = forward
                self._fused[kind] += 1
                return
        self._reasons[kind] = str(reason)

    def _rows(self, module: nn.Module) -> tuple[Tensor]:
        return (_rows_of(module, self._like),)

    def _fuse_mlp(self, mlp: Any) -> None:
        both = self._merged(mlp, ("gate_up_proj",)) or self._merged(mlp, ("gate_proj", "up_proj"))
        if both is None:
            self._fuse("MLPs", mlp, ())
            return

        def examples() -> list[tuple[Tensor]]:
            (usual,) = self._rows(mlp)
            return [(usual,), (large_rows(partial(self._linear, both), usual.shape[-1], usual)[None],)]

        self._fuse("MLPs", mlp, self._mlps(mlp, both), examples)

    def _mlps(self, mlp: Any, both: Plain) -> Sequence[_Forward]:
        down = self._weight_of([mlp.down_proj])

        def usual(gate_up: Plain, x: Tensor) -> Tensor:
            gated = rows_by(GATED, x.reshape(-1, x.shape[-1]), gate_up, self.workspace)
            return self._linear(down, gated).view(x.shape)

        def other(act: _Forward, x: Tensor) -> Tensor:
            gate, up = self._linear(both, x).chunk(2, dim=-1)
            return self._linear(down, act(gate) * up)

        acts = [child for child in mlp.children() if not isinstance(child, nn.Linear)]
        usuals = [partial(usual, both.gated_by(gelu)) for gelu in (False, True)]
        return [*usuals, *(partial(other, act) for act in acts)]

    def _fuse_qkv(self, attention: nn.Module) -> None:
        self._found["q/k/v"] += 1
        merged = self._merged(attention, _QKV)
        if merged is None:
            self._reasons["q/k/v"] = "other inputs or biases"
            return
        self._fused["q/k/v"] += 1
        linears: list[Any] = [getattr(attention, name) for name in _QKV]
        shared = _SharedGemm(partial(self._linear, merged), [linear.out_features for linear in linears])
        for index, linear in enumerate(linears):
            self._forwards[linear] = partial(shared.part, index)
        self._head_norms.update(getattr(attention, name, None) for name in _HEAD_NORMS)

    def _fuse_rotary(self, attention: nn.Module) -> None:
        """A copy of its `forward` that finds our function under the name of Transformers'."""
        self._found["RoPE"] += 1
        forward = type(attention).forward
        if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
            self._reasons["RoPE"] = f"no {_ROTARY}"
            return
        stand_in = _Rotary(forward.__globals__[_ROTARY])
        scope = {**forward.__globals__, _ROTARY: stand_in}
        copy = FunctionType(
            forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        self._forwards[attention] = MethodType(copy, attention)
        self._rotaries.append(stand_in)

    def _linear(self, weight: Plain, x: Tensor) -> Tensor:
        outputs = rows_by(WHOLE, x.reshape(-1, x.shape[-1]), weight, self.workspace)
        return outputs.view(*x.shape[:-1], -1)

    def _merged(self, module: nn.Module, names: Sequence[str]) -> Plain | None:
        """One weight for these of a module, whose own become views of it; None: they do not fit."""
        linears: list[Any] = [getattr(module, name, None) for name in names]
        if any(not is_matrix(linear) or "forward" in vars(linear) for linear in linears):
            return None
        if len({(linear.in_features, linear.bias is None, kind_of(linear)) for linear in linears}) > 1:
            return None
        return self._weight_of(linears)

    def _weight_of(self, linears: Sequence[Any]) -> Plain:
        """Of one or several side by side. One in INT4 may need memory to be unpacked in."""
        weight = weight_of(linear_of(linears))
        weight.decide(weight.weight.device, dtype_of(linears[0]))
        unpacked = self.workspace.unpacked
        if isinstance(weight, Int4) and (unpacked is None or len(unpacked) < weight.elements):
            scratch = torch.empty(weight.elements, dtype=dtype_of(linears[0]), device=weight.weight.device)
            self.workspace = self.workspace._replace(unpacked=scratch)
        return weight


class _SharedGemm:
    """The output of a merged GEMM, from the first of its linears that is called to the last."""

    def __init__(self, forward: _Forward, sizes: Sequence[int]) -> None:
        self.forward = forward
        self.sizes = list(sizes)
        self.given: Tensor | None = None
        self.found: dict[int, Tensor] = {}  # those that have not been asked for

    def part(self, index: int, x: Tensor) -> Tensor:
        if x is not self.given or index not in self.found:
            self.given = x
            self.found = dict(enumerate(torch.split(self.forward(x), self.sizes, dim=-1)))
        part = self.found.pop(index)
        if not self.found:
            self.given = None  # its memory is the next module's
        return part


class _Rotary:
    """`apply_rotary_pos_emb` of one module. Its first call shows whether ours is the same."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original
        self.is_same: bool | None = None
        self.pairs = HALVES

    def __call__(self, *given: Any, **options: Any) -> Any:
        """q [1, heads, T, d], k [1, kv_heads, T, d], cos and sin [1, T, rotary_dim], if it is called so.

        Or one tensor; or T before the heads, with `unsqueeze_dim`.
        """
        by_token = options.get("unsqueeze_dim") == 2
        if self.is_same is False or options.keys() - {"unsqueeze_dim"} or not _is_called_so(given, by_token):
            self.is_same = bool(self.is_same)
            return self.original(*given, **options)
        *tensors, cos, sin = given
        if self.is_same is None:
            expected = self.original(*given, **options)
            for pairs in _PAIRS:
                copies = [tensor.clone() for tensor in tensors]
                _rotate(copies, cos, sin, pairs, by_token)
                self.is_same = all(map(_are_close, copies, _listed(expected)))
                if self.is_same:
                    self.pairs = pairs
                    break
            return expected
        _rotate(tensors, cos, sin, self.pairs, by_token)
        return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _listed(found: Any) -> list[Tensor]:
    return [*found] if isinstance(found, tuple) else [found]


def _is_called_so(given: tuple[Any, ...], by_token: bool) -> bool:
    if len(given) not in (3, 4) or any(one.dim() < 3 for one in given):
        return False
    q, cos = given[0], given[-1]
    return len(q) == 1 and cos.shape[:2] == (1, q.shape[2 - by_token]) and cos.shape[-1] <= q.shape[-1]


def _rotate(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, pairs: Pairs, by_token: bool) -> None:
    heads = [tensor[0].transpose(0, 1 - by_token) for tensor in tensors]  # [T, heads, d]
    q, k = (*heads, None)[:2]
    assert q is not None
    rotary(q, k, cos[0].contiguous(), sin[0].contiguous(), pairs)


def _norms(norm: Any) -> Sequence[partial[Tensor]]:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor | None):
        return ()
    weights = [None] if weight is None else [weight.detach(), 1 + weight.detach().float()]
    return [partial(rms_norm, weight=by, eps=eps) for by in weights]


def _norm_heads(norm: partial[Tensor], x: Tensor) -> Tensor:
    """Heads of a merged GEMM's output in place, so that attention finds q, k and v side by side."""
    dim = x.shape[-1]
    if x.dim() != 4 or len(x) > 1:
        return norm(x)
    heads = x[0] if x.stride(2) == dim else x[0].transpose(0, 1)  # [T, heads, d]
    if (heads.stride(1), heads.stride(0) % dim) != (dim, 0):
        return norm(x)
    weight = norm.keywords["weight"]
    qk_rms_norm(heads, weight, weight, heads.shape[1], norm.keywords["eps"])
    return x


def _rows_of(module: nn.Module, like: Tensor) -> Tensor:
    """Of several sizes, the smallest of which shows the eps of a norm."""
    weights = (getattr(part, "weight", None) for part in module.modules())
    weight = next((one for one in weights if isinstance(one, Tensor)), like)
    rows = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    return (rows * torch.tensor([1.0, 1e-3, 3.0])[:, None])[None].to(weight)


def _difference(
    module: nn.Module, forward: Callable[..., Tensor], examples: Callable[[], Sequence[Sequence[Tensor]]]
) -> str | None:
    """None: they agree."""
    try:
        agree = all(_are_close(forward(*given), module(*given)) for given in examples())
        return None if agree else _OTHER
    except Exception as error:  # anything: it is of another kind
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _are_close(rows: Tensor, expected: Tensor) -> bool:
    if rows.shape != expected.shape:
        return False
    difference = (rows.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().abs().max())
