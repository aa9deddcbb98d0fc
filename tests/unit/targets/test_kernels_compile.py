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
    ("capability", "dtype"),
    [(90, "bf16"), (80, "fp16"), (90, "fp32")],
)
def test_kernels_compile_for_a_gpu(capability: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # In another process, since in this one kernels are for the interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
