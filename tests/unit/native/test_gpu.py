"""Triton is asked once whether it runs kernels here."""

from __future__ import annotations

import pytest
import torch

from outpace.draws import many_rows
from outpace.native import gpu, gpu_probe


def test_what_triton_lacks_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(gpu_probe, "run", fails)
    reason = gpu.why_no_triton.__wrapped__()
    assert reason.startswith("Triton runs no kernel here: Failed to find C compiler.; install gcc")
    assert reason in caplog.text
    monkeypatch.setattr(many_rows, "why_no_triton", lambda: reason)
    assert not many_rows.has_kernels(torch.device("cuda"))


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert "pip install triton" in gpu.why_no_triton.__wrapped__()


def test_the_probe_runs() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # in the interpreter
    gpu_probe.run(device)
