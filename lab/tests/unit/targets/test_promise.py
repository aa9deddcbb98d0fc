"""The promise of targets that are made of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from models import tiny_llama
from outpace.targets import CausalTarget
from outpace.targets.plan import StepPlan
from outpace_lab.ralm.knn import KnnTarget
from outpace_lab.targets import ContrastiveTarget, SplitTarget


def off(dtype: torch.dtype) -> CausalTarget:
    return CausalTarget(tiny_llama(dtype=dtype, heads=8), plan="stock")


def test_a_target_of_several_promises_what_the_weakest_does() -> None:
    strong, weak = off(torch.float64), off(torch.bfloat16)
    for pair in (ContrastiveTarget(strong, weak), ContrastiveTarget(weak, strong)):
        assert pair.promise == "not exact" and weak.why_inexact in pair.why_inexact and not pair.bit_exact
    strong.plan = StepPlan(exact=True, why_inexact=None)
    assert ContrastiveTarget(strong, strong).promise == "same bits"
    assert "amateur" in ContrastiveTarget(strong, weak).why_inexact
    store: Any = SimpleNamespace(keys=torch.zeros(4, 64), tokens=torch.zeros(4))
    assert KnnTarget(strong, store, neighbours=1).promise == "same tokens"


def test_a_target_in_parts_promises_what_its_model_does() -> None:
    weak = off(torch.bfloat16)
    split = SplitTarget(weak, 1)
    assert split.promise == "not exact" and split.why_inexact == weak.why_inexact
    assert not split.stock and SplitTarget(CausalTarget(tiny_llama(), stock=True), 1).stock
