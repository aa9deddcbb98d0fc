"""Tiles of attention follow heads and shared memory; a refused kernel is replaced by torch's operations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from accelerator import Accelerator
from outpace.targets.gpu import tree_attention as attention
from outpace.targets.gpu.tiles import Tiles, shared_bytes, tiles_for

SHARED = {"sm_75, gfx942": 64, "sm_86, sm_89, sm_120": 99, "sm_80": 163, "sm_90, sm_100": 227}


@pytest.mark.parametrize("kib", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_into_every_chip(kib: int, itemsize: int) -> None:
    for size in (16, 64, 128, 256):
        for rows in (16, 64, 512):
            tiles = tiles_for(rows, size, size, itemsize, kib << 10)
            assert tiles.shared(size, size, itemsize) <= kib << 10
            assert tiles.rows <= rows


def test_more_shared_memory_gives_larger_tiles() -> None:
    found = [tiles_for(64, 256, 256, 2, kib << 10) for kib in SHARED.values()]
    assert found[0] != found[-1] == Tiles(64, 32, 3)
    taken = [tiles.shared(256, 256, 2) for tiles in found]
    assert taken == sorted(taken)
    assert tiles_for(64, 64, 64, 2, 1) == Tiles(16, 16, 1)  # the smallest where none fits


def test_a_gpu_tells_its_shared_memory() -> None:
    assert shared_bytes(torch.device("cpu")) == 64 << 10
    with Accelerator("cuda"):
        assert shared_bytes(torch.device("cuda", 0)) == 99 << 10


def test_a_refused_launch_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    from outpace.targets.gpu import tree_kernel

    def refused(*args: Any) -> Any:
        raise errors.OutOfResources(1, 0, "shared memory")

    monkeypatch.setattr(tree_kernel, "tree_attention", refused)
    attention._warn_of_refusal.cache_clear()
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, 3, 16, generator=generator) for _ in range(3)]
    mask = torch.tensor([[0, 0, 1], [0, 0, 3], [0, 0, 5]])[None, None]  # a root with two children
    expected = attention.tree_attention(torch.nn.Module(), *parts, mask)[0]
    with Accelerator("cuda"), torch.inference_mode(), caplog.at_level(logging.WARNING):
        given = [part.to("cuda:0") for part in (*parts, mask)]
        for _ in range(2):
            found = attention.tree_attention(torch.nn.Module(), *given)[0]
    assert torch.equal(found.inner, expected)  # type: ignore[attr-defined]
    (line,) = [record.message for record in caplog.records]
    assert "runs on torch's operations" in line and "shared memory" in line
