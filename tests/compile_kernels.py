"""Compile outpace's Triton kernels for GPUs: ``python compile_kernels.py CHIP DTYPE``. Needs no GPU.

The interpreter runs code that the compiler refuses, such as a name that changes its type in a loop. Each
kernel's shared memory is compared with what a program may take on the chip.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.draws import draw_kernel
from outpace.targets.gpu import invariant_kernels, tree_kernel
from outpace.targets.gpu.tiles import tiles_for

# Chip -> the compiler's target, and the most shared memory of a program, in KiB.
CHIPS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 64),  # T4, RTX 20
    "sm_80": (GPUTarget("cuda", 80, 32), 163),  # A100
    "sm_86": (GPUTarget("cuda", 86, 32), 99),  # A10, RTX 30
    "sm_89": (GPUTarget("cuda", 89, 32), 99),  # L4, L40S, RTX 40
    "sm_90": (GPUTarget("cuda", 90, 32), 227),  # H100, H200
    "sm_100": (GPUTarget("cuda", 100, 32), 227),  # B200
    "sm_120": (GPUTarget("cuda", 120, 32), 99),  # RTX 50
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),  # MI300
}

_FLOATS = {"scale", "softcap", "epsilon", "margin"}
_POINTERS = {"Acc": "fp32", "Top": "fp32", "Sum": "fp32", "Paths": "i32", "Mask": "i64"}
_DRAWS = {"Best": "fp64", "Second": "fp64", "Peak": "fp32", "Token": "i32", "Keys": "i64", "Ids": "i64"}
_DRAWS |= {"Low": "fp32", "High": "fp32", "Score": "fp32"}
_HEADS = {"D": 80, "BD": 128, "DV": 128, "BV": 128, "BM": 16, "BN": 32, "GROUPS": 4, "CAP": True}
_MERGED = {"DV": 128, "BV": 128, "BM": 16, "GROUPS": 4, "SINKS": True}

# Kernels, and constants of their launches; a whole number that is 1 becomes one too.
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (tree_kernel._stretch, {**_HEADS, "WIDE": False}),
    (tree_kernel._stretch, {**_HEADS, "WIDE": False, "CAP": False, "width": 1, "heads": 1, "words": 1}),
    (tree_kernel._merge, {**_MERGED, "STRETCHES": 4}),
    (invariant_kernels._stretch, {**_HEADS, "WIDE": False, "SPLIT": 512}),
    (invariant_kernels._stretch, {**_HEADS, "WIDE": False, "SPLIT": 512, "CAP": False, "heads": 1}),
    (invariant_kernels._merge, _MERGED),
    (invariant_kernels._linear, {"BM": 16, "BN": 32, "BK": 128, "BIAS": True, "WIDE": False}),
    (invariant_kernels._norm, {"BLOCK": 4096, "ONE": True, "ROUND": True}),
    (draw_kernel._cuts, {"BLOCK": 512, "WAYS": 16}),
    (draw_kernel._blocks, {"BLOCK": 1024, "IDS": True, "CUT": True}),
    (draw_kernel._blocks, {"BLOCK": 1024, "IDS": False, "CUT": False}),
    (draw_kernel._choose, {"BLOCKS": 128, "SURE": True, "CUT": True}),
    (draw_kernel._choose, {"BLOCKS": 128, "SURE": False, "CUT": True}),
]
HEAD_SIZES = (64, 128, 256)


def compiled(kernel: Any, constants: dict[str, Any], target: GPUTarget, dtype: str, **options: int) -> Any:
    """Compile a kernel for a GPU, with rows of a dtype; ``options`` as ``num_stages``."""
    types = (
        _DRAWS | {"Out": "i64", "Scores": "fp32"} if kernel.__module__.endswith("draw_kernel") else _POINTERS
    )

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name[0].isupper():
            return "*" + types.get(name, dtype)
        return "fp32" if name in _FLOATS else "i32"

    names = kernel.arg_names
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: kind(name) for name in names}, places)
    return triton.compile(source, target=target, options=options or None)


def attention(size: int, dtype: str, shared: int) -> tuple[dict[str, Any], int]:
    """Constants and stages of tree attention as it is launched for heads of a size."""
    tiles = tiles_for(64, size, size, 4 if dtype == "fp32" else 2, shared)
    heads = {**_HEADS, "D": size, "BD": size, "DV": size, "BV": size, "BM": tiles.rows, "BN": tiles.columns}
    return {**heads, "WIDE": False}, tiles.stages


def main(chip: str, dtype: str) -> None:
    target, limit = CHIPS[chip]
    shared = limit << 10
    for size in HEAD_SIZES:
        constants, stages = attention(size, dtype, shared)
        made = compiled(tree_kernel._stretch, constants, target, dtype, num_stages=stages)
        assert made.metadata.shared <= shared, f"heads of {size} take {made.metadata.shared} bytes"
    for kernel, constants in KERNELS:
        made = compiled(kernel, constants, target, dtype)
        assert made.asm["cubin" if target.backend == "cuda" else "hsaco"], kernel


if __name__ == "__main__":
    main(*sys.argv[1:])
