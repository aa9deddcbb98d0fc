"""An accelerated model that changes while some of its layers draft, which are made anew with it."""

from __future__ import annotations

from typing import Any

import torch

import outpace
from changing import by_adding, made
from unit.hf import test_changes
from unit.hf.test_changes import CALL, check_writes, stock, tokens

kernel = test_changes.kernel  # a fixture


def test_tokens_after_a_write_of_any_kind_are_those_of_stock(kernel: str) -> None:
    check_writes("early_exit:layers=1", kernel)


def test_an_engine_that_was_lent_before_a_write_is_not_used_after_it(kernel: str) -> None:
    model = outpace.accelerate(
        made(torch.float32, layers=2), "early_exit:layers=1", adaptive=False, pack=kernel
    )
    inner: list[Any] = []

    def write(input_ids: torch.Tensor, scores: Any) -> bool:
        if not inner:
            by_adding(model, "model.layers.1.mlp.down_proj.weight")
            inner.append(tokens(model))  # by another engine, made of the new weights
        return True

    model.generate(**CALL, stopping_criteria=[write])
    assert inner == [tokens(model)] == [stock(model)]
    # The first engine would be lent where two are needed.
    found: list[Any] = []
    model.generate(**CALL, stopping_criteria=[lambda *_: bool(found) or found.append(tokens(model)) or True])
    assert found == inner
