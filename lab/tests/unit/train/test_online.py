"""Online learning: no token changes with the weights, and worse weights are undone."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learning import METHODS, new
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters import DRAFTERS
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.engine.engine import Engine
from outpace.policy.governor import Pinned
from outpace.targets import Target, TargetModel
from outpace.testing import ToyTarget
from outpace_lab.drafters.blockwise import Blockwise
from outpace_lab.drafters.layers.early_exit import EarlyExit
from outpace_lab.drafters.parallel_tokens import ParallelTokens
from outpace_lab.drafters.spec_drafter import SpecDrafter
from outpace_lab.train import Learning, Online
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.trained import Trained
from outpace_lab.train.trainee import Round, Trainee
from parts import in_turn

PROMPTS = [[place, place + 3, place + 1] for place in range(1, 13)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
LEARNING = Learning(tokens=4096, length=64, updates=12, rows=4, learning_rate=5e-3, measured=20)
SMALL: dict[str, dict[str, Any]] = {
    "dflash": {"tokens": 3, "anchors": 8, "depth": 1},
    "spec_drafter": {"tokens": 3, "anchors": 8, "depth": 1},
    "eagle": {"steps": 3},
    "medusa": {"heads": 3, "own_head": True, "max_nodes": 8},
    "hydra": {"heads": 3},
}
TREES: dict[str, dict[str, Any]] = {
    "eagle": {"expand": 3, "max_nodes": 9},
    "draft_model": {"branching": "3x2", "num_speculative_tokens": 4},
}


@lru_cache
def llama(dtype: torch.dtype = torch.float64) -> TargetModel:
    return Target(tiny_llama(layers=3, dtype=dtype))


@lru_cache
def plain(params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(llama()).generate(PROMPTS, params)]


def module(method: str, target: TargetModel | None = None) -> Trained:
    """A module with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = new(method, target or llama(), **SMALL.get(method, {}))
    return made.double() if target is None else made


KINDS: dict[str, Any] = DRAFTERS | {
    "blockwise": Blockwise,
    "early_exit": EarlyExit,
    "parallel_tokens": ParallelTokens,
    "spec_drafter": SpecDrafter,
}


def online(method: str, learning: Learning = LEARNING, **options: Any) -> Online:
    field = "model" if method == "draft_model" else "path"
    return Online(llama(), KINDS[method](**{field: module(method)}, **options), learning)


def engine(learner: Online, *more: Any, **options: Any) -> Engine:
    return Engine(learner.target, learner.drafter, *more, observer=learner, **{"adaptive": False, **options})


def weights(learner: Online) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def scramble(learner: Online, seed: int) -> None:
    """Have the drafter draft with other weights from the next step on."""
    random = torch.Generator().manual_seed(seed)
    learner._learnt = {
        name: own + 0.5 * torch.randn(own.shape, generator=random).to(own)
        if own.is_floating_point()
        else own.clone()
        for name, own in learner.module.state_dict().items()
    }


# -- exactness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "params"),
    in_turn(
        [*((method, {}) for method in METHODS), *TREES.items()],
        [GREEDY, SAMPLED],
    ),
)
def test_weights_that_change_in_the_middle_change_no_token(
    method: str, options: dict[str, Any], params: SamplingParams
) -> None:
    learner = online(method, **options)
    running = engine(learner)
    sequences = [running.add(prompt, params) for prompt in PROMPTS[:4]]
    turns = 0
    while running.sequences:
        turns += 1
        before = weights(learner)
        if turns % 2:
            scramble(learner, turns)
        taken = [sequence.output for sequence in sequences]
        running.step()
        # The caches of drafts already made hold what older weights put there.
        assert same(before, weights(learner)) != bool(turns % 2)
        for sequence, prior, tokens in zip(sequences, taken, plain(params), strict=False):
            assert sequence.output == tokens[: len(sequence.output)] and len(sequence.output) >= len(prior)
    assert [sequence.output for sequence in sequences] == plain(params)[:4]
    assert sum(sequence.stats.drafted for sequence in sequences) > 0 and turns > 4


@pytest.mark.parametrize("method", [method for method in ("medusa", "draft_model") if method in LEARNED])
def test_rounds_in_the_middle_change_no_token(method: str) -> None:
    learner = online(method, replace(LEARNING, length=12, updates=2, learning_rate=0.5))
    running = engine(learner)
    sequences = [running.add(prompt, SAMPLED) for prompt in PROMPTS]
    while running.sequences:
        running.step()
        learner.step()
    assert [sequence.output for sequence in sequences] == plain(SAMPLED)
    assert len(learner.rounds) > 5


@pytest.mark.parametrize("method", METHODS)
def test_weights_change_between_steps_only(method: str) -> None:
    """Weights that arrive while a draft is made, or a step runs, wait for the step's end."""
    learner = online(method)
    running = engine(learner)
    running.add(PROMPTS[0], GREEDY)
    running.step()
    before = weights(learner)
    seen: list[bool] = []
    drafter = type(learner.drafter)
    propose, observe = drafter.propose, drafter.observe
    with pytest.MonkeyPatch.context() as patch:

        def proposing(self: Any, states: Any) -> Any:
            scramble(learner, 7)
            drafts = propose(self, states)
            seen.append(same(before, weights(learner)))
            return drafts

        def observing(self: Any, states: Any, steps: Any) -> None:
            seen.append(same(before, weights(learner)))
            observe(self, states, steps)

        patch.setattr(drafter, "propose", proposing)
        patch.setattr(drafter, "observe", observing)
        running.step()
    assert seen == [True, True] and not same(before, weights(learner))


def test_it_learns_for_a_drafter_among_others() -> None:
    learner = online("medusa")
    running = Engine(llama(), Combined((learner.drafter, PromptLookup())), observer=learner, adaptive=False)
    lengths = []
    for _ in range(3):
        found = running.generate(PROMPTS, GREEDY)
        assert [g.tokens for g in found] == plain(GREEDY)
        lengths.append(sum(g.stats.steps for g in found))
        learner.step()
    assert lengths[-1] < lengths[0] and len(learner.rounds) == 3


# -- learning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "places"),
    in_turn(
        [m for m in ("medusa", "eagle", "spec_drafter", "draft_model") if m in LEARNED], ["rejected", "all"]
    ),
)
def test_more_is_accepted_after_rounds(method: str, places: Any) -> None:
    target = ToyTarget()
    field = "model" if method == "draft_model" else "path"
    drafter = KINDS[method](**{field: module(method, target)})
    learner = Online(
        target, drafter, replace(LEARNING, updates=20, rows=8, learning_rate=0.01, places=places)
    )
    running = engine(learner)
    steps = []
    for _ in range(4):
        found = running.generate(PROMPTS, GREEDY)
        assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, GREEDY)]
        steps.append(sum(g.stats.steps for g in found))
        learner.step()
    assert min(steps[1:]) < 0.9 * steps[0]  # a round judges on few texts, and may go back


def test_a_layer_and_embeddings_of_the_target_learn_too() -> None:
    """Those read by the drafter through the target itself: it must see what was learnt."""
    for method in ("early_exit", "parallel_tokens"):
        learner = online(method)
        running = engine(learner)
        before = [g.stats.accepted_per_position for g in running.generate(PROMPTS, GREEDY)]
        scramble(learner, 3)
        learner.step()
        after = [g.stats.accepted_per_position for g in running.generate(PROMPTS, GREEDY)]
        assert learner.rounds and before != after


def test_half_a_drafter_learns_in_whole_numbers() -> None:
    """A drafter in bfloat16 has a copy in float32: small updates would be lost in rounding."""
    target = Target(tiny_llama(layers=3, dtype=torch.bfloat16))
    heads = module("medusa", target).bfloat16()
    learner = Online(target, Medusa(heads), replace(LEARNING, learning_rate=1e-5, updates=4))
    running = engine(learner)
    running.generate(PROMPTS, GREEDY)
    while not learner.rounds or learner.rounds[-1].kept != "learnt":
        before = {name: own.clone() for name, own in learner._trainee.module.state_dict().items()}
        assert learner.step() is not None
    copied = learner._trainee.module.state_dict()
    assert not same(before, copied)
    assert all(own.dtype == torch.float32 for own in copied.values())
    assert all(own.dtype == torch.bfloat16 for own in heads.state_dict().values())
    assert same(weights(learner), {name: own.bfloat16() for name, own in copied.items()})


def test_rounds_are_repeatable() -> None:
    def run(seed: int) -> tuple[list[Round], dict[str, Tensor]]:
        learner = online("dflash", replace(LEARNING, updates=3, seed=seed))
        running = engine(learner)
        for start in (0, 6):
            running.generate(PROMPTS[start : start + 6], SAMPLED)
            torch.rand(1)  # whoever draws besides does not matter
            learner.step()
        return list(learner.rounds), weights(learner)

    state = torch.random.get_rng_state()
    (rounds, learnt), (again, twice), (other, _) = run(0), run(0), run(1)
    assert rounds == again and same(learnt, twice) and len(rounds) == 2
    assert [found.loss for found in rounds] != [found.loss for found in other]
    torch.random.set_rng_state(state)
    learner = online("dflash")
    engine(learner).generate(PROMPTS, GREEDY)
    assert learner.step() is not None
    assert torch.equal(state, torch.random.get_rng_state())


def test_nothing_to_learn_or_to_measure_on() -> None:
    learner = online("medusa")
    assert learner.step() is None
    running = engine(learner)
    running.generate(PROMPTS[:3], GREEDY)
    assert learner.step() is None and not learner.rounds
    running.generate(PROMPTS[3:4], GREEDY)  # the fourth is held back
    assert learner.step() is not None


# -- going back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "finite"), [(30.0, True), (1e38, False)])
def test_what_is_worse_is_undone(rate: float, finite: bool) -> None:
    learner = online("eagle", replace(LEARNING, updates=30, rows=8))
    running = engine(learner)
    running.generate(PROMPTS, GREEDY)
    good = learner.step()
    assert good is not None and good.kept == "learnt"
    learnt = weights(learner)
    trainee = learner._trainee
    trainee._learning = replace(LEARNING, learning_rate=rate)
    trainee._optimizer = trainee._fresh()
    bad = learner.step()
    assert bad is not None and bad.kept == "before" and (bad.loss is None) is not finite
    assert bad.expected_length["learnt"] < bad.expected_length["before"]
    assert same(weights(learner), learnt)
    assert same(dict(trainee.module.state_dict()), learnt)
    # Where the updates were heading is forgotten too.
    assert not trainee._optimizer.state
    found = running.generate(PROMPTS, GREEDY)
    assert [g.tokens for g in found] == plain(GREEDY)


def test_a_drafter_that_has_become_bad_begins_anew() -> None:
    learner = online("medusa", replace(LEARNING, learning_rate=1e-9, updates=1, measured=72))
    first = weights(learner)
    running = engine(learner)
    running.generate(PROMPTS, GREEDY)
    # The topic has changed, say: what was learnt is now worse than nothing.
    scramble(learner, 1)
    assert learner._learnt is not None
    learner._trainee.module.load_state_dict(learner._learnt)
    learner._trainee._is_first = False
    found = learner.step()
    assert found is not None and found.kept == "first"
    assert found.expected_length["first"] > found.expected_length["before"]
    assert same(weights(learner), first)
    again = learner.step()
    assert again is not None and "first" not in again.expected_length  # it is what was before


# -- in the background -----------------------------------------------------------------------------------


def test_it_learns_in_the_background() -> None:
    done = threading.Event()
    threads: set[str] = set()

    def report(found: Round) -> None:
        threads.add(threading.current_thread().name)
        done.set()

    learner = online("medusa", replace(LEARNING, every=100))
    learner._report = report
    running = engine(learner)
    before = weights(learner)
    with learner:
        # What a round has learnt is copied at the end of a step, which may be one of the next texts.
        while len(learner.rounds) < 2 or (len(learner.rounds) < 20 and same(before, weights(learner))):
            found = running.generate(PROMPTS, SAMPLED)
            assert [g.tokens for g in found] == plain(SAMPLED)
            assert done.wait(60)
        assert len(learner.rounds) > 1 and threads == {"outpace online learning"}
        with pytest.raises(OutpaceError, match="in the background already"):
            learner.step()
        with pytest.raises(OutpaceError, match="in the background already"):
            learner.start()
        with pytest.raises(OutpaceError, match=r"close\(\) it first"):
            learner.save("nowhere")
    assert not any(thread.name == "outpace online learning" for thread in threading.enumerate())
    assert any(found.kept == "learnt" for found in learner.rounds) and not same(before, weights(learner))
    learner.close()  # twice does no harm
    assert learner.step() is not None


def test_closing_gives_up_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = online("medusa", replace(LEARNING, every=1, updates=10**6))
    running = engine(learner)
    running.generate(PROMPTS, GREEDY)
    begun = threading.Event()
    update = Trainee._update

    def updating(self: Trainee, *args: Any) -> float:
        begun.set()
        return update(self, *args)

    monkeypatch.setattr(Trainee, "_update", updating)
    before = weights(learner)
    with learner:
        running.generate(PROMPTS[:1], GREEDY)
        assert begun.wait(60)
    assert not learner.rounds and same(before, weights(learner))
    assert same(before, dict(learner._trainee.module.state_dict()))


def test_decoding_goes_on_where_learning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def failing(*args: Any, **options: Any) -> None:
        failed.set()
        raise RuntimeError("no memory left")

    monkeypatch.setattr(Trainee, "learn", failing)
    learner = online("medusa", replace(LEARNING, every=1))
    running = engine(learner)
    learner.start()
    running.generate(PROMPTS, GREEDY)
    assert failed.wait(60)
    assert [g.tokens for g in running.generate(PROMPTS, GREEDY)] == plain(GREEDY)
    with pytest.raises(OutpaceError, match="no memory left"):
        learner.close()
    assert isinstance(learner.error, RuntimeError)


def test_seeds_that_the_clock_would_decide_are_refused() -> None:
    learner = online("medusa")
    running = engine(learner, "rejection")
    first = running.generate(PROMPTS[:2], SAMPLED)
    with learner:
        with pytest.raises(OutpaceError, match="learns in the background"):
            running.generate(PROMPTS, SAMPLED)
        running.generate(PROMPTS[:2], replace(SAMPLED, seed=None))
        assert [g.tokens for g in running.generate(PROMPTS, GREEDY)] == plain(GREEDY)
    again = running.generate(PROMPTS[:2], SAMPLED)
    assert [g.tokens for g in first] == [g.tokens for g in again]


# -- memory, folders, mistakes ---------------------------------------------------------------------------


def test_memory_is_bounded() -> None:
    learner = online("medusa", replace(LEARNING, tokens=200, length=16))
    running = engine(learner)
    for _ in range(3):
        sequences = [running.add(prompt, GREEDY) for prompt in PROMPTS]
        while running.sequences:
            running.step()
            assert learner._buffer.tokens <= 200
            assert len(learner._open) <= len(PROMPTS)
            assert all(len(own._tokens) < 16 + 6 for own in learner._open.values())
            if len(sequences[0].output) > 9:
                running.remove(sequences[0])
        assert not learner._open
    assert learner._buffer.tokens > 150
    ending = running.add(PROMPTS[0], GREEDY)
    running.step()
    running.remove(ending)
    assert not learner._open


def test_a_governor_that_drafts_nothing_leaves_something_to_learn() -> None:
    learner = online("medusa")
    found = engine(learner, adaptive=Pinned(0)).generate(PROMPTS, GREEDY)
    assert not any(g.stats.drafted for g in found)
    assert all(len(record.places) == 24 for record in learner._buffer.learnt)


def test_what_was_learnt_is_saved(tmp_path: Path) -> None:
    learner = online("medusa")
    running = engine(learner)
    running.generate(PROMPTS, GREEDY)
    found = learner.step()
    assert found is not None and found.kept == "learnt"
    learner.save(tmp_path)
    (saved,) = json.loads((tmp_path / "online.json").read_text())
    assert saved["expected_length"] == found.expected_length and saved["kept"] == "learnt"
    again = Engine(llama(), f"medusa:path={tmp_path}", adaptive=False).generate(PROMPTS, GREEDY)
    here = running.generate(PROMPTS, GREEDY)
    assert [g.stats.steps for g in again] == [g.stats.steps for g in here]
    # A folder gives weights of its own: another engine's stay what they are.
    one, other = (Online(llama(), f"medusa:path={tmp_path}") for _ in range(2))
    scramble(one, 1)
    one._swap()
    assert not same(weights(one), weights(other))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("lookahead", "lookahead has no weights of its own to learn. Drafters that have: blockwise"),
        ("none", "none has no weights"),
        ("combined:(lookahead)+(prompt_lookup)", "make it with the drafter of an Online"),
        ("early_exit", "early_exit needs weights of its own to learn: give path=FOLDER"),
        ("parallel_tokens", "outpace train parallel_tokens"),
        ("medusa:path=/nowhere", "there is no /nowhere/config.json"),
        (Medusa(3), "give path=FOLDER, or a module"),
    ],
)
def test_what_cannot_learn_is_refused(drafter: Any, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Online(ToyTarget(), drafter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 7}, "length must be at least 8"),
        ({"every": 0}, "every must be at least 1"),
        ({"updates": 0}, "updates"),
        ({"rows": 0}, "rows"),
        ({"held_back": 1}, "held_back must be at least 2"),
        ({"tokens": 100}, "tokens must be at least 128"),
        ({"measured": 0}, "measured must be at least 1"),
        ({"measured": 600}, "it must be at least 4800"),
        ({"places": "some"}, "'rejected' or 'all'"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"objective": "luck"}, "there is no objective 'luck'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        replace(LEARNING, **changes)


def test_a_module_of_another_target_is_refused() -> None:
    heads = TrainedMedusa.new(MedusaConfig(), ToyTarget())
    with pytest.raises(OutpaceError, match="bound to another target"):
        Online(ToyTarget(), Medusa(heads))
