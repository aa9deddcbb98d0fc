"""Families of text and images: generate() and the engine give the tokens of transformers' own generate.

In float64, for batches of prompts with different numbers of images, of different sizes if a family has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import outpace
from outpace import Engine, SamplingParams, Target
from outpace.cache import KVCache
from outpace.engine import scheduler
from watching import preemptions
from zoo.image_families import IMAGE_FAMILIES, build, prompts
from zoo.test_families import RandomTrees

NEW = 30
PENALTY = 3.0  # without it random models repeat themselves
IMAGES = (1, 2, 1)
# Those that are made like another are slow tests.
LIKE_ANOTHER = {"qwen2_vl", "qwen3_vl", "idefics3"}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in IMAGE_FAMILIES
]
LOOKAHEAD = "lookahead:window=4,ngram=3,guesses=3"
LIVELY = SamplingParams(max_new_tokens=NEW, repetition_penalty=PENALTY)
SAMPLED = [SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed) for seed in (3, 1, 2)]

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.parametrize("name", NAMES),
]


@cache
def model_of(name: str) -> PreTrainedModel:
    return build(name)


@cache
def generated(name: str, seed: int = 0) -> list[list[int]]:
    """transformers' own greedy output, one prompt at a time."""
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": PENALTY}
    outputs = []
    for given in alone(name, seed):
        found = model_of(name).generate(**given, **options)
        outputs.append(found[0, given["input_ids"].shape[1] :].tolist())
    return outputs


def alone(name: str, seed: int = 0, more: int = 0) -> list[dict[str, Any]]:
    """The prompts of that batch, as a processor returns each alone; ``more`` tokens follow each."""
    given = prompts(name, IMAGES, seed, more)
    counts = [sum(IMAGES[:row]) for row in range(len(IMAGES) + 1)]
    found = []
    for row, (first, last) in enumerate(pairwise(counts)):
        real = given["attention_mask"][row] != 0
        own: dict[str, Any] = {"input_ids": given["input_ids"][row : row + 1, real]}
        if name.startswith("qwen"):
            grids = given["image_grid_thw"]
            rows = [0, *grids.prod(dim=-1).cumsum(dim=0).tolist()]
            own["image_grid_thw"] = grids[first:last]
            own["pixel_values"] = given["pixel_values"][rows[first] : rows[last]]
            own["mm_token_type_ids"] = given["mm_token_type_ids"][row : row + 1, real]
        elif name == "llava":
            own["pixel_values"] = given["pixel_values"][first:last]
        else:
            own["pixel_values"] = given["pixel_values"][row : row + 1, : IMAGES[row]]
        found.append(own)
    return found


def decode(
    name: str, drafter: Any = None, params: Any = LIVELY, seed: int = 0, **options: Any
) -> list[list[int]]:
    engine = Engine(Target(model_of(name)), drafter, **{"adaptive": False, "prefill_chunk": 4, **options})
    sources = alone(name, seed)
    texts = [source["input_ids"][0].tolist() for source in sources]
    return [one.tokens for one in engine.generate(texts, params, sources=sources)]


def trees(name: str, outputs: list[list[int]]) -> RandomTrees:
    texts = [tuple(source["input_ids"][0].tolist()) for source in alone(name)]
    return RandomTrees(dict(zip(texts, outputs, strict=True)))


@pytest.mark.parametrize(
    "images", [(1, 2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1,), (2,)))]
)
def test_generate(name: str, images: tuple[int, ...]) -> None:
    model, given = model_of(name), prompts(name, images)
    for drafter, options in (
        (LOOKAHEAD, {}),
        ("prompt_lookup", {"repetition_penalty": PENALTY}),
        ("none", {"num_return_sequences": 2, "do_sample": True, "top_k": 1}),
    ):
        expected = model.generate(**given, max_new_tokens=NEW, **options)
        outpace.accelerate(model, drafter, adaptive=False)
        found = model.generate(**given, max_new_tokens=NEW, **options)
        outpace.restore(model)
        assert found.tolist() == expected.tolist(), (drafter, options)


def test_images_matter(name: str) -> None:
    """The images change the output; otherwise the other tests would pass for a target that ignores them."""
    assert all(a != b for a, b in zip(generated(name), generated(name, seed=1), strict=True))


def test_text_alone_and_some_rows_without_images(name: str) -> None:
    model = outpace.accelerate(build(name), LOOKAHEAD, adaptive=False)
    for images in ((0, 0), (1, 0, 2)):
        if images == (1, 0, 2) and name in ("smolvlm", "idefics3"):
            continue  # their padding images are zeros, which their own forward takes out
        given = prompts(name, images)
        expected = model_of(name).generate(**given, max_new_tokens=NEW, repetition_penalty=PENALTY)
        found = model.generate(**given, max_new_tokens=NEW, repetition_penalty=PENALTY)
        assert found.tolist() == expected.tolist()


def test_the_engine(name: str) -> None:
    expected = generated(name)
    for drafter in (None, LOOKAHEAD, random_trees := trees(name, expected)):
        assert decode(name, drafter) == expected, drafter
    assert len(random_trees.scattered) > 10, "too few accepted paths had gaps"
    plain = decode(name, params=SAMPLED)
    assert plain != expected
    assert decode(name, trees(name, plain), SAMPLED) == plain


def test_sampled_by_generate(name: str) -> None:
    outputs = []
    for drafter in ("none", LOOKAHEAD):
        model = outpace.accelerate(build(name), drafter, adaptive=False)
        torch.manual_seed(0)
        outputs.append(model.generate(**prompts(name, IMAGES), max_new_tokens=NEW, do_sample=True).tolist())
    assert outputs[0] == outputs[1]


def test_a_prefix_cache_keeps_images_apart(name: str) -> None:
    """Requests of the same tokens, more than a block of rows: shared only if their images are the same."""
    engine = Engine(Target(model_of(name)), LOOKAHEAD, prefix_cache=2**20, adaptive=False)
    outputs = []
    for seed, cached in ((0, 0), (1, 0), (0, 32)):
        source = alone(name, seed, more=40)[0]
        stock = model_of(name).generate(**source, max_new_tokens=NEW, repetition_penalty=PENALTY)
        text = source["input_ids"][0].tolist()
        (found,) = engine.generate([text], LIVELY, sources=[source])
        outputs.append(found.tokens)
        assert found.tokens == stock[0, len(text) :].tolist() and found.stats.cached_tokens == cached
    assert outputs[0] == outputs[2] != outputs[1]
    (found,) = engine.generate([text], LIVELY)  # the same tokens, of which none are an image
    assert found.stats.cached_tokens == 0
    text = [token % 80 + 1 for token in text]
    for cached in (0, 32):  # a prompt of text is shared as ever
        (found,) = engine.generate([text], LIVELY)
        assert found.stats.cached_tokens == cached


def test_a_conversation_goes_on_from_the_rows_of_its_answer(name: str) -> None:
    """An answer's rows are shared by a later prompt: they follow the same image, at its positions."""
    engine = Engine(Target(model_of(name)), LOOKAHEAD, prefix_cache=2**20, adaptive=False)
    source = alone(name, more=40)[0]
    text = source["input_ids"][0].tolist()
    # No pads, and no places of images.
    words = replace(LIVELY, logit_bias=dict.fromkeys((0, *range(90, 94)), -100.0))
    (first,) = engine.generate([text], words, sources=[source])
    assert len(text) < 64 < len(text) + NEW
    ids = torch.tensor([[*text, *first.tokens, 5, 6, 7]])
    longer = {**source, "input_ids": ids}
    if name.startswith("qwen"):
        longer["mm_token_type_ids"] = (ids == source["input_ids"].new_tensor(90)).int()
    stock = model_of(name).generate(**longer, max_new_tokens=NEW, repetition_penalty=PENALTY)
    (found,) = engine.generate([ids[0].tolist()], LIVELY, sources=[longer])
    assert found.tokens == stock[0, ids.shape[1] :].tolist()
    assert found.stats.cached_tokens == (len(text) + NEW - 1) // 32 * 32


def test_it_resumes_after_preemption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were given back are computed again, from the same images."""
    monkeypatch.setattr(KVCache, "_least_room", 16)
    monkeypatch.setattr(scheduler, "_ANSWER", 4)
    monkeypatch.setattr(scheduler, "_DRAFT", 2)
    target = Target(model_of(name))
    engine = Engine(target, LOOKAHEAD, adaptive=False, length=16, memory=120 * target.new_cache().row_bytes)
    preempted = preemptions(engine, monkeypatch)
    sources = alone(name)
    texts = [source["input_ids"][0].tolist() for source in sources]
    assert [one.tokens for one in engine.generate(texts, LIVELY, sources=sources)] == generated(name)
    assert any(preempted)


def test_bits(name: str) -> None:
    """In bfloat16 a step runs the language model alone; the parts that read images do not affect its bits."""
    model = build(name).to(torch.bfloat16)
    outputs = []
    for drafter in ("none", LOOKAHEAD, "prompt_lookup"):
        outpace.accelerate(model, drafter, adaptive=False, exact=True)
        options = {"max_new_tokens": NEW, "repetition_penalty": PENALTY}
        outputs.append(model.generate(**prompts(name, IMAGES), **options).tolist())
        outpace.restore(model)
    assert outputs[0] == outputs[1] == outputs[2]
