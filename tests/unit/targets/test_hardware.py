"""The names of processors and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models import tiny_llama
from outpace.targets import Target, hardware

NAMES = {0: "a small GPU", 1: "a large GPU"}


def test_two_processors_of_one_architecture_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "_PROCESSORS", file)
    target = Target(tiny_llama(dtype=torch.float32))
    found = set()
    for name in ("EPYC 1", "Laptop 2"):
        file.write_text(f"vendor_id : some\nmodel name\t: {name}\nmodel name\t: {name}\n", "utf-8")
        assert hardware.processor() == name and f", cpu, {name}, " in target.identity
        found.add(target.identity)
    assert len(found) == 2


def test_a_system_that_does_not_say_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_PROCESSORS", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert hardware.hardware([torch.device("cpu")]) == ["abacus", f"{torch.get_num_threads()} threads"]


def test_a_gpu_is_the_one_that_holds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAMES[device.index])
    assert hardware.hardware([torch.device("cuda:1"), torch.device("cpu")]) == ["a large GPU"]
    both = [torch.device("cuda:1"), torch.device("cuda:0")]
    assert hardware.hardware(both) == ["a large GPU", "a small GPU"]
