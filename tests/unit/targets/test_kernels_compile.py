"""Triton's compiler takes the kernels for GPUs; it needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "dtype"),
    [
        ("sm_75", "fp16"),
        ("sm_80", "fp16"),
        ("sm_86", "bf16"),
        ("sm_89", "bf16"),
        ("sm_90", "bf16"),
        ("sm_90", "fp32"),
        ("sm_100", "bf16"),
        ("sm_120", "bf16"),
        ("gfx942", "bf16"),
    ],
)
def test_kernels_compile_for_a_gpu(chip: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # In another process, since in this one kernels are for the interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), chip, dtype],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
