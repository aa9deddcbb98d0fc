"""An engine with a governor emits the tokens of plain decoding; its clock is simulated."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from outpace.cache import Cache
from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import SequenceDrafter, load_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.jacobi import Jacobi
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.engine.engine import Engine
from outpace.policy.governor import Governor, Pinned
from outpace.policy.plan import DraftPlan, Outcome
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Output
from outpace.testing import ToyTarget
from outpace.tree import chain
from parts import in_turn

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 8), *range(1, 8), *range(1, 4)]]
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
SPECS = ["lookahead", "prompt_lookup", "jacobi"]
DRAFTERS = [
    Lookahead(window=3, ngram=3, guesses=3),
    Lookahead(window=0),
    PromptLookup(),
    Jacobi(num_speculative_tokens=5),
    DraftModel(ToyTarget(surprise=0.7), 3),
]


class Clock:
    """Seconds that pass by the rows of the target's forwards, and by the calls of the clock."""

    def __init__(self, per_row: float = 0.01) -> None:
        self.now = 0.0
        self.per_row = per_row

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


class Timed(TargetModel):
    """A target whose forwards take a fake clock's time: 1 for the first row, ``per_row`` for each other."""

    def __init__(self, target: TargetModel, clock: Clock) -> None:
        self._target, self._clock = target, clock
        self.vocabulary, self.context = target.vocabulary, target.context
        self.eos_token_ids = target.eos_token_ids
        self.widths: list[int] = []

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        return self._target.new_cache(slots, length, capacity)

    def forward(self, cache: Cache, batch: Batch, *args: Any, **kwargs: Any) -> Output:
        width = int(batch.widths.max())
        self.widths.append(width)
        self._clock.now += 1 + self._clock.per_row * (len(batch.slots) * width - 1)
        return self._target.forward(cache, batch, *args, **kwargs)


def governed(drafter: Any, per_row: float = 0.01, **options: Any) -> tuple[Engine, Timed]:
    clock = Clock(per_row)
    target = Timed(ToyTarget(), clock)
    return Engine(target, drafter, clock=clock, **{"adaptive": True, **options}), target


def plain(prompts: Seq[Seq[int]], params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(ToyTarget()).generate(prompts, params)]


@pytest.mark.parametrize(("spec", "per_row"), in_turn(SPECS, [0.0, 0.01, 0.3]))
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_plain_decoding(spec: str, params: SamplingParams, per_row: float) -> None:
    engine, target = governed(spec, per_row)
    for _ in range(2):
        assert [g.tokens for g in engine.generate(PROMPTS, params)] == plain(PROMPTS, params)
    assert {1} < set(target.widths)  # plain steps and drafts, both


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=repr)
def test_in_batches_that_join_and_leave(drafter: Drafter[Any], params: SamplingParams) -> None:
    engine, _ = governed(drafter, 0.0)
    sequences = [engine.add(PROMPTS[0], params), engine.add(PROMPTS[1], params)]
    for prompt in PROMPTS[2:]:
        for _ in range(5):
            engine.step()
        sequences.append(engine.add(prompt, dataclasses.replace(params, max_new_tokens=30)))
    engine.remove(sequences[0])
    while engine.sequences:
        engine.step()
    whole = zip(sequences, plain(PROMPTS, params), strict=True)
    assert all(sequence.output == tokens[: len(sequence.output)] for sequence, tokens in whole)
    assert [len(s.output) for s in sequences[1:]] == [60, 30, 30]


class Erratic:
    """A policy without sense: every width, and none, in an order that does not repeat soon."""

    timed = False

    def __init__(self) -> None:
        self.planned: list[DraftPlan] = []
        self._random = random.Random(0)

    def plan(self, batch: int) -> DraftPlan:
        nodes = self._random.choice([0, 0, 0, 1, 2, 5, 40, 40])
        self.planned.append(DraftPlan(nodes, narrow=self._random.random() < 0.3))
        return self.planned[-1]

    def learn(self, outcome: Outcome) -> None:
        assert outcome.plan == self.planned[-1]
        assert max(outcome.drafted) <= outcome.plan.nodes
        assert all(set(path) <= set(range(n)) for path, n in zip(outcome.paths, outcome.drafted, strict=True))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=repr)
def test_a_drafter_copes_with_any_budget(drafter: Drafter[Any], params: SamplingParams) -> None:
    policy = Erratic()
    engine = Engine(ToyTarget(), drafter, adaptive=policy)
    found = engine.generate(PROMPTS, params)
    assert [g.tokens for g in found] == plain(PROMPTS, params)
    assert sum(g.stats.accepted for g in found) > 0
    assert {0, 1, 40} <= {plan.nodes for plan in policy.planned}


@dataclasses.dataclass(frozen=True)
class Oracle(SequenceDrafter[Sequence]):
    """Knows the text, or is wrong throughout; counts nothing and learns nothing."""

    text: tuple[int, ...] = ()
    wrong: bool = False

    paper = "none: a test"

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        assert state.budget is None or state.budget > 0, "asked for a draft that nobody wants"
        there = self.text[state.output_length :][:12]
        return chain([(token + 1) % 32 for token in there] if self.wrong else there)


def test_drafts_are_as_wide_as_they_pay_and_none_where_they_do_not() -> None:
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    text = tuple(plain([PROMPTS[1]], params)[0])
    good, wide = governed(Oracle(text), 0.01)
    dear, narrow = governed(Oracle(text), 1.5)
    bad, none = governed(Oracle(text, wrong=True), 0.01)
    for engine in (good, dear, bad):
        for _ in range(2):
            assert tuple(engine.generate([PROMPTS[1]], params)[0].tokens) == text
    assert sum(wide.widths) / len(wide.widths) > 8
    assert sum(narrow.widths) / len(narrow.widths) < 1.5
    wasted = sum(0.01 * (width - 1) for width in none.widths)
    assert wasted < 0.02 * len(none.widths)  # of the time


def test_a_run_by_a_fake_clock_is_the_same_again() -> None:
    seen = []
    for _ in range(2):
        engine, target = governed("lookahead", 0.01)
        engine.generate(PROMPTS, SAMPLED)
        seen.append(target.widths)
    assert seen[0] == seen[1]


@dataclasses.dataclass(frozen=True)
class Says(Oracle):
    """States a chance with each token."""

    chance: float = 0.5

    def draft(self, state: Sequence) -> Draft:
        draft = super().draft(state)
        chances = [self.chance ** (node + 1) for node in range(len(draft))]
        return Draft(draft.tokens, draft.parents, chances=chances)


@dataclasses.dataclass(frozen=True)
class Costly(Pinned):
    """Plans 12 nodes that cost something."""

    row_cost: float = 0.0

    def plan(self, batch: int) -> DraftPlan:
        return DraftPlan(self.nodes, self.row_cost)


def test_a_draft_that_states_chances_is_cut_to_what_pays() -> None:
    text = tuple(plain([PROMPTS[1]], GREEDY)[0])
    widths = []
    for row_cost in (0.0, 0.2, 0.6):
        engine, target = governed(Says(text), adaptive=Costly(12, row_cost=row_cost))
        assert tuple(engine.generate([PROMPTS[1]], GREEDY)[0].tokens) == text
        widths.append(max(target.widths[1:]))
    assert widths == [13, 2, 1]  # at 0.2 a node the second, 0.25, breaks even; at 0.6 the first does not


def test_a_pinned_width_is_kept() -> None:
    engine, target = governed("jacobi", adaptive=Pinned(3))
    found = engine.generate([PROMPTS[1]], GREEDY)
    assert set(target.widths[1:-4]) == {4}
    assert found[0].tokens == plain([PROMPTS[1]], GREEDY)[0]
    none, narrow = governed("jacobi", adaptive=Pinned(0))
    none.generate([PROMPTS[1]], GREEDY)
    assert set(narrow.widths[1:]) == {1}


class Outcomes(Governor):
    """A policy that records the outcomes it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Outcome] = []

    def learn(self, outcome: Outcome) -> None:
        self.told.append(outcome)
        super().learn(outcome)


def test_the_governor_is_told_what_was_measured() -> None:
    policy = Outcomes()
    engine, target = governed("jacobi", 0.25, adaptive=policy)
    engine.generate(PROMPTS[1:3], GREEDY)
    # Rows of the prompts rode along with the first step.
    assert policy.told[0].verify_seconds is None
    for outcome, width in zip(policy.told[1:], target.widths[-len(policy.told) + 1 :], strict=True):
        rows = len(outcome.paths) * width
        assert outcome.rows == rows
        assert outcome.verify_seconds == pytest.approx(1 + 0.25 * (rows - 1), abs=1e-3)
        assert 0 < outcome.draft_seconds < 1e-3
        assert max(outcome.drafted) <= outcome.plan.nodes
    assert any(outcome.rows > 2 for outcome in policy.told)


# -- when it is on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "verifier", "on"),
    [
        ("lookahead", "match", True),
        (" prompt_lookup ", "match", True),
        ("lookahead:window=3", "match", True),
        (Lookahead(), "match", True),
        ("none", "match", False),
        (None, "match", False),
        (NoDraft(), "match", False),
        ("lookahead", "rejection", False),
        ("jacobi", "block", False),
        ("lookahead", "typical", False),
    ],
)
def test_auto_governs_under_match(drafter: Any, verifier: str, on: bool) -> None:
    for engine in (
        Engine(ToyTarget(), drafter, verifier),
        Engine(ToyTarget(), drafter, verifier, adaptive="auto"),
    ):
        assert isinstance(engine.governor, Governor) if on else engine.governor is None
    assert Engine(ToyTarget(), drafter, verifier, adaptive=False).governor is None
    always = Engine(ToyTarget(), drafter, verifier, adaptive=True)
    assert isinstance(always.governor, Governor) == (not isinstance(always.drafter, NoDraft))
    pinned = Pinned(2)
    assert Engine(ToyTarget(), drafter, verifier, adaptive=pinned).governor is pinned


@pytest.mark.parametrize("adaptive", ["Auto", None, 3, 1.0, Governor])
def test_adaptive_of_another_kind_is_refused(adaptive: Any) -> None:
    with pytest.raises(OutpaceError, match="'auto', True, False or a policy"):
        Engine(ToyTarget(), "lookahead", adaptive=adaptive)


@pytest.mark.parametrize("verifier", ["rejection", "typical"])
def test_a_seed_is_refused_where_its_tokens_would_depend_on_the_clock(verifier: str) -> None:
    engine, _ = governed("lookahead", verifier=verifier)
    with pytest.raises(OutpaceError, match="verifier='match', adaptive=False, or no seed"):
        engine.generate(PROMPTS, SAMPLED)
    assert not engine.sequences
    engine.generate(PROMPTS[:1], dataclasses.replace(SAMPLED, seed=None))
    governed("lookahead", verifier=verifier, adaptive=Pinned(4))[0].generate(PROMPTS[:1], SAMPLED)


def test_a_greedy_seed_is_refused_under_lossy_verifiers_only() -> None:
    greedy = dataclasses.replace(GREEDY, seed=1)
    engine, _ = governed("lookahead", verifier="rejection")
    assert [g.tokens for g in engine.generate(PROMPTS, greedy)] == plain(PROMPTS, GREEDY)
    lossy, _ = governed("lookahead", verifier="top_beta")
    with pytest.raises(OutpaceError, match="adaptive=False"):
        lossy.generate(PROMPTS, greedy)


# -- costs in a file -------------------------------------------------------------------------------------


def test_costs_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    engine, _ = governed("jacobi")
    engine.generate(PROMPTS, GREEDY)
    engine.save_costs(path)
    again, _ = governed("jacobi", costs=path)
    assert isinstance(engine.governor, Governor) and isinstance(again.governor, Governor)
    assert again.governor.costs() == engine.governor.costs()
    assert [g.tokens for g in again.generate(PROMPTS, GREEDY)] == plain(PROMPTS, GREEDY)


def test_costs_of_another_target_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    engine, _ = governed("jacobi")
    engine.generate(PROMPTS[:1], GREEDY)
    engine.save_costs(path)
    with pytest.raises(
        OutpaceError, match=r"no costs of '.*ToyTarget, 32 token ids', but profiles of: '.*Timed, 32"
    ):
        Engine(ToyTarget(), "jacobi", costs=path)
    with pytest.raises(OutpaceError, match="adaptive=True"):
        Engine(ToyTarget(), "jacobi", adaptive=False, costs=path)
    with pytest.raises(OutpaceError, match="adaptive=True"):
        Engine(ToyTarget()).save_costs(path)


def test_a_governor_begins_with_what_the_target_has_measured() -> None:
    target = ToyTarget()
    target.seconds = {1: 1.0, 4: 3.0}
    for drafter in ("jacobi", "lookahead"):
        governor = Engine(target, drafter).governor
        assert isinstance(governor, Governor)
        assert [governor.forwards.seconds(1, rows) for rows in (1, 4)] == [1.0, 3.0]
        assert governor.view(1).plain == 1.0
    governor = Engine(ToyTarget(), "jacobi").governor
    assert isinstance(governor, Governor) and not governor.forwards.dump()


# -- drafters that know their widths ---------------------------------------------------------------------


def test_lookahead_is_whole_or_not_at_all_but_for_its_guesses() -> None:
    drafter = Lookahead(window=4, ngram=3, guesses=2)
    assert drafter.widths == (9, 11)
    assert drafter.ramp == 4
    assert Lookahead(window=0, ngram=3, guesses=2).widths == (2, 4)
    assert load_drafter("jacobi").widths is None
    engine, target = governed(drafter, 0.0)
    engine.generate(PROMPTS[3:], GREEDY)
    assert engine.governor is not None
    assert max(target.widths[1:]) == 12


class Watching(Lookahead):
    """Notes how many of the window's levels each draft plants."""

    def draft(self, state: Any) -> Draft:
        draft = super().draft(state)
        assert all(state.levels) and state.levels[0][0] == state.sequence.tokens[-1]
        state.sequence.stats.count(f"levels_{len(state.levels)}", 1)
        return draft


def test_lookahead_begins_its_window_anew_after_plain_steps() -> None:
    class Alternating(Erratic):
        def plan(self, batch: int) -> DraftPlan:
            self.planned.append(DraftPlan(100 if len(self.planned) % 10 < 6 else 0))
            return self.planned[-1]

    engine = Engine(ToyTarget(), Watching(window=3, ngram=4, guesses=3), adaptive=Alternating())
    found = engine.generate([PROMPTS[1]], GREEDY)[0]
    levels = {name: count for name, count in found.stats.extra.items() if name.startswith("levels")}
    assert set(levels) == {"levels_1", "levels_2", "levels_3"}
    assert levels["levels_1"] >= 3
    assert found.tokens == plain([PROMPTS[1]], GREEDY)[0]


def test_narrow_drafts_of_lookahead_are_guesses_alone() -> None:
    drafter = Lookahead(window=3, ngram=4, guesses=2)
    assert drafter.narrow_widths == (3, 6)
    assert Lookahead(window=0, ngram=4, guesses=2).narrow_widths == ()
    assert Lookahead(pool_from_prompt=False, pool_from_output=False).narrow_widths == ()
    assert Lookahead(guesses=0).narrow_widths == ()
    sizes: dict[bool, list[int]] = {False: [], True: []}

    class Alternating(Erratic):
        def plan(self, batch: int) -> DraftPlan:
            self.planned.append(DraftPlan(100, narrow=len(self.planned) % 10 >= 6))
            return self.planned[-1]

        def learn(self, outcome: Outcome) -> None:
            sizes[outcome.plan.narrow].extend(outcome.drafted)

    found = Engine(ToyTarget(), drafter, adaptive=Alternating()).generate([PROMPTS[3]], GREEDY)[0]
    assert found.tokens == plain([PROMPTS[3]], GREEDY)[0]
    assert 0 < max(sizes[True]) <= 6 < max(sizes[False])
