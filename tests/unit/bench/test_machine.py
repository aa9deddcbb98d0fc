"""The description of a benchmark's machine."""

from __future__ import annotations

import pytest
import torch

from outpace.bench.machine import machine


def test_the_device_is_the_one_that_the_model_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"a GPU, {device}")
    assert "device" not in machine("cpu") and machine("cpu")["processor"]
    assert machine("cuda:1")["device"] == "a GPU, cuda:1"
