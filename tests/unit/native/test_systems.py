"""Systems and compilers: what a library is compiled for, and how the compiler is told."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.core import OutpaceError
from outpace.files import why_reachable
from outpace.native import layers, packaged, pool, systems
from outpace.native.instructions import LIMITS
from outpace.native.processors import usual_threads
from outpace.native.systems import Platform, here, machine, platform_of

FAST = "cores, of the fast kind where there are two"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("linux_x86_64", ("linux", "x86_64")),
        ("manylinux_2_28_aarch64", ("linux", "aarch64")),
        ("macosx_11_0_arm64", ("darwin", "aarch64")),
        ("macosx_11_0_x86_64", ("darwin", "x86_64")),
        ("win_amd64", ("win32", "x86_64")),
        ("win_arm64", ("win32", "aarch64")),
    ],
)
def test_platforms_of_wheels(tag: str, expected: tuple[str, str]) -> None:
    assert platform_of(tag) == expected


@pytest.mark.parametrize(
    "tag", ["macosx_10_13_universal2", "musllinux_1_2_x86_64", "win32", "linux_riscv64", "2"]
)
def test_other_platforms_are_refused(tag: str) -> None:
    with pytest.raises(OutpaceError, match=f"no compiled functions for '{tag}'; set OUTPACE_LIBRARIES to"):
        platform_of(tag)


@pytest.mark.parametrize(
    ("system", "python", "kernel", "expected"),
    [
        ("linux", "linux-aarch64", "aarch64", "aarch64"),
        ("darwin", "macosx-11.0-universal2", "arm64", "aarch64"),
        ("darwin", "macosx-11.0-universal2", "x86_64", "x86_64"),
        ("win32", "win-amd64", "ARM64", "x86_64"),  # emulated: the process is what counts
        ("win32", "win-arm64", "ARM64", "aarch64"),
    ],
)
def test_the_processor_is_that_of_the_process(
    system: str, python: str, kernel: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr(platform, "machine", lambda: kernel)
    assert machine() == expected and here() == (system, expected)


def test_a_system_without_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "sys", SimpleNamespace(platform="freebsd14"))
    assert here() == "compiled functions are for Linux, macOS, Windows, not freebsd14"
    with pytest.raises(OutpaceError, match="not freebsd14"):
        list(packaged.make_libraries(packaged.LIBRARIES))


@pytest.mark.parametrize(
    ("name", "compiler", "march", "expected"),
    [
        (("linux", "x86_64"), "gcc", "haswell", "-march=haswell -fPIC"),
        (("win32", "x86_64"), "clang", "native", "-march=native"),
        (("win32", "x86_64"), "/at/clang-cl.exe", "haswell", "--driver-mode=gcc -march=haswell"),
        (("darwin", "aarch64"), "cc", "armv8.2-a+dotprod", "-march=armv8.2-a+dotprod -fPIC"),
        (("win32", "x86_64"), "zig", "skylake-avx512", "-target x86_64-windows-gnu -mcpu=skylake_avx512"),
        (("win32", "aarch64"), "/at/zig.exe", "armv8-a", "-target aarch64-windows-gnu -mcpu=generic"),
        (
            ("darwin", "aarch64"),
            "python -m ziglang cc",
            "armv8.2-a+dotprod+bf16+i8mm",
            "-target aarch64-macos.11.0 -mcpu=generic+dotprod+bf16+i8mm -fPIC",
        ),
    ],
)
def test_compilers_are_told_in_their_words(
    name: tuple[str, str], compiler: str, march: str, expected: str
) -> None:
    assert Platform(*name).options(march, compiler.split()) == expected.split()


def test_wheels_have_the_sets_whose_instructions_a_system_tells_of() -> None:
    sets = packaged.SETS
    assert packaged.sets_of(Platform("linux", "x86_64")) == sets["x86_64"]
    assert packaged.sets_of(Platform("darwin", "aarch64")) == sets["aarch64"]
    assert packaged.sets_of(Platform("win32", "x86_64")) == (LIMITS["avx512"], LIMITS["avx2"])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_above_that_is_another_users_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "below"
    folder.mkdir(parents=True)
    assert why_reachable(folder) is None
    os.chown(folder.parent, 65534, 65534)
    assert why_reachable(folder) == f"of {folder.parent} above it: user 65534 owns it"


def test_cores_are_those_that_the_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's fast ones; a Windows machine's, of two processors each, beside records of caches."""
    assert usual_threads().because != FAST and systems.cores() == 0
    monkeypatch.setattr(systems, "sys", SimpleNamespace(platform="darwin"))
    for told, expected in (
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4),
        ({"hw.physicalcpu": 6}, 6),
    ):
        monkeypatch.setattr(systems, "sysctl", lambda name, told=told: told.get(name, 0))
        assert systems.cores() == expected and usual_threads() == (expected, FAST, False)
    records = b"".join(
        (3 << 2 * at).to_bytes(8, "little") + kind.to_bytes(24, "little")
        for at, kind in enumerate((0, 2, 0, 3))
    )

    def asked(room: Any, size: Any) -> None:
        size._obj.value = len(records)
        if room is not None:
            room.raw = records

    monkeypatch.setattr(systems, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(GetLogicalProcessorInformation=asked))
    assert systems.cores() == 2


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("layers.c", {*layers._SIGNATURES, *(f"size_of_{name}" for name in layers.STRUCTS), "use_pool"}),
        ("draw.c", {"draw_rows", "widen", "size_of_draw", "use_pool"}),
        ("move.c", {"move_rows"}),
        ("pool.c", {*pool._SIGNATURES, "pool_share"}),
    ],
)
def test_functions_that_python_calls_are_shown(file: str, names: set[str]) -> None:
    """Windows' libraries have no others; a linker that shows all leaves some names out."""
    text = packaged.text_of(packaged.FOLDER / file)
    assert names <= set(re.findall(r"^SHOWN \w[\w *]*?\b(\w+)\(", text, re.MULTILINE))


def test_sizes_have_the_same_bits_on_every_system() -> None:
    """``long`` has 32 on Windows; in the files about GGUF it is another word for ``int64_t``."""
    codes = {
        path.name: re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
        for path in packaged.FOLDER.glob("*.[ch]")
    }
    first, defined, _ = codes.pop("quants.h").partition("#define long int64_t")
    last = codes.pop("quant_products.h")
    assert defined and last.rstrip().endswith("#undef long")
    assert '#include "quants.h"' in last.partition("long")[0]
    assert not [name for name, code in {**codes, "quants.h": first}.items() if re.search(r"\blong\b", code)]
