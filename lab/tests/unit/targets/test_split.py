"""A target in two parts has the logits of the whole, and no row goes through a layer twice."""

from __future__ import annotations

import pytest
import torch

from accelerator import Accelerator
from lossless.test_accelerator_families import PROMPTS, tokens
from models import tiny_llama
from outpace.cache import KVCache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets import CausalTarget, Output, Rows, TargetModel
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace_lab.targets import SplitTarget

TEXTS = [[3, 9, 2, 7, 4], [5], [6, 1, 6]]


def opened(target: TargetModel, length: int = 64) -> tuple[KVCache, list[Slot]]:
    """A cache with the texts in it, each in a slot."""
    cache = target.new_cache(slots=3, length=length)
    assert isinstance(cache, KVCache)
    slots = [cache.allocate() for _ in TEXTS]
    target.forward(cache, Batch.of(fed(slots, [Rows(text) for text in TEXTS]), None))
    cache.keep({slot: range(len(text)) for slot, text in zip(slots, TEXTS, strict=True)})
    return cache, slots


def fed(slots: list[Slot], rows: list[Rows]) -> dict[Slot, Rows]:
    return dict(zip(slots, rows, strict=True))


def same(found: Output, slots: list[Slot], expected: Output, others: list[Slot]) -> None:
    for slot, other in zip(slots, others, strict=True):
        torch.testing.assert_close(found.logits_of(slot), expected.logits_of(other), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("length", [8, 64])  # of which 8 must grow
def test_two_parts_say_what_the_whole_says(depth: int, static: bool, length: int) -> None:
    if static and length == 8:
        length = 16
    whole = CausalTarget(tiny_llama(layers=4), static=static)
    split = SplitTarget(whole, depth)
    (cache, others), (own, slots) = opened(whole, length), opened(split, length)
    feeds = [Rows([8, 4, 11, 5, 2], (-1, 0, 1, 0, 3)), Rows([7, 7]), Rows([1, 2, 3], (-1, 0, 1))]
    # A whole draft, nothing, and one that was made otherwise from its third row on.
    for drafted, places in (([8, 1], (0, 2)), ([4, 2], (0, 2)), ([11, 9], (0, 2)), ([6], (0,))):
        split.advance(own, [slots[place] for place in places], drafted)
    found = split.forward(own, Batch.of(fed(slots, feeds)))
    same(found, slots, whole.forward(cache, Batch.of(fed(others, feeds))), others)
    for each, some in ((cache, others), (own, slots)):
        each.keep(dict(zip(some, ([0, 3, 4], [0], [0, 1]), strict=True)))
    # Rows of all layers are those of the whole, and what was ahead is over.
    for layer in range(4):
        for place in range(3):
            for mine, theirs in zip(
                own.rows(layer, slots[place]), cache.rows(layer, others[place]), strict=True
            ):
                torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    after = [Rows([9]), Rows([10, 11]), Rows([12])]
    found = split.forward(own, Batch.of(fed(slots, after)))
    same(found, slots, whole.forward(cache, Batch.of(fed(others, after))), others)


def test_no_row_goes_through_a_layer_twice() -> None:
    model = tiny_llama(layers=4)
    split = SplitTarget(CausalTarget(model), 2)
    cache, slots = opened(split)
    seen: dict[int, list[int]] = {0: [], 3: []}
    for layer, widths in seen.items():
        model.model.layers[layer].register_forward_hook(
            lambda module, args, output, widths=widths: widths.append(args[0].shape[1])
        )
    for token in (8, 4, 11):
        split.advance(cache, slots, [token] * 3)
    split.forward(cache, Batch.of(dict.fromkeys(slots, Rows([8, 4, 11, 5]))))
    assert seen == {0: [1, 1, 1, 1], 3: [4]}
    split.advance(cache, slots, [8] * 3)
    split.forget(slots)
    split.forward(cache, Batch.of(dict.fromkeys(slots, Rows([8, 4]))))
    assert seen[0][4:] == [1, 2]


def test_a_hidden_state_is_that_of_the_layer() -> None:
    model = tiny_llama(layers=3)
    split = SplitTarget(CausalTarget(model), 2)
    cache, slots = opened(split)
    found = split.advance(cache, slots[::-1], [1, 2, 3])
    with torch.inference_mode():
        for text, token, state in zip(TEXTS[::-1], [1, 2, 3], found, strict=True):
            plain = model(torch.tensor([[*text, token]]), output_hidden_states=True)
            torch.testing.assert_close(state, plain.hidden_states[2][0, -1], atol=1e-12, rtol=1e-12)
        last = plain.hidden_states[3]  # the last one comes after the norm
        torch.testing.assert_close(model.lm_head(last), plain.logits)


def test_what_cannot_be_split_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

    whole = CausalTarget(tiny_llama(layers=3))
    for depth in (0, 3):
        with pytest.raises(OutpaceError, match="1 to 2 of them"):
            SplitTarget(whole, depth)
    cache, (slot, *_) = opened(split := SplitTarget(whole, 1))
    with pytest.raises(OutpaceError, match="gives the hidden states of layer 1 alone"):
        split.forward(cache, Batch.of({slot: [1]}), (1, 2))
    other, (first, *_) = opened(whole)
    expected = whole.forward(other, Batch.of({first: [1, 5]}), (1,)).hidden[first][1]
    found = split.forward(cache, Batch.of({slot: [1, 5]}), (1,)).hidden[slot][1]
    torch.testing.assert_close(found, expected)
    with pytest.raises(UnsupportedModel, match="cannot be split"):
        SplitTarget(ToyTarget(), 1)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(UnsupportedModel, match="plain stack"):
        SplitTarget(CausalTarget(gpt2), 1)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    gemma = Gemma2ForCausalLM(
        Gemma2Config(**shape, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    )
    with pytest.raises(UnsupportedModel, match="embeddings or logits are changed"):
        SplitTarget(CausalTarget(gemma.double().eval()), 1)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_split_target_keeps_states_on_their_device(kind: str) -> None:
    """The upper layers go on from states of the lower ones, which are no logits."""
    model = tiny_llama(dtype=torch.float32, layers=2)
    expected = tokens(CausalTarget(model, check=False))
    with Accelerator(kind):
        target = SplitTarget(CausalTarget(model.to(f"{kind}:0"), check=False), 1)
        cache = target.new_cache()
        slot = cache.allocate()
        assert target.advance(cache, [slot], [PROMPTS[1][0]]).device.type == kind
        target.forget()
        assert tokens(target) == expected
