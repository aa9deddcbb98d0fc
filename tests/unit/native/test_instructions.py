"""``OUTPACE_CPU``: what it limits, and what it refuses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from outpace.core import OutpaceError
from outpace.native import build
from outpace.native.instructions import LIMITS, VARIABLE, instructions, limit_of, limits

HERE = limits(platform.machine(), instructions())
NAMES = {name for one in LIMITS.values() for name in one.variables}
SHOW = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in (*NAMES, VARIABLE)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**own, **variables}, capture_output=True, text=True, check=False)


def test_unknown_and_missing_sets_are_refused() -> None:
    with pytest.raises(
        OutpaceError, match="must be x86-64, avx2, avx512, avx512-bf16, amx or native, not 'mmx'"
    ):
        limit_of("mmx", "x86_64", ())
    with pytest.raises(
        OutpaceError, match=r"needs avx512_bf16, avx512_vnni, .* limited to x86-64, avx2, avx512$"
    ):
        limit_of("avx512-bf16", "x86_64", LIMITS["avx512"].needs)
    with pytest.raises(OutpaceError, match="is for x86-64, and this processor is aarch64; leave it out"):
        limit_of("avx2", "aarch64", ())
    with pytest.raises(OutpaceError, match="is for 64-bit ARM, and this processor is x86_64; leave it out"):
        limit_of("armv8-dot", "x86_64", ())
    with pytest.raises(OutpaceError, match="must be armv8, armv8-dot, armv8-bf16 or native, not 'avx'"):
        limit_of("avx", "aarch64", ())
    assert limits("aarch64", ("asimddp",)) == ["armv8", "armv8-dot"]
    assert limit_of("native", "aarch64", ()) is None is limit_of("", "x86_64", ())
    assert limit_of("avx2", "x86_64", LIMITS["avx512"].needs) == LIMITS["avx2"]


def test_an_unknown_set_is_refused_when_outpace_is_imported() -> None:
    found = python("import outpace", OUTPACE_CPU="mmx")
    assert found.returncode and "OUTPACE_CPU must be" in found.stderr


@pytest.mark.skipif("x86-64" not in HERE, reason="for x86-64 under Linux")
def test_torch_is_limited_if_outpace_is_imported_first() -> None:
    found = python(f"import outpace; {SHOW}", OUTPACE_CPU="x86-64")
    assert found.stdout.strip() == "DEFAULT", found.stderr
    found = python("import torch, outpace", OUTPACE_CPU="x86-64")
    assert found.returncode
    assert "import outpace first, or set ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=" in found.stderr
    set_ = {**LIMITS["x86-64"].variables, VARIABLE: "x86-64"}
    assert python(f"import torch, outpace; {SHOW}", **set_).stdout.strip() == "DEFAULT"


@pytest.mark.parametrize("name", HERE)
def test_functions_are_compiled_for_the_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setenv(VARIABLE, name)

    def noted(compiler: object, options: list[str]) -> bytes:
        commands.append(options)
        raise OutpaceError("not now")

    monkeypatch.setattr(build._Compiler, "library", noted)
    build.compiled(build.Path(__file__), {})
    assert all(f"-march={LIMITS[name].march}" in command for command in commands)
    assert len(commands) == (build.shutil.which(os.environ.get("CC", "cc")) is not None)


def test_a_limit_is_part_of_the_key_of_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from outpace.targets.hardware import hardware

    monkeypatch.setattr("outpace.targets.hardware.chosen", lambda: None)
    whole = hardware([torch.device("cpu")])
    monkeypatch.setattr("outpace.targets.hardware.chosen", lambda: LIMITS["avx2"])
    assert set(hardware([torch.device("cpu")])) - set(whole) == {"limited to haswell"}
