"""The instruction sets of the processor that steps may use: the environment variable ``OUTPACE_CPU``.

It limits outpace's own compiled functions, and, by their own variables, torch, oneDNN and MKL, which read
those when they first run. So a machine shows what steps do on a lesser one. FBGEMM and llama.cpp know no such
limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from outpace.core import OutpaceError
from outpace.native.systems import feature, machine, sysctl

VARIABLE = "OUTPACE_CPU"
NATIVE = "native"  # all that the processor has


class Limit(NamedTuple):
    """A set of instructions.

    Attributes:
        march: the compilers' name of it.
        needs: what the system calls those of its instructions that not every such processor has.
        variables: limits of the libraries below outpace.
        machine: kind of the processor, as Python calls it.
    """

    march: str
    needs: frozenset[str]
    variables: Mapping[str, str]
    machine: str = "x86_64"


def _variables(torch: str, dnn: str, mkl: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": torch, "ONEDNN_MAX_CPU_ISA": dnn, "MKL_ENABLE_INSTRUCTIONS": mkl}


_AVX2 = frozenset(("avx2", "fma", "bmi1", "bmi2", "movbe", "f16c", "abm"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq"),
    *("avx512ifma", "avx512vbmi", "avx_vnni", "gfni", "vaes", "vpclmulqdq", "sha_ni", "movdiri", "movdir64b"),
    *("amx_tile", "amx_bf16", "amx_int8"),
}
_DOT, _BF16, _I8MM = (frozenset((name,)) for name in ("asimddp", "bf16", "i8mm"))
LIMITS = {
    "x86-64": Limit("x86-64", frozenset(), _variables("default", "SSE41", "SSE4_2")),
    "avx2": Limit("haswell", _AVX2, _variables("avx2", "AVX2", "AVX2")),
    "avx512": Limit("skylake-avx512", _AVX512, _variables("avx512", "AVX512_CORE", "AVX512")),
    "avx512-bf16": Limit(
        "cooperlake",
        _AVX512 | {"avx512_vnni", "avx512_bf16"},
        _variables("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
    ),
    "amx": Limit("sapphirerapids", _AMX, _variables("avx512", "AVX512_CORE_AMX", "AVX512_E4")),
    "armv8": Limit("armv8-a", frozenset(), {}, "aarch64"),
    "armv8-dot": Limit("armv8.2-a+dotprod", _DOT, {}, "aarch64"),
    "armv8-bf16": Limit("armv8.2-a+dotprod+bf16", _DOT | _BF16, {}, "aarch64"),
    "armv8-i8mm": Limit("armv8.2-a+dotprod+bf16+i8mm", _DOT | _BF16 | _I8MM, {}, "aarch64"),
}


class _Told(NamedTuple):
    """How systems tell of instructions.

    Attributes:
        names: of those that a processor has together, as Linux calls them.
        auxv: Linux's entry about the processor, and the bit in it.
        sysctl: macOS's name.
        feature: Windows' number, of ``IsProcessorFeaturePresent``.
    """

    names: frozenset[str]
    auxv: tuple[int, int] | None
    sysctl: str
    feature: int


# With AVX2, processors of macOS and Windows have all that Haswell has, and with AVX-512 its five parts.
_TOLD = {
    "x86_64": (
        _Told(_AVX2, None, "hw.optional.avx2_0", 40),
        _Told(_AVX512 - _AVX2, None, "hw.optional.avx512vl", 41),
    ),
    "aarch64": (
        _Told(_DOT, (16, 20), "hw.optional.arm.FEAT_DotProd", 43),
        _Told(_BF16, (26, 14), "hw.optional.arm.FEAT_BF16", 68),
        _Told(_I8MM, (26, 13), "hw.optional.arm.FEAT_I8MM", 66),
    ),
}
ELSEWHERE = frozenset().union(
    *(told.names for kind in _TOLD.values() for told in kind)
)  # known on every system
_LIKE = {"x86_64": "x86-64", "aarch64": "64-bit ARM"}  # what people call the kinds


def limit_of(name: str, machine: str, found: Collection[str]) -> Limit | None:
    """The limit of a name; None for all that the processor has.

    Args:
        machine: kind of the processor, as Python calls it.
        found: the instructions that it has.

    Raises:
        OutpaceError: the name is unknown, or the processor lacks some of its instructions.
    """
    if name in ("", NATIVE):
        return None
    if name not in LIMITS:
        known = [one for one, limit in LIMITS.items() if limit.machine == machine] or LIMITS
        raise OutpaceError(f"{VARIABLE} must be {', '.join(known)} or {NATIVE}, not {name!r}")
    if machine != LIMITS[name].machine:
        kind = _LIKE[LIMITS[name].machine]
        raise OutpaceError(f"{VARIABLE}={name} is for {kind}, and this processor is {machine}; leave it out")
    if lacks := sorted(LIMITS[name].needs.difference(found)):
        raise OutpaceError(
            f"{VARIABLE}={name} needs {', '.join(lacks)}, which this processor lacks; it can be limited to "
            f"{', '.join(limits(machine, found)) or NATIVE}"
        )
    return LIMITS[name]


def limits(machine: str, found: Collection[str]) -> list[str]:
    """The names of the sets that such a processor can be limited to."""
    return [name for name, one in LIMITS.items() if machine == one.machine and one.needs.issubset(found)]


def instructions() -> frozenset[str]:
    """The instructions that the processor has, as Linux calls them and as far as the system tells."""
    told = _TOLD.get(machine(), ())
    if sys.platform == "linux" and machine() == "aarch64":
        return _union(one for one in told if one.auxv is not None and _auxv(one.auxv[0]) >> one.auxv[1] & 1)
    if sys.platform == "darwin":
        return _union(one for one in told if sysctl(one.sysctl))
    if sys.platform == "win32":
        return _union(one for one in told if feature(one.feature))
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _union(told: Iterable[_Told]) -> frozenset[str]:
    return frozenset(name for one in told for name in one.names)


def _auxv(entry: int) -> int:
    """An entry about the processor; an emulated one has the /proc/cpuinfo of the real one."""
    function = ctypes.CDLL(None).getauxval
    function.argtypes, function.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(function(entry))


def chosen() -> Limit | None:
    """The limit of this process; None without one."""
    name = os.environ.get(VARIABLE, "")
    return limit_of(name, machine(), instructions()) if name else None


def limit_libraries() -> None:
    """Set the limits of the libraries, unless they are set.

    Raises:
        OutpaceError: they are not, and torch is imported already; or the errors of ``limit_of``.
    """
    limit = chosen()
    missing = {} if limit is None else {k: v for k, v in limit.variables.items() if k not in os.environ}
    if missing and "torch" in sys.modules:
        wanted = " ".join(f"{name}={value}" for name, value in missing.items())
        raise OutpaceError(
            f"{VARIABLE} limits torch too, which is imported already: import outpace first, or set {wanted}"
        )
    os.environ.update(missing)
