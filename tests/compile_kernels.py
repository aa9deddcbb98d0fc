"""Compile outpace's Triton kernels for GPUs: ``python compile_kernels.py CAPABILITY DTYPE``. Needs no GPU.

The interpreter runs code that the compiler refuses, such as a name that changes its type in a loop.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.targets.gpu import invariant_kernels, tree_kernel

_FLOATS = {"scale", "softcap", "epsilon"}
_POINTERS = {"Acc": "fp32", "Top": "fp32", "Sum": "fp32", "Paths": "i32", "Mask": "i64"}
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
]


def compiled(kernel: Any, constants: dict[str, Any], target: GPUTarget, dtype: str) -> Any:
    """Compile a kernel for a GPU, with rows of a dtype."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name[0].isupper():
            return "*" + _POINTERS.get(name, dtype)
        return "fp32" if name in _FLOATS else "i32"

    names = kernel.arg_names
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: kind(name) for name in names}, places)
    return triton.compile(source, target=target)


if __name__ == "__main__":
    for kernel, constants in KERNELS:
        made = compiled(kernel, constants, GPUTarget("cuda", int(sys.argv[1]), 32), sys.argv[2])
        assert made.asm["cubin"], kernel
