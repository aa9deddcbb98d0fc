"""Compiled functions on logits."""

import pytest
import torch

from outpace.native import draw


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_in_float32(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    for given in (rows, rows[:, 5:], rows[1]):
        assert torch.equal(draw.as_float32(given).view(torch.int32), given.float().view(torch.int32))


def test_rows_in_float32_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "functions", lambda: "none")
    assert torch.equal(draw.as_float32(torch.ones(2, 3).bfloat16()), torch.ones(2, 3))
