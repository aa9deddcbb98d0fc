"""The threads of functions in C: the pool's own checks (``pool_check.c``), and that all libraries use it."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.native import draw, layers
from outpace.native.build import compiler_command
from outpace.native.packaged import FOLDER, FORMS, text_of
from outpace.native.pool import follow_torch, pool
from outpace.native.systems import SYSTEMS
from outpace.targets.cpu.trials import using_threads

CHECKS = Path(__file__).with_name("pool_check.c")
NAMES = (
    *("every_chunk_once", "nested", "callers", "forks", "exit_in_the_middle", "interrupts_are_the_callers"),
    *("a_worker_that_does_not_run_holds_one_chunk", "no_thread_can_be_had"),
)
SANITISED = "thread sanitiser"
COMMAND = compiler_command()
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or isinstance(COMMAND, str) or isinstance(pool(), str),
    reason="needs a C compiler",
)


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checks as a program; a race that the sanitiser sees ends it with an error."""
    made = tmp_path_factory.mktemp("pool") / "check"
    flags = ["-fsanitize=thread", "-g", "-O1"] if request.param == SANITISED else ["-O3"]
    options = ["-std=gnu11", *flags, f"-I{FOLDER}", str(CHECKS), "-o", str(made), *SYSTEMS["linux"].libraries]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    if done.returncode and request.param != "plain":
        pytest.skip(f"{shlex.join(COMMAND)} has no thread sanitiser")
    assert not done.returncode, done.stderr
    return made


# Forks take the sanitiser ten seconds.
CASES = [
    pytest.param(kind, name, marks=pytest.mark.slow if (kind, name) == (SANITISED, "forks") else ())
    for kind in ("plain", SANITISED)
    for name in NAMES
]


@pytest.mark.parametrize(("program", "name"), CASES, indirect=["program"])
def test_the_pool(program: Path, name: str) -> None:
    options = {"TSAN_OPTIONS": "die_after_fork=0:exitcode=66"}
    done = subprocess.run(
        [program, name],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if "FATAL: ThreadSanitizer" in done.stderr:  # where the system places memory as it does not expect
        pytest.skip(done.stderr)
    assert not done.returncode, f"status {done.returncode}\n{done.stderr}"


def test_every_library_that_shares_work_uses_the_pool_of_the_process() -> None:
    shared = pool()
    assert not isinstance(shared, str)
    expected = ctypes.cast(shared.library.pool_share, ctypes.c_void_p).value
    for library in (draw.functions(), *map(layers.functions, (torch.float32, torch.bfloat16))):
        library.pool_in_use.restype = ctypes.c_void_p
        assert library.pool_in_use() == expected


def test_functions_follow_torchs_number_of_threads() -> None:
    shared = pool()
    assert not isinstance(shared, str)
    usual = shared.library.pool_usual_threads()
    with using_threads(shared.torch_threads + 3):
        assert follow_torch() == shared.library.pool_threads() == shared.torch_threads + 3
    with using_threads(shared.torch_threads):
        assert follow_torch() == usual <= shared.torch_threads


def test_no_source_names_openmp() -> None:
    for name, flags in FORMS:
        text = text_of(FOLDER / name) + " ".join(flags)
        assert "omp " not in text and "omp_" not in text and "openmp" not in text.lower()
