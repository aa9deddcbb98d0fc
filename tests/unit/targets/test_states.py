"""Recurrent layers over trees: states of nodes, prompts in chunks, and what is refused."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import outpace
from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets import RecurrentTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.inputs import state_rows
from parts import since
from zoo.recurrent_families import KINDS, RECURRENT
from zoo.test_families import PROMPTS, same

TREE = (-1, 0, 0, 1, 1, 2, 4, 4, 6, 5)
PATH = [0, 1, 4, 7]
PROMPT = [(5 * token * token + token) % 90 for token in range(75)]

pytestmark = [since("5.22"), pytest.mark.filterwarnings("ignore::UserWarning")]


@cache
def model_of(name: str) -> PreTrainedModel:
    return RECURRENT[name].build(torch.float32)


@cache
def target_of(name: str) -> RecurrentTarget:
    target = Target(model_of(name), check=False)
    assert isinstance(target, RecurrentTarget)
    return target


def after(target: Any, widths: Sequence[int]) -> Tensor:
    """Logits of a tree after a prompt, fed in forwards of these widths, and of the token after it."""
    cache = target.new_cache()
    slot, start = cache.allocate(), 0
    for width in widths:
        target.forward(cache, Batch.of({slot: PROMPT[start : start + width]}, prompt=width))
        cache.keep({slot: range(width)})
        start += width
    tree = (
        target.forward(cache, Batch.of({slot: Rows(range(3, 3 + len(TREE)), TREE)})).logits_of(slot).clone()
    )
    cache.keep({slot: PATH})
    return torch.cat([tree, target.forward(cache, Batch.of({slot: [2]})).logits_of(slot)])


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_has_the_logits_of_its_paths(name: str) -> None:
    """And so has the token after a path that was kept: of two trees side by side with different paths."""
    target = target_of(name)
    cache = target.new_cache(slots=2)
    slots = [cache.allocate(), cache.allocate()]
    target.forward(cache, Batch.of({slots[0]: PROMPT[:20], slots[1]: PROMPT[:7]}, None))
    cache.keep({slots[0]: range(20), slots[1]: range(7)})
    trees = [list(range(3, 13)), list(range(30, 37))]
    output = target.forward(
        cache, Batch.of({slots[0]: Rows(trees[0], TREE), slots[1]: Rows(trees[1], TREE[:7])})
    )
    found = [output.logits_of(slot).clone() for slot in slots]
    paths = [PATH, [0, 2, 5]]
    cache.keep(dict(zip(slots, paths, strict=True)))
    after = [target.forward(cache, Batch.of({slot: [50]})).logits_of(slot).clone() for slot in slots]
    for prompt, tree, path, rows, last in zip((20, 7), trees, paths, found, after, strict=True):
        text = [*PROMPT[:prompt], *(tree[node] for node in path), 50]
        whole = model_of(name)(input_ids=torch.tensor([text])).logits[0, prompt:]
        torch.testing.assert_close(torch.cat([rows[path], last]), whole, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_states_that_have_no_room_are_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence's inputs are kept instead, with the same bits."""
    target, made = copy.copy(target_of(name)), []
    kept = after(target, [20])
    monkeypatch.setattr(target, "_budget", 0)
    replayed = state_rows.ReplayedRows

    def count(*args: Any) -> Any:
        made.append(args)
        return replayed(*args)

    monkeypatch.setattr(state_rows, "ReplayedRows", count)
    assert torch.equal(after(target, [20]), kept)
    assert bool(made) == (name != "lfm2"), "LFM2 has no recurrence"


@cache
def exact(name: str) -> RecurrentTarget:
    target = Target(model_of(name), check=False, exact=True)
    assert isinstance(target, RecurrentTarget)
    return target


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "mamba2", "lfm2"])
def test_bits_do_not_depend_on_how_a_prompt_was_cut(name: str) -> None:
    target = exact(name)
    whole, step = after(target, [75]), target.prompt_step
    assert step in (32, 64)
    assert torch.equal(after(target, [step, 75 - step]), whole)


def test_a_prompt_and_rows_after_it_in_one_forward() -> None:
    target = target_of("qwen3-next")
    assert target.prompts_differ
    cache = target.new_cache()
    both, apart = cache.allocate(), cache.allocate()
    target.forward(cache, Batch.of({both: PROMPT[:70]}, prompt=64))
    cache.keep({both: range(70)})
    for start, stop, prompt in ((0, 64, 64), (64, 70, 0)):
        target.forward(cache, Batch.of({apart: PROMPT[start:stop]}, prompt=prompt))
        cache.keep({apart: range(stop - start)})
    assert all(map(torch.equal, cache.read_state(both), cache.read_state(apart)))
    target.forward(cache, Batch.of({both: PROMPT[:20]}, prompt=20))
    with pytest.raises(ValueError, match="kept whole"):
        cache.keep({both: range(10)})


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the numbers of rows of Qwen3-Next's function of many tokens, which another one replaces."""
    from transformers.models.qwen3_next import modeling_qwen3_next as family

    original, rows = family.torch_chunk_gated_delta_rule, []

    def faster(query: Tensor, *args: Any, **options: Any) -> Any:
        rows.append(query.shape[1])
        return original(query, *args, **options)

    faster.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(family, "torch_chunk_gated_delta_rule", faster)
    return rows


@pytest.mark.parametrize(
    ("widths", "expected"),
    [([75], [64, 11]), ([64, 11], [64, 11]), ([10, 65], [10, 11]), ([10, 54, 11], [10, 11])],
)
def test_chunks_begin_at_multiples(chunks: list[int], widths: list[int], expected: list[int]) -> None:
    """After another cut, rows are computed one by one up to the next multiple; so are the rows of steps."""
    target, plain = Target(model_of("qwen3-next"), check=False), after(target_of("qwen3-next"), [75])
    chunks.clear()
    torch.testing.assert_close(after(target, widths), plain, atol=2e-4, rtol=1e-4)
    layers = 3
    assert sorted(chunks) == sorted(layers * expected)


@pytest.mark.parametrize(
    ("name", "scan", "prompts"),
    [("mamba2", "mamba2_chunk_scan", True), ("mamba", "mamba_selective_scan", False)],
)
def test_kernels_of_packages(name: str, scan: str, prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's scan computes chunks of prompts, and nothing of a step; its convolution is not called."""
    family = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    called: list[str] = []

    def replace(function: str) -> None:
        original = getattr(family, function)

        @functools.wraps(original)
        def kernel(*args: Any, **options: Any) -> Any:
            called.append(function)
            return original(*args, **options)

        monkeypatch.setattr(family, function, kernel)

    replace("causal_conv1d_fn")
    replace(scan)
    target, plain = Target(model_of(name), check=False), target_of(name)
    called.clear()
    assert torch.equal(after(target, [75]), after(plain, [75]))
    assert set(called) == ({scan} if prompts else set())
    called.clear()
    cache = target.new_cache()
    target.forward(cache, Batch.of({cache.allocate(): Rows(range(len(TREE)), TREE)}))
    assert not called


def test_the_model_is_unchanged() -> None:
    model = model_of("qwen3-next")
    classes = [type(module) for module in model.modules()]
    ids = torch.tensor([PROMPTS[0]])
    before = model(input_ids=ids).logits
    target = Target(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(input_ids=ids).logits, before)
    assert target.model is not model
    assert target.state_bytes == target.new_cache().state_bytes > 0
    assert all(map(lambda one, two: one is two, target.model.parameters(), model.parameters()))


def test_weights_that_change() -> None:
    model = RECURRENT["lfm2"].build(torch.float32)
    engine = Engine(Target(model), "lookahead")
    params = SamplingParams(max_new_tokens=12)
    before = engine.generate(PROMPTS, params)
    with torch.no_grad():
        model.model.layers[0].conv.conv.weight.mul_(-2)
        model.lm_head.weight.data.mul_(-1)
    found = [generation.tokens for generation in engine.generate(PROMPTS, params)]
    assert found != [generation.tokens for generation in before]
    same(model, [g.tokens for g in Engine(Target(model)).generate(PROMPTS, params)], found)


def test_modules_that_are_replaced() -> None:
    """Those of the model that was given, whose steps run on a copy."""
    model: Any = RECURRENT["lfm2"].build(torch.float32)
    engine = Engine(Target(model))
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=2))
    model.model.layers[1].feed_forward.w1 = copy.deepcopy(model.model.layers[1].feed_forward.w1)
    with pytest.raises(OutpaceError, match=r"replaced.*make a new target"):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize("option", ["static", "stock"])
def test_options_that_states_do_not_allow(option: str) -> None:
    with pytest.raises(OutpaceError, match=f"recurrent state.*leave {option} out"):
        Target(model_of("lfm2"), **{option: True})


def test_parts_of_the_model_do_not_draft() -> None:
    target, empty = target_of("lfm2"), torch.empty(0)
    for call in (
        lambda: target.some_layers([0]),
        lambda: target.over_window(2, 4),
        lambda: target.through(empty, empty, empty),
        lambda: target.read(empty, empty, empty),
        lambda: target.states(empty, empty, empty),
    ):
        with pytest.raises(UnsupportedModel, match="keeps a recurrent state"):
            call()


def test_a_tree_in_several_forwards_is_refused() -> None:
    target = target_of("qwen3-next")
    cache = target.new_cache()
    slot = cache.allocate()
    with pytest.raises(OutpaceError, match="not in several"):
        target.forward(cache, Batch.of({slot: Rows([1, 2], [0, 0], fed=[-1])}))


def test_a_recurrent_draft_model_is_refused() -> None:
    """Its rows would be dropped after each draft."""
    from outpace.drafters.models.draft_model import DraftModel

    with pytest.raises(OutpaceError, match="recurrent"):
        Engine(target_of("lfm2"), DraftModel(target_of("lfm2")))


def test_accelerate_with_padding_and_a_batch() -> None:
    model = RECURRENT["qwen3.5"].build(torch.float32)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    outpace.accelerate(model, "lookahead")
    assert model.generate(ids, **options).tolist() == expected.tolist()
    outpace.restore(model)
