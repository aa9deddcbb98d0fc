"""Interrupts of an accelerated generate(): the next call, and the stock one, give the right tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outpace
from interrupts import interrupt, lines, spread
from models import tiny_llama
from outpace.hf.engines import Engines
from outpace.targets.inputs import positions
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES


def check(model: Any, inputs: dict[str, Any], every: int, **options: Any) -> None:
    """Interrupt an accelerated model at lines of a call."""
    stock = model.generate(**inputs)
    outpace.accelerate(model, adaptive=False, **options)

    def call() -> Any:
        return model.generate(**inputs)

    assert torch.equal(call(), stock)
    for line, time in spread(lines(call), every):
        interrupt(call, line, time)
        assert torch.equal(call(), stock), f"interrupted at {line}, the {time}. time"
    outpace.restore(model)
    assert torch.equal(model.generate(**inputs), stock)


@pytest.mark.parametrize("every", [80, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line(every: int) -> None:
    ids = torch.tensor([[7, 8, 7, 8, 7], [0, 0, 9, 4, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False}
    check(tiny_llama(), inputs, every, drafter="lookahead:window=2,ngram=3")


@pytest.mark.parametrize("every", [120, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_with_an_encoder(every: int) -> None:
    """BART's positions are passed by hooks, which an interrupt may leave behind."""
    ids = torch.tensor([[7, 8, 7, 8, 7], [6, 5, 9, 4, 3]])
    inputs = {"input_ids": ids, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    check(SEQ2SEQ_FAMILIES["bart"].build(), inputs, every, drafter="lookahead:window=2,ngram=3")


def test_an_interrupt_at_any_line_that_passes_positions() -> None:
    """The model itself is usable at once: a hook that is left behind does nothing."""
    inputs = {"input_ids": torch.tensor([[7, 8, 7, 6]]), "max_new_tokens": 5, "do_sample": False}
    model = SEQ2SEQ_FAMILIES["bart"].build()
    stock = model.generate(**inputs)
    outpace.accelerate(model, "lookahead:window=2,ngram=3", adaptive=False)

    def call() -> Any:
        return model.generate(**inputs)

    found = {line: count for line, count in lines(call).items() if line.file == positions.__file__}
    for line, count in sorted(found.items()):
        for time in (1, count):
            assert interrupt(call, line, time)
            assert torch.equal(type(model).generate(model, **inputs), stock), str(line)
            assert torch.equal(call(), stock), str(line)


@pytest.mark.parametrize("line", ["yield", "engine.close()", "self._idle.append(engine)"])
def test_an_interrupt_while_an_engine_is_lent_or_given_back(line: str) -> None:
    inputs = {"input_ids": torch.tensor([[7, 8, 7]]), "max_new_tokens": 4, "do_sample": False}
    model = tiny_llama()
    stock = model.generate(**inputs)
    outpace.accelerate(model, "lookahead:window=2,ngram=3", adaptive=False)
    at = [one for one in lines(lambda: model.generate(**inputs)) if line in one.text]
    assert at and Engines.__module__.replace(".", "/") in at[0].file
    for one in at:
        assert interrupt(lambda: model.generate(**inputs), one)
        assert torch.equal(model.generate(**inputs), stock)
