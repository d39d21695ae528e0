"""Compiles the kernels without a GPU (`tests.helpers.kernels.compile_kernels`), TRITON_INTERPRET unset:

    python -m ...compile_kernels 80 89          what the host code launches on such GPUs: of each kernel the
                                                           largest variant; shared memory, registers, spills are checked
    python -m ...compile_kernels 80 89 --all    all variants that differ in more than lengths; takes minutes
    python -m ...compile_kernels --layouts      each Gluon kernel as far as the layouts of its values, before LLVM: all
                                                           names and types of its language; takes seconds
    python -m ...compile_kernels --hash [TEXT]  hashes of the PTX and the SASS for sm_90, of every variant of
                                                           the table whose name contains TEXT

Hashes of two commits tell whether a change of the sources changed the machine code. Names of kernels, source lines and
paths are no part of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

import saccade.kernels
from saccade.kernels.launch.device import Gpu
from tests.helpers.families.variant import NONE, ONE, Variant, is_aligned
from tests.helpers.kernels.kernel_table import HOPPER_VARIANTS, hopper_variants, triton_variants
from tests.helpers.kernels.launched import SHAPES, SIMILAR, launches

HOPPER = 90
TENSOR_MEMORY = 100  # MMAs add up in a memory of their own, which few tiles fit
PDL_FROM = 90
FP8_FROM = 89
FP8_SHAPES = ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3.5-27B")  # heads of 128, experts, heads of 256
FP8_KERNELS = {  # that read or write nothing else
    "gemm.skinny_scaled:scaled_vector_kernel", "moe.experts_gemv_scaled:scaled_down_kernel",
    "moe.experts_gemv_scaled:scaled_gate_up_kernel", "ops.norm:_silu_fp8_kernel",
    "ops.quantize_rows:_quantize_kernel",
}  # fmt: skip
GPUS: Mapping[int, tuple[Gpu, ...]] = {  # by compute capability; the number of SMs decides configs, too
    80: (Gpu(108, (8, 0), 163 << 10),),  # A100
    89: (Gpu(58, (8, 9), 99 << 10), Gpu(128, (8, 9), 99 << 10)),  # L4, RTX 4090
    90: (Gpu(132, (9, 0), 227 << 10),),  # H100, H200
    100: (Gpu(148, (10, 0), 227 << 10),),  # B200
    120: (Gpu(36, (12, 0), 99 << 10), Gpu(170, (12, 0), 99 << 10)),  # RTX 5060 Ti, RTX 5090
}
REGISTERS = 1 << 16  # of an SM
MAX_REGISTERS = 255  # of a thread
DEFAULT_WARPS = 4  # Triton's
MAX_STACK = 320  # bytes that a thread may spill; launches on Hopper were chosen by time, whatever they spill
TILES = {
    "BINS", "BLOCK", "CHUNK", "CHUNKS", "COLUMNS", "EXPERTS", "FIRST", "INPUTS", "KEYS", "OUTPUTS", "PADDED",
    "PADDED_DIM", "PADDED_HALF", "PADDED_HEADS", "PADDED_NOPE", "PADDED_RANK", "PADDED_ROPE", "PADDED_VALUE", "PAIRS",
    "PARTS", "PIECES", "REST", "ROWS", "SIZE_PADDED", "TOKENS", "VALUES",
}  # fmt: skip
"""Constants that are sides of a tile, which decide what a program needs."""
ALIKE = ({80, 89, 120}, {90, 100})  # MMAs of the same kind take operands from registers, or from shared memory
OF_PDL = {"LINES", "LINES_PADDED", "PDL", "PREFETCH"}
LENGTHS = {
    "CHANNELS", "E", "GROUP", "HALF", "HEADS", "HIDDEN", "K", "KV_HEADS", "K_HEAD", "KEY_HEADS", "LINES", "MIN_SHARE",
    "QKV_ROW", "Q_HEAD", "ROTATED_HEAD", "SHARE", "SIZE", "SLOTS", "SPLITS", "VALUE_HEADS", "V_HEAD", "WIDE",
    "WIDTH",
}  # fmt: skip
"""Constants that are the length of a loop or a stride."""


def build(variant: Variant, arch: int) -> Any:
    return triton.compile(source_of(variant), target=GPUTarget("cuda", arch, 32), options=variant.options)


def source_of(variant: Variant) -> Any:
    kernel = kernel_of(variant)
    left_out = kernel.params[len(variant.types) + len(variant.constants) :]
    assert all(param.has_default for param in left_out), (variant.name, [param.name for param in left_out])
    fixed = [*variant.constants, *(param.default for param in left_out)]
    given = [*variant.types, *["constexpr"] * len(fixed)]
    constants = {len(variant.types) + i: value for i, value in enumerate(fixed)}
    constants |= {i: None for i, kind in enumerate(given) if kind == NONE}
    constants |= {i: 1 for i, kind in enumerate(given) if kind == ONE}
    free = [not (param.do_not_specialize or param.do_not_specialize_on_alignment) for param in kernel.params]
    aligned = [i for i, kind in enumerate(given) if is_aligned(kind) and free[i]]
    kinds = [re.sub(":16?$", "", kind) if i not in constants else "constexpr" for i, kind in enumerate(given)]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source(
        fn=kernel,
        signature={param.name: kind for param, kind in zip(kernel.params, kinds, strict=True)},
        constexprs={(i,): value for i, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def check_layouts() -> None:
    """Of every variant of the Gluon kernels that is compiled for Hopper: `triton.compile` without its last stages."""
    target = GPUTarget("cuda", HOPPER, 32)
    backend = make_backend(target)
    checked = [variant for variant in hopper_variants() if variant.name in HOPPER_VARIANTS]
    for variant in checked:
        source, context, stages = source_of(variant), ir.context(), dict[str, Any]()
        options = backend.parse_options(variant.options | source.parse_options())
        backend.add_stages(stages, options, source.language)
        ir.load_dialects(context)
        backend.load_dialects(context)
        made = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, *made, context)
        for stage in ("glir", "ttgir"):
            module = stages[stage](module, {})
        assert "nvgpu" in str(module) or "ttng." in str(module), variant.name
    lacking = kernels_of(GluonJITFunction) - {variant.kernel for variant in checked}
    assert not lacking, f"no variant of {lacking} is compiled"
    print(f"{len(checked)} kernels, {cpu_seconds():.0f} s of CPU time")


def kernel_of(variant: Variant) -> Any:
    module, function = variant.kernel.split(":")
    return getattr(import_module(f"saccade.kernels.{module}"), function)


class Resources(NamedTuple):
    shared: int  # bytes of a program
    registers: int  # of a thread
    stack: int  # bytes of a thread: registers that were spilled
    has_mma: bool  # tensor cores, whose instructions differ between GPUs
    is_trap: bool  # Triton made this of a kernel without enough tensor memory

    def problems(self, arch: int, warps: int) -> Iterator[str]:
        limit = GPUS[arch][0].shared_memory
        if self.is_trap:
            yield "it ends in a trap"
        if self.shared > limit:
            yield f"{self.shared} bytes of shared memory, {limit} are allowed"
        if 32 * warps * self.registers > REGISTERS:
            yield f"{self.registers} registers for {warps} warps, an SM has {REGISTERS}"
        if self.stack > MAX_STACK and arch != HOPPER:
            yield f"{self.stack} bytes spilled by each thread, {MAX_STACK} are allowed"

    def is_small(self, limit: int) -> bool:
        """Half of what there is, at most: another GPU's compiler would not need twice as much of what all have."""
        is_half = 2 * self.shared <= limit and self.registers <= MAX_REGISTERS // 2
        return is_half and self.stack == 0 and not self.has_mma


def resources(made: Any) -> Resources:
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", cuobjdump(made, "-res-usage"))}
    ptx = made.asm["ptx"]
    return Resources(made.metadata.shared, found["REG"], found["STACK"], "mma." in ptx, "\ttrap;" in ptx)


class Check:
    """What does not compile, or could not start, on GPUs that are checked one after the other."""

    def __init__(self, *, is_all: bool) -> None:
        self.is_all = is_all
        self.wrong: list[str] = []
        self._known: dict[object, list[tuple[int, bool, Resources]]] = {}  # by launch: where it was compiled, with PDL?

    def run(self, arch: int) -> None:
        variants = launched_on(arch, is_all=self.is_all)
        lacking = missing(variants) - (set() if arch >= FP8_FROM else FP8_KERNELS)
        self.wrong += [f"{kernel}: no model launches it, and the table has no variant" for kernel in lacking]
        limit = GPUS[arch][0].shared_memory
        compiled = [variant for variant in variants if self.is_all or not self._is_known(variant, arch, limit)]
        for variant in compiled:
            try:
                found = resources(build(variant, arch))
            except Exception as error:  # a missing instruction, a wrong layout
                self.wrong.append(f"sm_{arch} {described(variant)}: {type(error).__name__}: {error}")
                continue
            self._known.setdefault(launch_of(variant), []).append((arch, has_pdl(variant), found))
            problems = found.problems(arch, variant.options.get("num_warps", DEFAULT_WARPS))
            self.wrong += [f"sm_{arch} {described(variant)}: {problem}" for problem in problems]
        print(f"sm_{arch}: {len(compiled)} of {len(variants)} kernels, {cpu_seconds():.0f} s of CPU time", flush=True)

    def _is_known(self, variant: Variant, arch: int, limit: int) -> bool:
        """Whether the same launch, compiled for another GPU, tells that this one has all that it needs."""
        for other, with_pdl, found in self._known.get(launch_of(variant), []):
            is_alike = any({other, arch} <= alike for alike in ALIKE)
            is_older = other < arch and with_pdl == has_pdl(variant)  # newer GPUs have its instructions, older may not
            if found.shared <= limit if is_alike else is_older and found.is_small(limit):
                return True
        return False


def has_pdl(variant: Variant) -> bool:
    return bool(variant.options.get("launch_pdl"))


def launch_of(variant: Variant) -> object:
    """What decides the resources of a program: all but lengths, strides and PDL."""
    constants = [(name, value) for name, value in constants_of(variant).items() if name not in LENGTHS | OF_PDL]
    options = [(name, value) for name, value in variant.options.items() if name != "launch_pdl"]
    missing = [kind == NONE for kind in variant.types]
    return (variant.kernel, has_fp8(variant), *missing, *constants, *sorted(options))


def launched_on(arch: int, *, is_all: bool) -> list[Variant]:
    """What the host code launches on these GPUs, and kernels of the table that it does not launch."""
    dtypes = [torch.bfloat16, torch.float16] if is_all else [torch.bfloat16]
    shapes = [name for name in SHAPES if is_all or name not in SIMILAR]
    by_host = [variant for gpu in GPUS[arch] for variant in launches(gpu, shapes, dtypes)]
    found = distinct(by_host) if is_all else largest(by_host, arch)
    if arch >= FP8_FROM:
        found += fp8_launches(arch, FP8_SHAPES if is_all else FP8_SHAPES[:2])
    known = {variant.kernel for variant in found} | (set() if arch >= FP8_FROM else FP8_KERNELS)
    always = {"norm_fp8"} if arch >= FP8_FROM else set()  # launched with layers in float8 alone
    found += [
        for_arch(variant, arch)
        for variant in triton_variants()
        if variant.name in always or variant.kernel not in known
    ]
    if arch == HOPPER:
        found += [variant for variant in hopper_variants() if is_all or variant.name in HOPPER_VARIANTS]
    return found


def fp8_launches(arch: int, shapes: Iterable[str]) -> list[Variant]:
    """What the host code launches over an FP8 KV cache and weights in FP8, and not over others."""
    by_host = [variant for gpu in GPUS[arch] for variant in launches(gpu, shapes, [torch.bfloat16], fp8=True)]
    return largest((variant for variant in by_host if has_fp8(variant)), arch)


def has_fp8(variant: Variant) -> bool:
    return any("fp8" in kind for kind in variant.types)


def missing(variants: Iterable[Variant]) -> set[str]:
    """Triton kernels that are not among these."""
    return kernels_of(JITFunction) - {variant.kernel for variant in variants}


def kernels_of(kind: type) -> set[str]:
    root = Path(saccade.kernels.__file__).parent
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")]
    found = set()
    for module in modules:
        members = vars(import_module(f"saccade.kernels.{module}".removesuffix(".__init__"))).values()
        kernels = [one for one in members if type(one) is kind and one.fn.__name__.endswith("_kernel")]
        found |= {f"{module}:{one.fn.__name__}" for one in kernels if one.fn.__module__.endswith(module)}
    return found


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    """The first of each launch."""
    found: dict[object, Variant] = {}
    for variant in variants:
        found.setdefault(launch_of(variant), variant)
    return list(found.values())


def largest(variants: Iterable[Variant], arch: int) -> list[Variant]:
    """Of each kernel the variant with the largest tiles, times stages.

    Where operands are in registers, also with heads of 256.
    """
    found: dict[tuple[str, bool], Variant] = {}
    for variant in variants:
        key = (variant.kernel, arch in ALIKE[0] and constants_of(variant).get("DIM") == 256)
        other = found.setdefault(key, variant)
        if tile_size(variant) > tile_size(other):
            found[key] = variant
    return list(found.values())


def tile_size(variant: Variant) -> tuple[int, int]:
    constants = constants_of(variant)
    sides = [value for name, value in constants.items() if name in TILES and value]
    return prod(sides) * variant.options.get("num_stages", 1), constants.get("KEYS", 0)


def for_arch(variant: Variant, arch: int) -> Variant:
    """A variant of the table as it would be launched there."""
    if arch != HOPPER and variant.name == "int4_experts.gate_up_tile":
        variant = with_constants(variant, OUTPUTS=32)
    if arch == TENSOR_MEMORY and variant.name.startswith("int4_tile"):
        variant = with_constants(variant, INPUTS=128)
    if arch >= PDL_FROM:
        return variant
    variant = with_constants(variant, PDL=False, PREFETCH=0)
    options = {name: value for name, value in variant.options.items() if name != "launch_pdl"}
    return variant._replace(options=options)


def with_constants(variant: Variant, **others: object) -> Variant:
    """Those that it has of these."""
    return variant._replace(constants=[others.get(name, value) for name, value in constants_of(variant).items()])


def constants_of(variant: Variant) -> dict[str, Any]:
    names = [param.name for param in kernel_of(variant).params[len(variant.types) :]]
    return dict(zip(names, variant.constants, strict=False))


def described(variant: Variant) -> str:
    return f"{variant.name}: {variant.kernel} {constants_of(variant)} {variant.options}"


def cpu_seconds() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def ptx_hash(made: Any) -> str:
    text = re.sub(r"//.*", "", made.asm["ptx"].replace(made.metadata.name, "kernel"))
    lines = [line.strip() for line in text.split(".section")[0].splitlines()]
    return _hash("\n".join(line for line in lines if line and not line.startswith((".loc", ".file"))))


def sass_hash(made: Any) -> str:
    return _hash("\n".join(line.strip() for line in cuobjdump(made, "-sass").splitlines() if "/*" in line))


def cuobjdump(made: Any, what: str) -> str:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = [str(tools / "cuobjdump"), what, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def print_hashes(text: str) -> None:
    for variant in (*hopper_variants(), *triton_variants()):
        if text in variant.name:
            made = build(variant, HOPPER)
            print(f"{variant.name:24} ptx {ptx_hash(made)} sass {sass_hash(made)}", flush=True)


def main(arguments: list[str]) -> None:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # less to compile, and lines are no part of hashes
    if arguments[0] == "--hash":
        print_hashes("".join(arguments[1:]))
        return
    check = Check(is_all="--all" in arguments)
    if arguments[0] == "--layouts":
        check_layouts()
        return
    for arch in [int(argument) for argument in arguments if argument != "--all"]:
        check.run(arch)
    if check.wrong:
        sys.exit("\n".join(check.wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
