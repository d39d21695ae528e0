"""Heads of 256 dimensions, partial RoPE, output gates and attention temperature on a GPU: right, and how fast?

    python -m benchmarks.attn256_gpu        (Hopper kernels are tried on compute capability 9.0)

Shapes are those of Qwen3.5's gated attention: rows q | k | v | gate, of whose heads the first 64 dimensions rotate.
Every time is that of a CUDA graph over several layers' caches in a row, so that keys come from memory. A star marks the
launch that the kernels choose themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels.attention import decode_hopper
from saccade.kernels.attention.decode_hopper import hopper_decode
from saccade.kernels.attention.decode_hopper_schedule import plan_schedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, choose_splits, launch_for, paged_decode
from saccade.kernels.attention.prefill_triton import choose_rows, paged_prefill
from saccade.kernels.attention.prefill_triton import launch_for as prefill_launch_for
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.gemm.skinny import norm_gated_linear, norm_linear
from saccade.kernels.launch.device import Heads, is_hopper, num_sms
from saccade.kernels.launch.varlen_tiles import Launch, Tiles
from saccade.kernels.ops import reference
from saccade.kernels.ops.norm import add_rms_norm
from saccade.kernels.ops.output_gate import sigmoid_gate
from saccade.kernels.ops.prepare_inputs import DecodeMetadata, Temperature, decode_inputs
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.layers.attention_temperature import AttentionTemperature
from saccade.models.layers.torch_attention import AttentionBatch, reference_attention

CUDA = torch.device("cuda")
BLOCK = 16
BYTES_PER_S = 4.2e12
FLOPS = 700e12
MAX_CONTEXT = 8192
COLD = 256 << 20  # bytes of the caches of all timed layers, at least
SECONDS = 52  # after which candidates are left out
ROTARY = 64
SHAPES = (Heads(24, 4, 256), Heads(16, 4, 256), Heads(16, 2, 256))
MINISTRAL = Heads(32, 8, 128)
CASES = [(requests, context) for requests in (1, 32, 128) for context in (1024, 8192)]
START = time.perf_counter()

# Candidates by splits: keys of a tile, warps, stages.
DECODE = {
    1: [(32, 8, 3), (32, 8, 4), (64, 8, 2), (64, 8, 3), (32, 4, 4)],
    2: [(32, 4, 4), (32, 8, 4), (64, 8, 3), (32, 4, 3)],
    8: [(64, 4, 1), (32, 4, 2), (32, 4, 3)],
    64: [(64, 4, 1), (32, 4, 1), (64, 8, 1)],
}
# Rows, keys, warps, stages.
PREFILL = [(64, 64, 4, 4), (64, 32, 4, 4), (64, 32, 4, 5), (64, 64, 8, 4), (128, 64, 8, 4), (128, 32, 8, 5)]


class Step(NamedTuple):
    """Requests whose blocks are scattered over a cache of several layers."""

    heads: Heads
    k: Tensor  # [layers, slots, kv_heads, d]
    v: Tensor
    tables: Tensor
    seq_lens: Tensor
    new: NewTokens
    workspace: DecodeWorkspace

    @classmethod
    def of(
        cls, heads: Heads, seq_lens: Sequence[int], *, layers: int = 1, rotary: int = ROTARY, scales: bool = False
    ) -> Step:
        requests = len(seq_lens)
        blocks = -(-max(seq_lens) // BLOCK)
        tables = torch.zeros(requests, MAX_CONTEXT // BLOCK, dtype=torch.int32, device=CUDA)
        tables[:, :blocks] = torch.randperm(requests * blocks, device=CUDA).view(requests, -1)
        shape = (2, layers, requests * blocks * BLOCK, heads.num_kv_heads, heads.head_dim)
        caches = torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_()
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=CUDA)
        rows = torch.randn(requests, 2 * sum(heads[:2]), heads.head_dim, device=CUDA).bfloat16()  # q | k | v | gate
        qkv = rows[:, : heads.num_heads + 2 * heads.num_kv_heads]
        angles = torch.rand(requests, rotary // 2, device=CUDA) * 6
        cos = torch.cat((angles.cos(), angles.cos()), 1).bfloat16()
        sin = torch.cat((-angles.sin(), angles.sin()), 1).bfloat16()
        last = lens.long() - 1
        slots = tables.gather(1, (last // BLOCK)[:, None])[:, 0] * BLOCK + last % BLOCK
        factors = 1 + torch.rand(requests, device=CUDA) if scales else None
        new = NewTokens(qkv, cos, sin, slots.int(), factors)
        return cls(heads, *caches, tables, lens, new, DecodeWorkspace.allocate(requests, *heads, CUDA))

    def triton(self, layer: int, launch: Launch | None = None) -> Tensor:
        k, v = self.k[layer], self.v[layer]
        scale = self.heads.head_dim**-0.5
        return paged_decode(self.new, k, v, self.tables, self.seq_lens, BLOCK, scale, self.workspace, launch=launch)

    def hopper(self) -> Callable[[int], Tensor]:
        schedule = plan_schedule(self.seq_lens, self.heads.num_kv_heads, num_sms(CUDA))

        def attend(layer: int) -> Tensor:
            k, v = self.k[layer], self.v[layer]
            scale = self.heads.head_dim**-0.5
            return hopper_decode(
                self.new, k, v, self.tables, self.seq_lens, BLOCK, scale, self.workspace, schedule=schedule
            )

        return attend

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and the caches with the new keys and values."""
        heads = self.heads
        k, v = self.k[0].clone(), self.v[0].clone()
        parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q, new_k, new_v = self.new.qkv.float().split(parts, dim=1)
        angles = (self.new.cos.float(), self.new.sin.float())
        reference.rotary_and_store(
            q, new_k.bfloat16(), new_v.bfloat16(), *angles, k, v, self.new.slots.long(), self.new.query_scales
        )
        batch = AttentionBatch([1] * len(q), self.seq_lens.tolist(), self.tables.long(), self.new.slots, BLOCK)
        return reference_attention(q, k, v, batch, heads.head_dim**-0.5), k, v

    @property
    def splits(self) -> int:
        return choose_splits(len(self.seq_lens), self.heads.num_kv_heads, MAX_CONTEXT, num_sms(CUDA))

    @property
    def floor_us(self) -> float:
        return int(self.seq_lens.sum()) * self.heads.num_kv_heads * self.heads.head_dim * 4 / BYTES_PER_S * 1e6


def attempt(name: str, work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


def check(name: str, found: Tensor, expected: Tensor, limit: float = 6e-3) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    print(f"{'PASS' if error <= limit else 'FAIL'} {name}: differs by {error:.1e}", flush=True)


def seconds() -> float:
    return time.perf_counter() - START


# --- right or not -------------------------------------------------------------------------------------------------


def check_decode(name: str, heads: Heads, rotary: int, *, scales: bool) -> None:
    lens = [1, 63, 64, 65, 700, 1500, *[129 + 16 * i for i in range(18)]]
    step = Step.of(heads, lens, rotary=rotary, scales=scales)
    expected, k, v = step.expected()
    kernels = {"triton": partial(step.triton, 0)}
    if is_hopper(CUDA):
        kernels["hopper"] = partial(step.hopper(), 0)
    before = (step.k.clone(), step.v.clone())
    for kernel, attend in kernels.items():
        step.k.copy_(before[0])
        step.v.copy_(before[1])
        check(f"decode {name} {kernel}", attend(), expected)
        check(f"decode {name} {kernel}, keys", step.k[0], k, 1e-3)
        check(f"decode {name} {kernel}, values", step.v[0], v, 0)


def check_prefill(heads: Heads, rows: int) -> None:
    lengths, seq_lens = [70, 333, 1], [70, 1100, 300]
    step = Step.of(heads, seq_lens)
    q = torch.randn(sum(lengths), 2 * sum(heads[:2]), heads.head_dim, device=CUDA).bfloat16()[:, : heads.num_heads]
    batch = AttentionBatch(lengths, seq_lens, step.tables.long(), torch.empty(0), BLOCK)
    scale = heads.head_dim**-0.5
    expected = reference_attention(q.float(), step.k[0], step.v[0], batch, scale)
    tiles = Tiles.of(lengths, rows, CUDA, seq_lens=seq_lens)
    for splits in (1, 4):
        found = paged_prefill(q, step.k[0], step.v[0], step.tables, step.seq_lens, tiles, BLOCK, scale, splits=splits)
        check(f"prefill {tuple(heads)}, tiles of {rows}, {splits} splits", found, expected)


def check_rope(heads: Heads) -> None:
    step = Step.of(heads, [300] * 40, scales=True)
    wide = [step.new.qkv._base.clone() for _ in range(2)]  # type: ignore[union-attr]
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    caches = [torch.zeros_like(torch.stack((step.k[0], step.v[0]))) for _ in range(2)]
    for rows, (k, v), run in zip(wide, caches, (rotary_and_store, reference.rotary_and_store), strict=True):
        q, new_k, new_v = rows[:, : sum(parts)].split(parts, dim=1)
        run(q, new_k, new_v, step.new.cos, step.new.sin, k, v, step.new.slots.long(), step.new.query_scales)
    check(f"rotary_and_store {tuple(heads)}", wide[0], wide[1], 2e-3)
    check(f"rotary_and_store {tuple(heads)}, caches", caches[0], caches[1], 2e-3)


def check_ops() -> None:
    heads = SHAPES[0]
    rows = torch.randn(2, 37, 2 * sum(heads[:2]), 256, device=CUDA).bfloat16()
    rows[1] = rows[0]
    by = torch.rand(2, 256, device=CUDA) + 0.5
    width = heads.num_heads + 2 * heads.num_kv_heads
    qk_rms_norm(rows[0, :, :width], *by, heads.num_heads, 1e-6)
    reference.qk_rms_norm(rows[1, :, :width], *by, heads.num_heads, 1e-6)
    check("qk_rms_norm, float32 weights", rows[0], rows[1], 2e-3)
    out, gate = torch.randn(37, 6144, device=CUDA).bfloat16(), rows[0].flatten(1)[:, width * 256 :]
    check("sigmoid_gate", sigmoid_gate(out.clone(), gate), reference.sigmoid_gate(out, gate), 2e-3)
    for count in (1, 9, 40):
        x, residual = torch.randn(2, count, 4096, device=CUDA).bfloat16()
        norm, weight = torch.rand(4096, device=CUDA) + 0.5, torch.randn(2048, 4096, device=CUDA).bfloat16() / 64
        found, expected = add_rms_norm(x, residual, norm, 1e-6), reference.add_rms_norm(x, residual, norm, 1e-6)
        check(f"add_rms_norm of {count}, float32 weights", found[0], expected[0], 2e-3)
        normed = F.rms_norm(x.float(), norm.shape, norm, 1e-6)
        both = F.linear(normed, weight.float())
        check(f"norm_linear of {count}, float32 weights", norm_linear(x, norm, 1e-6, weight), both)
        found = norm_gated_linear(x, norm, 1e-6, weight)
        check(f"norm_gated_linear of {count}, float32 weights", found, reference.silu_and_mul(both), 1e-2)


def check_temperature() -> None:
    positions = torch.tensor([0, 16383, 16384, 100000, 262143], dtype=torch.int32, device=CUDA)
    zeros = torch.zeros_like(positions)
    metadata = DecodeMetadata(zeros, positions, zeros - 1, zeros + 1, zeros)
    embedding, tables = torch.randn(8, 4096, device=CUDA).bfloat16(), zeros[:4].view(1, 4)
    found = decode_inputs(
        metadata, zeros.long(), embedding, torch.rand(64, device=CUDA), tables, BLOCK,
        temperature=Temperature(0.1, 16384),
    )  # fmt: skip
    assert found.query_scales is not None
    check("temperature of positions", found.query_scales, AttentionTemperature(0.1, 16384).factors(positions), 1e-6)


# --- how fast -----------------------------------------------------------------------------------------------------


def graph_us(run: Callable[[int], object], layers: int) -> float:
    """Of one layer; the median of several rounds."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers / 2)
    return statistics.median(times)


def layers_for(heads: Heads, requests: int, context: int) -> int:
    size = requests * context * heads.num_kv_heads * heads.head_dim * 4
    return max(2, min(64, -(-COLD // size)))


def decode_launches(step: Step) -> list[tuple[str, Launch]]:
    own = launch_for(step.k[0], len(step.seq_lens), step.splits)
    found = [(f"*{own.keys}/{own.warps}/{own.stages}", own)]
    for keys, warps, stages in DECODE.get(step.splits, []):
        if (keys, warps, stages) != (own.keys, own.warps, own.stages):
            found.append((f"{keys}/{warps}/{stages}", Launch(16, keys, warps, stages)))
    return found


def compile_decode() -> None:
    """Several at a time: most of a compilation runs outside of Python."""
    jobs: list[tuple[str, Callable[[], object]]] = []
    for heads in SHAPES:
        for requests in (128, 32, 1):
            step = Step.of(heads, [64] * requests)
            jobs += [(f"{heads} {name}", partial(step.triton, 0, one)) for name, one in decode_launches(step)]
            if requests == 32 and is_hopper(CUDA):
                jobs.append((f"{heads} hopper", partial(step.hopper(), 0)))
    for config in PREFILL:
        jobs.append((f"prefill {config}", partial(prefill_once, SHAPES[1], config)))
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: attempt(*job), jobs))
    torch.cuda.synchronize()
    print(f"{len(jobs)} launches compiled after {seconds():.0f} s", flush=True)


def prefill_once(heads: Heads, config: tuple[int, int, int, int]) -> Tensor:
    step = Step.of(heads, [64])
    q = torch.randn(64, heads.num_heads, heads.head_dim, device=CUDA).bfloat16()
    tiles = Tiles.of([64], config[0], CUDA, seq_lens=[64])
    caches = (step.k[0], step.v[0], step.tables, step.seq_lens)
    return paged_prefill(q, *caches, tiles, BLOCK, 0.1, splits=1, launch=Launch(*config))


def time_decode(heads: Heads, requests: int, context: int) -> None:
    layers = layers_for(heads, requests, context)
    step = Step.of(heads, [context] * requests, layers=layers)
    times: dict[str, float] = {}
    for name, launch in decode_launches(step):
        if seconds() < SECONDS or name.startswith("*"):
            us = attempt(name, partial(graph_us, lambda layer, one=launch: step.triton(layer, one), layers))
            if isinstance(us, float):
                times[name] = us
    if is_hopper(CUDA):
        for stages in (2, 3) if seconds() < SECONDS else (2,):
            choose = decode_hopper.choose_stages
            decode_hopper.choose_stages = lambda group, dim, own=stages: own  # type: ignore[misc]
            us = attempt("hopper", partial(graph_us, step.hopper(), layers))
            decode_hopper.choose_stages = choose
            if isinstance(us, float):
                times[f"hopper {stages}"] = us
    show(f"decode {heads[0]}/{heads[1]} {requests:3} x {context}, {step.splits} splits", step.floor_us, times)


def show(name: str, floor: float, times: dict[str, float]) -> None:
    best = min(times, key=lambda one: times[one], default="")
    each = "  ".join(f"{'>' if one == best else ''}{one} {us:.1f}" for one, us in times.items())
    ratio = times[best] / floor if times else 0
    print(f"{name}: floor {floor:.1f} us, best {ratio:.2f} x | {each}", flush=True)


def time_prefill(heads: Heads, tokens: int) -> None:
    layers = 4
    step = Step.of(heads, [tokens], layers=layers)
    q = torch.randn(tokens, heads.num_heads, heads.head_dim, device=CUDA).bfloat16()
    scale = heads.head_dim**-0.5

    def run(layer: int, config: tuple[int, int, int, int], tiles: Tiles) -> Tensor:
        caches = (step.k[layer], step.v[layer], step.tables, step.seq_lens)
        return paged_prefill(q, *caches, tiles, BLOCK, scale, splits=1, launch=Launch(*config))

    own = prefill_launch_for(q, choose_rows(tokens, heads.num_heads, num_sms(CUDA), heads.head_dim))
    times: dict[str, float] = {}
    for config in PREFILL:
        if seconds() < SECONDS:
            tiles = Tiles.of([tokens], config[0], CUDA, seq_lens=[tokens])
            us = attempt(str(config), partial(graph_us, partial(run, config=config, tiles=tiles), layers))
            if isinstance(us, float):
                times[("*" if config == tuple(own[:4]) else "") + "/".join(map(str, config))] = us
    k, v = (cache[0, :tokens].transpose(0, 1)[None] for cache in (step.k, step.v))
    query = q.transpose(0, 1)[None]
    sdpa = partial(F.scaled_dot_product_attention, query, k, v, is_causal=True, enable_gqa=True)
    us = attempt("sdpa", partial(graph_us, lambda _: sdpa(), layers))
    if isinstance(us, float):
        times["sdpa"] = us
    floor = 2 * tokens**2 * heads.num_heads * heads.head_dim / FLOPS * 1e6
    show(f"prefill {heads[0]}/{heads[1]} {tokens}", floor, times)


def time_ops(heads: Heads, rows: int) -> None:
    copies = 8
    wide = torch.randn(copies, rows, 2 * sum(heads[:2]), heads.head_dim, device=CUDA, dtype=torch.bfloat16)
    out = torch.randn(copies, rows, heads.num_heads * heads.head_dim, device=CUDA, dtype=torch.bfloat16)
    by = torch.rand(2, heads.head_dim, device=CUDA)
    width = heads.num_heads + 2 * heads.num_kv_heads
    cos, sin = torch.randn(2, rows, ROTARY, device=CUDA).bfloat16()
    slots = torch.arange(rows, device=CUDA).int()
    k, v = torch.empty(2, rows, heads.num_kv_heads, heads.head_dim, device=CUDA, dtype=torch.bfloat16)
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    times = {
        "qk_rms_norm": graph_us(lambda i: qk_rms_norm(wide[i, :, :width], *by, heads.num_heads, 1e-6), copies),
        "sigmoid_gate": graph_us(lambda i: sigmoid_gate(out[i], wide[i].flatten(1)[:, width * 256 :]), copies),
        "rotary_and_store": graph_us(
            lambda i: rotary_and_store(*wide[i, :, :width].split(parts, dim=1), cos, sin, k, v, slots), copies
        ),
    }
    moved = {"qk_rms_norm": 2 * (width - heads[1]), "sigmoid_gate": 3 * heads[0], "rotary_and_store": heads[0] // 2}
    each = (
        f"{name} {us:.1f} (floor {rows * moved[name] * heads.head_dim * 2 / BYTES_PER_S * 1e6:.1f})"
        for name, us in times.items()
    )
    print(f"ops {heads[0]}/{heads[1]}, {rows} rows: " + "  ".join(each), flush=True)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    compile_decode()
    for heads in SHAPES:
        attempt("decode", partial(check_decode, str(tuple(heads)), heads, ROTARY, scales=False))
        attempt("prefill", partial(check_prefill, heads, 64))
    attempt("decode", partial(check_decode, "256, full RoPE, temperature", SHAPES[1], 256, scales=True))
    attempt("decode", partial(check_decode, "Ministral 3, temperature", MINISTRAL, 128, scales=True))
    attempt("prefill", partial(check_prefill, SHAPES[1], 128))
    attempt("rope", partial(check_rope, SHAPES[0]))
    attempt("ops", check_ops)
    attempt("temperature", check_temperature)
    print(f"checked after {seconds():.0f} s", flush=True)
    for heads in SHAPES:
        for requests, context in CASES:
            attempt("decode", partial(time_decode, heads, requests, context))
    for heads, tokens in ((SHAPES[1], 1600), (SHAPES[1], 8192), (SHAPES[0], 8192)):
        attempt("prefill", partial(time_prefill, heads, tokens))
    for rows in (1, 128, 8192):
        attempt("ops", partial(time_ops, SHAPES[1], rows))
    print(f"{seconds():.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
