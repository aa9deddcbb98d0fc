"""``OUTPACE_CPU``: what it limits, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from outpace.core import OutpaceError
from outpace.native import build, packaged
from outpace.native import instructions as module
from outpace.native.instructions import LIMITS, VARIABLE, instructions, limit_of, limits
from outpace.native.systems import machine

HERE = limits(machine(), instructions())
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
    with pytest.raises(
        OutpaceError, match="must be armv8, armv8-dot, armv8-bf16, armv8-i8mm or native, not 'avx'"
    ):
        limit_of("avx", "aarch64", ())
    assert limits("aarch64", ("asimddp",)) == ["armv8", "armv8-dot"]
    assert limit_of("native", "aarch64", ()) is None is limit_of("", "x86_64", ())
    assert limit_of("avx2", "x86_64", LIMITS["avx512"].needs) == LIMITS["avx2"]


# What each system is asked of a processor, and the answers of one that has the first of them, in order.
QUESTIONS = {
    ("linux", "aarch64"): (
        "_auxv",
        [{16: 0, 26: 0}, {16: 1 << 20, 26: 0}, {16: 1 << 20, 26: 1 << 14}, {16: 1 << 20, 26: 3 << 13}],
    ),
    ("darwin", "aarch64"): (
        "sysctl",
        [
            {f"hw.optional.arm.FEAT_{name}": 1 for name in ("DotProd", "BF16", "I8MM")[:count]}
            for count in range(4)
        ],
    ),
    ("win32", "aarch64"): ("feature", [dict.fromkeys((43, 68, 66)[:count], 1) for count in range(4)]),
    ("darwin", "x86_64"): (
        "sysctl",
        [{}, {"hw.optional.avx2_0": 1}, {"hw.optional.avx2_0": 1, "hw.optional.avx512vl": 1}],
    ),
    ("win32", "x86_64"): ("feature", [{}, {40: 1}, {40: 1, 41: 1}]),
}


@pytest.mark.parametrize(("system", "kind"), QUESTIONS)
def test_each_system_tells_of_the_instructions_in_its_own_way(
    system: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, processors = QUESTIONS[system, kind]
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(module, "machine", lambda: kind)
    for answers, known in zip(processors, range(1, 5), strict=False):
        monkeypatch.setattr(module, question, lambda asked, answers=answers: answers.get(asked, 0))
        names = [name for name, limit in LIMITS.items() if limit.machine == kind]
        assert limits(kind, instructions()) == names[:known]
        best = packaged.fitting(kind, instructions(), None)
        assert best is (LIMITS[names[known - 1]] if names[known - 1] != "x86-64" else None)


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
