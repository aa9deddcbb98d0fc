"""An accelerated model that changes: the tokens are those of the model as it is, call by call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

import outpace
from changing import WRITES, by_adding, by_new_parameter, made
from outpace.native.layers import functions

CALL = {"input_ids": torch.tensor([[3, 6, 7, 11, 6, 7]]), "max_new_tokens": 12}


@pytest.fixture(params=["native", "packed"])
def plan(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if isinstance(why := functions(torch.float32), str):
        pytest.skip(why)
    return name


def tokens(model: Any) -> list[int]:
    found: list[int] = model.generate(**CALL)[0].tolist()
    return found


def stock(model: Any) -> list[int]:
    found: list[int] = Qwen3ForCausalLM.generate(model, **CALL)[0].tolist()
    return found


def test_tokens_after_a_write_of_any_kind_are_those_of_stock(plan: str) -> None:
    check_writes("lookahead", plan)


def check_writes(drafter: str, plan: str) -> None:
    model = outpace.accelerate(made(torch.float32, layers=2), drafter, plan=plan)
    seen = {tuple(tokens(model))}
    for write in WRITES:
        for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
            write(model, name)
            found = tokens(model)
            assert found == stock(model), f"{write.__name__}: {name}"
            seen.add(tuple(found))
    assert len(seen) > len(WRITES)


def test_an_engine_that_was_lent_before_a_write_is_not_used_after_it(plan: str) -> None:
    check_lent_engines("lookahead", plan)


def check_lent_engines(drafter: str, plan: str) -> None:
    model = outpace.accelerate(made(torch.float32, layers=2), drafter, adaptive=False, plan=plan)
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


def replace_a_module(model: Any) -> None:
    torch.manual_seed(3)
    model.model.layers[0].mlp.down_proj = nn.Linear(96, 64, bias=False)


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, output: output.roll(1, -1))


@pytest.mark.parametrize("change", [replace_a_module, add_a_hook])
def test_tokens_after_a_change_of_modules_are_those_of_stock(change: Any) -> None:
    model = outpace.accelerate(made(torch.float32, layers=2), "lookahead")
    before = tokens(model)
    change(model)
    assert tokens(model) == stock(model) != before
    by_adding(model, "lm_head.weight")
    assert tokens(model) == stock(model)


def test_low_rank_updates_that_are_inserted_merged_and_unmerged() -> None:
    peft = pytest.importorskip("peft")
    model = outpace.accelerate(made(torch.float32, layers=2), "lookahead")
    plain = tokens(model)
    torch.manual_seed(4)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval()
    found = [tokens(model)]
    assert found[0] == stock(model) != plain
    for change in (adapted.merge_adapter, adapted.unmerge_adapter, adapted.merge_and_unload):
        change()
        found.append(tokens(model))
        assert found[-1] == stock(model), change.__name__
    assert found == found[:1] * 4


def test_the_self_test_is_not_repeated_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr("outpace.targets.stock.causal.tested", lambda *given: runs.append(given) or "")
    model = outpace.accelerate(made(torch.float32), "none")
    assert len(runs) == 1
    by_new_parameter(model, "lm_head.weight")
    assert tokens(model) == stock(model) and len(runs) == 1
    model.model.norm = nn.LayerNorm(64)  # of another class
    assert tokens(model) == stock(model) and len(runs) == 2
