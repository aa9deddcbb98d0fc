"""Early exit: the target's first layers draft, and the verification continues from their results."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from learning import train
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.engine.engine import Engine
from outpace.learned.folder import read_weights, write_folder
from outpace.targets import CausalTarget
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.layers.early_exit import EarlyExit
from outpace_lab.drafters.layers.exit_adapter import Adapter, AdapterConfig, Kind
from outpace_lab.train.data import Document
from outpace_lab.train.metric import Replay
from outpace_lab.train.objectives import objective
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import TrainingBatch
from parts import first, in_turn
from watching import Watch

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 12), *range(1, 12)]]
LONG = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, temperature=0.8, seed=3, ignore_eos=True)


def target(still: tuple[int, ...] = (), static: bool = False) -> CausalTarget:
    """A tiny Llama of four layers, some of which do nothing."""
    model = tiny_llama(vocabulary=40, layers=4, context=96)
    with torch.no_grad():
        for layer in still:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return CausalTarget(model, static=static)


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_drafter(EarlyExit(None, 3, 3, min_confidence=0.05), target())


@pytest.mark.parametrize(("params", "static"), in_turn([LONG, SAMPLED], [False, True]))
def test_where_the_rest_does_nothing_every_draft_is_accepted(params: SamplingParams, static: bool) -> None:
    model = target((2, 3), static)
    plain = Engine(model, slots=4, length=72).generate(PROMPTS, params)
    for count in (1, 5):
        drafter = EarlyExit(None, 2, count, min_confidence=0.0)
        found = Engine(model, drafter, slots=4, length=72, adaptive=False).generate(PROMPTS, params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        for generation in found:
            assert generation.stats.accepted == generation.stats.drafted
            assert generation.stats.steps == -(-41 // (count + 1))


def test_a_prompt_that_goes_in_with_the_first_step_is_not_drafted_from() -> None:
    (found,) = Engine(target((2, 3)), EarlyExit(None, 2, 3, min_confidence=0.0), adaptive=False).generate(
        PROMPTS[1:2], LONG
    )
    assert found.stats.accepted == found.stats.drafted
    assert found.stats.steps == 1 + 40 // 4


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_tokens_are_those_of_plain_decoding(least: float) -> None:
    model = target()
    for params in (LONG, SAMPLED):
        plain = Engine(model).generate(PROMPTS, params)
        found = Engine(model, EarlyExit(None, 3, 4, min_confidence=least), adaptive=False).generate(
            PROMPTS, params
        )
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert 0 < sum(g.stats.accepted for g in found) < sum(g.stats.drafted for g in found)


def test_low_confidence_ends_a_chain() -> None:
    model = target()
    drafted = [
        sum(
            g.stats.drafted
            for g in Engine(model, EarlyExit(None, 3, 4, least), adaptive=False).generate(PROMPTS, LONG)
        )
        for least in (0.0, 0.3, 1.0)
    ]
    assert drafted[0] > drafted[1] > drafted[2] == 0


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_its_distributions_serve_the_verifiers_that_weigh(verifier: str) -> None:
    model = target((2, 3))
    found = Engine(model, EarlyExit(layers=2, min_confidence=0.0), verifier, adaptive=False).generate(
        PROMPTS, SAMPLED
    )
    assert all(g.stats.accepted == g.stats.drafted > 0 for g in found)


def test_engines_share_a_target() -> None:
    model = target()
    plain = Engine(model).generate(PROMPTS, LONG)
    engines = [
        Engine(model, EarlyExit(None, depth, 3, min_confidence=0.0), adaptive=False) for depth in (1, 3)
    ]
    for engine in engines:
        for prompt in PROMPTS:
            engine.add(prompt, LONG)
    sequences = [engine.sequences for engine in engines]
    while any(engine.sequences for engine in engines):
        for engine in engines:
            engine.step()
    for own in sequences:
        assert [sequence.output for sequence in own] == [g.tokens for g in plain]
    assert not any(engine.target._held for engine in engines)


def adapter_of(kind: Kind, model: CausalTarget, draft_vocabulary: int = 0) -> Adapter:
    """An adapter after three layers, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AdapterConfig(
            3, kind, num_speculative_tokens=4, min_confidence=0.2, draft_vocabulary=draft_vocabulary
        )
        adapter = Adapter.new(config, model).double()
        for weight in adapter.parameters():
            torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else None
    return adapter


KINDS: list[Kind] = ["feed_forward", "attention"]


@pytest.mark.parametrize(
    ("kind", "drafted", "static"), in_turn(zip(KINDS, (0, 30), strict=True), [False, True])
)
def test_with_an_adapter_tokens_are_those_of_plain_decoding(kind: Kind, drafted: int, static: bool) -> None:
    model = target(static=static)
    drafter = EarlyExit(adapter_of(kind, model, drafted), num_speculative_tokens=4, min_confidence=0.0)
    for params in (LONG, SAMPLED):
        plain = Engine(model, slots=4, length=72).generate(PROMPTS, params)
        found = Engine(model, drafter, slots=4, length=72, adaptive=False).generate(PROMPTS, params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert 0 < sum(g.stats.accepted for g in found) < sum(g.stats.drafted for g in found)


@pytest.mark.parametrize("drafted", first(1, [0, 30]))
@pytest.mark.slow
def test_with_attention_it_keeps_the_contract(drafted: int, tmp_path: Path) -> None:
    model = target()
    adapter_of("attention", model, drafted).save(tmp_path)
    check_drafter(EarlyExit(str(tmp_path), num_speculative_tokens=3, min_confidence=0.05), model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_trained_saved_and_drafts(kind: Kind, tmp_path: Path) -> None:
    model = target()
    plain = Engine(model).generate(PROMPTS, LONG)
    texts = [(p, (*p, *g.tokens)) for p, g in zip(PROMPTS, plain, strict=True)]
    batch = read_batch(model, [[Document(text, len(prompt)) for prompt, text in texts]], (3,))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapter = Adapter.new(AdapterConfig(3, kind, num_speculative_tokens=4, min_confidence=0.0), model)
    losses = train(adapter, batch, 100, 0.01)
    assert float(losses[-1].loss[0]) < float(losses[0].loss[0]) / 2
    assert float(losses[-1].acceptance[0]) > float(losses[0].acceptance[0]) + 0.2
    adapter.save(tmp_path)
    drafter = EarlyExit(str(tmp_path), num_speculative_tokens=4, min_confidence=0.0)
    found = Engine(model, drafter, adaptive=False).generate(PROMPTS, LONG)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    bare = Engine(
        model, EarlyExit(layers=3, num_speculative_tokens=4, min_confidence=0.0), adaptive=False
    ).generate(PROMPTS, LONG)
    assert sum(g.stats.steps for g in found) < 0.8 * sum(g.stats.steps for g in bare)
    with pytest.raises(OutpaceError, match="adapter is for 3 layers, not 2"):
        Engine(model, EarlyExit(str(tmp_path), layers=2))


def test_decoding_accepts_what_the_replay_says() -> None:
    """Attention in decoding sees what it saw in training: the rows of its own text, at their positions. By
    default chains are as long as those measured, and end where those did.
    """
    model = target()
    plain = Engine(model).generate(PROMPTS, LONG)
    texts = [Document((*p, *g.tokens), len(p)) for p, g in zip(PROMPTS, plain, strict=True)]
    batch = read_batch(model, [texts], (3,))
    for kind, drafted in product(KINDS, (0, 30)):
        adapter = adapter_of(kind, model, drafted)
        adapter.suit(batch.tokens.flatten().bincount(minlength=40))
        train(adapter, batch, 30, 0.01)
        replay = Replay()
        replay.add(batch, adapter.accepted(batch))
        stats = [
            g.stats
            for g in Engine(model, EarlyExit(adapter), slots=4, adaptive=False).generate(PROMPTS, LONG)
        ]
        assert replay.expected_length > 1.3
        # Without attention a prompt goes in with the first step, which then drafts nothing.
        late = 0 if kind == "attention" else len(PROMPTS)
        assert 0 <= sum(s.steps for s in stats) - replay.steps <= late, kind
        assert replay.tokens == sum(s.tokens for s in stats)


def test_a_part_of_the_vocabulary_is_what_the_texts_use_most() -> None:
    """Labels that cannot be drafted are not learnt, and count as places where a draft fails."""
    model = target()
    counts = torch.zeros(40)
    counts[[7, 11, 13]] = torch.tensor([3.0, 9.0, 5.0])
    adapter = adapter_of("feed_forward", model, 2)
    adapter.suit(counts)
    assert adapter.drafted.ids.tolist() == [11, 13]
    batch = read_batch(model, [[Document((7, 11, 7, 13, 11, 7))]], (3,))
    assert adapter.logits(batch).shape == (1, 6, 2)
    torch.testing.assert_close(
        adapter.logits(batch), adapter_of("feed_forward", model).logits(batch)[..., [11, 13]]
    )
    losses = adapter.loss(batch, objective("ground_truth"))
    assert losses.places.tolist() == [3]
    right = adapter.logits(batch)[0, [0, 2, 3]].argmax(dim=-1) == torch.tensor([0, 1, 0])
    assert losses.acceptance.tolist() == pytest.approx([float(right.sum()) / 5])


def test_options_win_over_what_the_adapter_was_measured_with(tmp_path: Path) -> None:
    model = target()
    adapter_of("attention", model).save(tmp_path)
    drafted: list[list[int]] = []
    for drafter in (
        EarlyExit(str(tmp_path)),
        EarlyExit(str(tmp_path), min_confidence=0.0),
        EarlyExit(str(tmp_path), num_speculative_tokens=2, min_confidence=0.0),
        EarlyExit(min_confidence=0.0),
    ):
        watch = Watch()
        Engine(model, drafter, observer=watch, adaptive=False).generate(PROMPTS[1:3], LONG)
        drafted.append([len(step.draft) for step in watch.steps])
    assert [max(own) for own in drafted] == [4, 4, 2, 6]
    assert drafted[0].count(4) < drafted[1].count(4)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    adapter_of("attention", target()).save(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for damaged in ({"config": {"layer": 3}}, {"config": 3}):
        write_folder(tmp_path, {**described, **damaged}, read_weights(tmp_path))
        with pytest.raises(OutpaceError, match=r"config\.json is not one of early_exit"):
            Engine(target(), EarlyExit(str(tmp_path)))


def test_attention_sees_its_own_document_alone() -> None:
    model = target()
    adapter = adapter_of("attention", model)
    texts = [Document((7, 7, 2, 9, 1)), Document((3, 9, 2, 7, 11, 12))]
    both, alone = (adapter.logits(read_batch(model, [row], (3,))) for row in (texts, texts[1:]))
    torch.testing.assert_close(both[:, 5:], alone)
    other = adapter.logits(read_batch(model, [[Document((4, 9, 2, 7, 11, 12))]], (3,)))
    assert not torch.allclose(other[:, 1:], alone[:, 1:])


def test_a_long_prompt_is_read_in_pieces() -> None:
    prompt = [(7 * place + place // 5) % 38 + 1 for place in range(1100)]
    model = CausalTarget(tiny_llama(vocabulary=40, layers=4, context=2048))
    drafter = EarlyExit(adapter_of("attention", model), num_speculative_tokens=3, min_confidence=0.0)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    plain = Engine(model).generate([prompt, [5]], params)
    engine = Engine(model, drafter, adaptive=False)
    assert [g.tokens for g in engine.generate([prompt, [5]], params)] == [g.tokens for g in plain]


def test_the_metric_counts_the_chain_that_would_stand() -> None:
    model = target()
    adapter = Adapter.new(AdapterConfig(1, num_speculative_tokens=2, min_confidence=0.5), model)
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    rows = torch.full((1, 5, 40), 0.0)
    for place, (token, score) in enumerate([(4, 9.0), (5, 9.0), (6, 2.0), (7, 9.0), (8, 9.0)]):
        rows[0, place, token] = score  # 2.0 is right, and not sure enough
    adapter.logits = lambda batch: rows  # type: ignore[method-assign]
    batch = TrainingBatch(
        tokens=tokens,
        positions=torch.arange(5)[None],
        documents=torch.zeros_like(tokens),
        counted=torch.ones_like(tokens, dtype=torch.bool),
        hidden={1: rows},
        scores=rows,
    )
    assert adapter.accepted(batch).tolist() == [[2, 1, 0, 1, 0]]


def test_it_drafts_alone_and_for_stacks_only() -> None:
    with pytest.raises(OutpaceError, match="drafts alone"):
        Engine(target(), Combined((EarlyExit(layers=1), PromptLookup())))
    with pytest.raises(UnsupportedModel, match="cannot be split"):
        Engine(ToyTarget(), EarlyExit(layers=1))
    with pytest.raises(OutpaceError, match="1 to 3 of them"):
        Engine(target(), EarlyExit(layers=4))
    for wrong, match in (
        ({"adapter": "wide"}, "adapter must be 'feed_forward'"),
        ({"adapter": "attention", "width": 2.0}, "adapter=attention has no option width"),
        ({"heads": 2}, "adapter=feed_forward has no option heads"),
        ({"width": 0.0}, "width must be above 0"),
        ({"adapter": "attention", "heads": 0}, "heads must be at least 1, not 0"),
        ({"draft_vocabulary": -1}, "draft_vocabulary must be at least 0, not -1"),
    ):
        with pytest.raises(OutpaceError, match=match):
            AdapterConfig(**wrong)  # type: ignore[arg-type]
    for options in ({"layers": 0}, {"num_speculative_tokens": 0}, {"min_confidence": 2.0}, {"draws": "wild"}):
        with pytest.raises(OutpaceError, match=next(iter(options))):
            EarlyExit(**options)  # type: ignore[arg-type]
