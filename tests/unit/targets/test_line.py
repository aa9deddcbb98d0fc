"""Forwards without padding: a line of rows has the logits, hidden states and keys of the padded forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import outpace
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Output, Rows
from outpace.targets.batch import Batch
from outpace.targets.inputs import line
from parts import in_turn
from zoo.families import FAMILIES

PROMPTS = [[5, 9, 9, 2], [3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 2, 7, 2]]
FEEDS = [Rows([1, 2, 3, 4, 5, 6, 7], (-1, 0, 0, 1, 1, 2, 4)), Rows([8]), Rows([4, 4]), Rows([6])]


@contextmanager
def rows_computed(model: Any) -> Iterator[list[int]]:
    """Numbers of rows that the model's embeddings are called with; copies of the model share them."""
    found: list[int] = []
    layer, table = model.get_input_embeddings(), torch.nn.functional.embedding

    def count(ids: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        if weight is layer.weight:
            found.append(ids.numel())
        return table(ids, weight, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "embedding", count)
        yield found


def decoded(target: CausalTarget) -> tuple[Output, Output, Output]:
    """The outputs of prompts of several lengths, of a tree beside chains, and of one row after each."""
    cache = target.new_cache(slots=4)
    slots = [cache.allocate() for _ in PROMPTS]
    prompts = target.forward(
        cache, Batch.of(dict(zip(slots, map(Rows, PROMPTS), strict=True)), None), [0, -1]
    )
    cache.keep({slot: range(len(prompt)) for slot, prompt in zip(slots, PROMPTS, strict=True)})
    steps = target.forward(cache, Batch.of(dict(zip(slots, FEEDS, strict=True))), [1])
    cache.keep(dict(zip(slots, ([0, 1, 4, 6], [0], [0, 1], [0]), strict=True)))
    after = target.forward(cache, Batch.of({slot: [11] for slot in slots}))
    return prompts, steps, after


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_line_has_the_logits_of_the_padded_forward(implementation: str) -> None:
    model: Any = tiny_llama()
    model.set_attn_implementation(implementation)
    target = CausalTarget(model)
    with rows_computed(model) as counts:
        found = decoded(target)
    # A model whose attention has no form for lines is padded.
    assert counts == ([18, 11, 4] if implementation == "sdpa" else [32, 28, 4])
    target._modules.line = None
    for one, other in zip(found, decoded(target), strict=True):
        # A slot's hidden states may be followed by padding.
        for states, others in zip(one.hidden.values(), other.hidden.values(), strict=True):
            for layer, rows in states.items():
                torch.testing.assert_close(rows, others[layer][: len(rows)])
        assert [*one.spans.values()] == [*other.spans.values()]
        if one.logits is not None:
            torch.testing.assert_close(one.logits, other.logits)


@pytest.mark.parametrize(
    ("drafter", "dtype"),
    in_turn(
        ["prompt_lookup:branches=2", "lookahead:window=4,ngram=4,guesses=4"], [torch.float64, torch.bfloat16]
    ),
)
def test_tokens_are_those_of_each_prompt_alone(drafter: str, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=dtype)
    target = CausalTarget(model, check=False, fuse=False)
    params = [SamplingParams(24, each, top_p=0.9, seed=5, ignore_eos=True) for each in (0.0, 1.0, 1.0)]
    prompts = [[*range(40, 40 + size), *range(40, 40 + size)] for size in (2, 9, 30)]
    alone = [
        Engine(target).generate([prompt], each)[0].tokens
        for prompt, each in zip(prompts, params, strict=True)
    ]
    with rows_computed(model) as counts:
        found = Engine(target, drafter, adaptive=False).generate(prompts, params)
    if dtype == torch.float64 or target.bit_exact:
        assert [one.tokens for one in found] == alone
    # Rows that are no multiple of the number of sequences were not padded.
    assert any(count % 3 for count in counts)


def test_a_model_that_takes_no_line_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no batch of one")

    monkeypatch.setattr(line.Line, "mask", fail)
    target = CausalTarget(tiny_llama())
    assert decoded(target)[1].logits is not None
    assert not target._takes_lines and not target.mixes


def test_a_thread_waits_for_another_ones_trial_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = CausalTarget(tiny_llama()), list[bool]()
    target.renew()

    def trial(twin: CausalTarget) -> None:
        twin._modules.line = twin._modules.step
        thread.start()
        thread.join(0.2)  # it waits; if it did not, it would see the form that is being tried
        twin._modules.line = None

    thread = Thread(target=lambda: seen.append(target._takes_lines))
    monkeypatch.setattr("outpace.targets.stock.causal.try_lines", trial)
    assert not target._takes_lines
    thread.join()
    assert seen == [False]


def test_a_model_that_computes_other_keys_takes_lines_of_one_window() -> None:
    """Multi-head latent attention expands the latents that the cache returns."""
    target = CausalTarget(FAMILIES["deepseek-v3"].build(attention="sdpa"))
    with rows_computed(target.model) as counts:
        found = decoded(target)
    assert counts[-3:] == [18, 11, 4] and not target.mixes
    target._modules.line = None
    for one, other in zip(found[1:], decoded(target)[1:], strict=True):
        torch.testing.assert_close(one.logits, other.logits)
