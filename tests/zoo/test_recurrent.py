"""Families with recurrent layers: tokens are those of transformers' generate(), and of plain decoding.

In float32, since their recurrences compute in it. Trees are random, with the right continuation hidden in
them, so that accepted paths run through rows whose parents are not the rows before them.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from outpace import Engine, Target
from outpace.cache import KVCache
from outpace.core import UnsupportedModel
from outpace.testing.matrix import Matrix
from parts import first, in_turn, since
from watching import preemptions
from zoo.recurrent_families import KINDS, MULTIMODAL, RECURRENT, REFUSED, WITHOUT_HEAD
from zoo.test_families import GREEDY, NEW, PROMPTS, SAMPLED, same, trees

pytestmark = [since("5.22"), pytest.mark.filterwarnings("ignore::UserWarning")]

DRAFTERS = [
    "jacobi",
    "lookahead:window=4,ngram=3,guesses=3",
    "prompt_lookup",
    "suffix",
    "reference",
    "token_recycling",
    "combined:parts=(suffix)+(token_recycling)",
]
BY_KIND = [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in RECURRENT]


@cache
def model_of(name: str) -> PreTrainedModel:
    return RECURRENT[name].build(torch.float32)


@cache
def target_of(name: str) -> Any:
    return Target(model_of(name))


@cache
def generated(name: str) -> list[list[int]]:
    """transformers' own greedy output, one prompt at a time."""
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model_of(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def decode(name: str, drafter: Any = None, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    engine = Engine(target_of(name), drafter, **{"adaptive": False, "prefill_chunk": 7, **options})
    return [generation.tokens for generation in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", BY_KIND)
def test_greedy_and_sampled(name: str) -> None:
    expected = generated(name)
    assert all(len(set(output)) > 8 for output in expected), "the random model loops"
    same(model_of(name), expected, decode(name))
    for params in (GREEDY, SAMPLED):
        plain = decode(name, params=params)
        drafter = trees(plain)
        same(model_of(name), plain, decode(name, drafter, params))
        assert len(drafter.scattered) > 10, "too few accepted paths had gaps"


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_refused(name: str) -> None:
    family, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"{name}.*{reason}"):
        Target(family.load())


def test_every_family_with_a_state_is_known() -> None:
    """Of the installed transformers: served, or refused by name, or no language model of text."""
    keeps = re.compile(r"_is_stateful = True|\bdef causal_conv1d_fn\b")
    modules = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {path.parent.name for path in modules if keeps.search(path.read_text("utf-8"))}
    configs = [getattr(transformers, family.config) for family in RECURRENT.values()]
    served = {config.__module__.split(".")[-2] for config in configs}
    assert found >= {"mamba", "qwen3_next", "rwkv"}
    assert found - served - {*REFUSED} - MULTIMODAL - WITHOUT_HEAD == set()


@pytest.mark.parametrize("name", BY_KIND)
def test_a_batch_that_others_leave_and_join(name: str) -> None:
    expected = decode(name)
    engine = Engine(target_of(name), trees(expected), adaptive=False)
    first = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    engine.remove(first[0])
    late = engine.add(PROMPTS[0], GREEDY)
    while engine.sequences:
        engine.step()
    same(model_of(name), expected, [sequence.output for sequence in (late, *first[1:])])


PAIRS = list(product(RECURRENT, DRAFTERS))
# Each drafter with a kind of recurrence, and a sampling of one prompt or two in turn; others are slow.
QUICK = {
    (name, drafter)
    for (place, name), (turn, drafter) in product(enumerate(KINDS), enumerate(DRAFTERS))
    if (place + turn) % len(KINDS) == 0
}


@pytest.mark.parametrize(
    ("name", "drafter", "sampling", "prompts"),
    in_turn(PAIRS, [("greedy", 1), ("top_p", 2), ("penalty", 2)], among=QUICK),
)
def test_drafters(name: str, drafter: str, sampling: str, prompts: int) -> None:
    """On prompts that repeat themselves, so that drafts are accepted."""
    _matrix(name).check_near(drafter, sampling, prompts)


@cache
def _matrix(name: str) -> Matrix:
    return Matrix(
        target_of(name), [[*PROMPTS[0][:period], *PROMPTS[0][:period]] * 3 for period in range(2, 8)]
    )


@pytest.mark.parametrize("name", first(4, sorted(KINDS, key=("bamba", "kimi-linear").__contains__)))
def test_shared_prefixes(name: str) -> None:
    """A state is shared where a chunk of a prompt has ended, and rows up to there."""
    target, start = target_of(name), list(range(1, 90))
    prompts = [[*start, 3, 5], [*start, 7], [*start[:70], 9, 2], [*start[:40], 9, 2]]
    plain = [generation.tokens for generation in Engine(target).generate(prompts, GREEDY)]
    engine = Engine(target, "lookahead", adaptive=False, prefix_cache=2**26)
    cached = []
    for place in (0, 1, 2, 3, 0):
        (found,) = engine.generate([prompts[place]], GREEDY)
        same(model_of(name), [plain[place]], [found.tokens], [prompts[place]])
        cached.append(found.stats.cached_tokens)
    step = target.prompt_step
    length = 71 // step * step
    assert cached == [0, length, length, 0, length], "no chunk ended within the last prompt's 40 tokens"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "mamba2"])
def test_it_resumes_after_preemption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that were given back are computed again, those of the prompt in the same chunks."""
    monkeypatch.setattr(KVCache, "_least_room", 16)
    monkeypatch.setattr("outpace.engine.scheduler._ANSWER", 4)
    monkeypatch.setattr("outpace.engine.scheduler._DRAFT", 2)
    cache = target_of(name).new_cache()
    memory = cache.row_bytes * (120 + 3 * (cache.cost(64) - 64))
    engine = Engine(target_of(name), "lookahead", adaptive=False, length=16, memory=memory)
    preempted = preemptions(engine, monkeypatch)
    found = [generation.tokens for generation in engine.generate(PROMPTS, GREEDY)]
    same(model_of(name), generated(name), found)
    assert any(preempted)


def test_states_are_counted_at_admission() -> None:
    """A model without attention needs memory for states alone, whatever the length."""
    target = target_of("mamba2")
    cache = target.new_cache()
    assert cache.cost(10) == cache.cost(10_000) == 1
    assert cache.row_bytes == cache.state_bytes > 0
    engine = Engine(target, "suffix", memory=int(2.5 * cache.state_bytes))
    sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    assert len(engine._batch.active) == 2
    while engine.sequences:
        engine.step()
    same(model_of("mamba2"), generated("mamba2"), [sequence.output for sequence in sequences])
