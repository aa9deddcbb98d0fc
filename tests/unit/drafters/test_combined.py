"""Combined drafters: each part's view of a step, the choice of nodes, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from outpace.core import Draft, Generation, OutpaceError, SamplingParams, Stats
from outpace.drafters import Drafter, load_drafter
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.parallel.jacobi import Jacobi
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.policy.governor import Pinned
from outpace.policy.plan import DraftPlan
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import chain, path_to, select
from parts import first, in_turn

PROMPTS = [[5], [3, 9, 2, 7, 3, 9], [6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.95, seed=5)
RECYCLED = load_drafter("token_recycling:max_nodes=9")  # of outpace-lab: it learns from logits
DRAFT_MODEL = DraftModel(ToyTarget(surprise=0.7), num_speculative_tokens=3)


@dataclass(frozen=True)
class Recorded(Drafter[Any]):
    """A wrapper of a drafter that records its proposals and what it observed, by sequence."""

    inner: Drafter[Any]
    layers: tuple[int, ...] = ()
    seen: list[tuple[list[int], Draft, Step]] = field(default_factory=list, compare=False)
    pending: dict[int, tuple[list[int], Draft]] = field(default_factory=dict, compare=False)

    paper: ClassVar[str] = "none"

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        return self.layers

    @property
    def probabilities(self) -> bool:
        return self.inner.probabilities

    def prepare(self, target: TargetModel) -> Any:
        return self.inner.prepare(target)

    def start(self, sequence: Sequence, shared: Any) -> Any:
        return sequence, self.inner.start(sequence, shared)

    def stop(self, state: Any) -> None:
        self.inner.stop(state[1])

    def propose(self, states: Seq[Any]) -> list[Draft]:
        drafts = self.inner.propose([own for _, own in states])
        for (sequence, _), draft in zip(states, drafts, strict=True):
            self.pending[id(sequence)] = list(sequence.tokens), draft
        return drafts

    def observe(self, states: Seq[Any], steps: Seq[Step]) -> None:
        for (sequence, _), step in zip(states, steps, strict=True):
            nothing = list(sequence.tokens), Draft()  # it was not asked
            self.seen.append((*self.pending.pop(id(sequence), nothing), step))
        self.inner.observe([own for _, own in states], steps)


@pytest.mark.parametrize(
    "drafter",
    first(
        2,
        [
            Combined((DRAFT_MODEL, PromptLookup())),
            Combined(
                (RECYCLED, Jacobi(num_speculative_tokens=3)),
                max_nodes=5,
                row_cost=0,
                minimum=2,
                share=False,
            ),
            Combined((Lookahead(window=3, ngram=3), PromptLookup())),
            Combined((PromptLookup(), RECYCLED), enough=0.01),
        ],
    ),
)
def test_it_keeps_the_contract(drafter: Combined) -> None:
    check_drafter(drafter)


# -- what a part sees ------------------------------------------------------------------------------------


def counts(generation: Generation) -> dict[str, Any]:
    return {name: v for name, v in vars(generation.stats).items() if not name.startswith("seconds")}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("part", [Lookahead(window=3, ngram=3), RECYCLED, DRAFT_MODEL])
def test_a_part_alone_sees_what_it_sees_uncombined(
    part: Drafter[Any], verifier: str, params: SamplingParams
) -> None:
    alone, inside = Recorded(part, layers=(0, 2)), Recorded(part, layers=(0, 2))
    expected = Engine(ToyTarget(), alone, verifier, adaptive=False).generate(PROMPTS, params)
    found = Engine(ToyTarget(), Combined((inside,)), verifier, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert [counts(g) for g in found] == [counts(g) for g in expected]
    assert len(inside.seen) == len(alone.seen)
    for (_, _, one), (_, _, other) in zip(inside.seen, alone.seen, strict=True):
        same_step(one, other)


def same_step(one: Step, other: Step) -> None:
    for name in ("path", "tokens", "root", "depths"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.kept) == list(other.kept)
    assert (list(one.draft.tokens), list(one.draft.parents)) == (
        list(other.draft.tokens),
        list(other.draft.parents),
    )
    given, expected = one.draft.distributions, other.draft.distributions
    assert (given is None) == (expected is None)
    if given is not None and expected is not None:
        assert given.keys() == expected.keys()
        assert all(torch.equal(given[node], expected[node]) for node in given)
    assert torch.equal(one.logits.rows, other.logits.rows)
    nodes = range(-1, len(one.draft))
    assert all(torch.equal(one.logits[node], other.logits[node]) for node in nodes)
    assert one.refill(nodes) == other.refill(nodes)
    assert one.hidden.keys() == other.hidden.keys()
    assert all(torch.equal(one.hidden[layer], other.hidden[layer]) for layer in one.hidden)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("options", [{}, {"max_nodes": 6, "row_cost": 0.0}])
def test_each_part_sees_the_fate_of_its_own_nodes(options: dict[str, Any], params: SamplingParams) -> None:
    parts = (
        Recorded(RECYCLED, layers=(1,)),
        Recorded(Jacobi(num_speculative_tokens=4), layers=(0, 2)),
        Recorded(PromptLookup()),
    )
    target = ToyTarget()
    Engine(target, Combined(parts, **options), adaptive=False).generate(PROMPTS, params)
    cut = longer = 0
    for part in parts:
        for text, proposal, step in part.seen:
            draft, kept = step.draft, list(step.kept)
            assert draft == select(proposal, kept)
            cut += len(kept) < len(proposal)
            # Its path is as much of what was said as it had drafted, short of the last token.
            texts = [
                [draft.tokens[n] for n in path_to(draft.parents, node)] for node in range(-1, len(draft))
            ]
            right = max((t for t in texts if t == step.tokens[: len(t)]), key=len)
            if len(right) == len(
                step.tokens
            ):  # the last one came at the limit of what was allowed, or ended it
                right = right[: len(right) if step.sequence.finish_reason else -1]
            assert [draft.tokens[node] for node in step.path] == right
            assert step.path == path_to(draft.parents, step.path[-1] if step.path else -1)
            longer += len(step.tokens) > len(right) + 1
            assert step.root == len(text) - step.sequence.prompt_length
            assert set(step.hidden) == set(part.layers)
            check_rows(target, text, texts, step)
    assert cut > 5 and longer > 5


def check_rows(target: ToyTarget, text: list[int], texts: list[list[int]], step: Step) -> None:
    """Check that the rows are the target's predictions after each node, and the hidden states its own."""
    for node in {-1, 0, len(step.draft) - 1} & set(range(-1, len(step.draft))):
        cache = target.new_cache()
        slot = cache.allocate()
        output = target.forward(cache, Batch.of({slot: text + texts[node + 1]}), tuple(step.hidden))
        assert output.logits is not None
        assert torch.allclose(step.logits[node], output.logits[-1])
        assert torch.allclose(step.logits.rows[node + 1], output.logits[-1])
        for layer, states in step.hidden.items():
            assert states.shape[0] == len(step.draft) + 1
            assert torch.allclose(states[node + 1], output.hidden[slot][layer][-1])


# -- who gets the nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Oracle(SequenceDrafter[Sequence]):
    """A drafter of the coming text where it is to be right, and of something else otherwise."""

    text: tuple[int, ...]
    right: tuple[int, int] = (0, 10**9)
    length: int = 5
    tag: int = 0

    paper: ClassVar[str] = "none"

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        at = state.output_length
        wrong = not self.right[0] <= at < self.right[1]
        return chain([(token + wrong) % 32 for token in self.text[at : at + self.length]])


@dataclass(frozen=True)
class Other(Oracle):
    pass


LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


def said() -> tuple[int, ...]:
    return tuple(Engine(ToyTarget(context=None)).generate([[5]], LONG)[0].tokens)


def run(drafter: Drafter[Any], **options: Any) -> Stats:
    (generation,) = Engine(ToyTarget(context=None), drafter, **{"adaptive": False, **options}).generate(
        [[5]], LONG
    )
    assert tuple(generation.tokens) == said()
    return generation.stats


def test_a_useless_part_gets_almost_nothing() -> None:
    text = said()
    alone = run(Oracle(text))
    both = run(Combined((Oracle(text), Other(text, right=(0, 0))), row_cost=0.02))
    assert both.steps <= alone.steps + 2
    assert both.extra["oracle_drafted"] == alone.drafted
    assert both.extra["oracle_accepted"] == alone.accepted
    assert both.extra["other_drafted"] < 0.15 * both.extra["oracle_drafted"]
    assert both.extra["other_accepted"] == 0
    without = run(Combined((Oracle(text), Other(text, right=(0, 0))), row_cost=0.02, minimum=0))
    assert without.extra["other_drafted"] < both.extra["other_drafted"]


def test_the_nodes_go_to_the_part_that_is_right_now() -> None:
    text = said()
    parts = Recorded(Oracle(text, right=(0, 60))), Recorded(Other(text, right=(60, 400)))
    whole = run(Combined(parts, row_cost=0.01))
    assert whole.steps <= run(Oracle(text)).steps + 2

    def drafted(part: Recorded, steps: slice) -> int:
        return sum(len(step.draft) for _, _, step in part.seen[steps])

    assert drafted(parts[0], slice(6, 10)) > 2 * drafted(parts[1], slice(6, 10))
    assert drafted(parts[1], slice(-8, None)) > 3 * drafted(parts[0], slice(-8, None))


@dataclass(frozen=True)
class Says(Oracle):
    chance: float = 0.5

    def draft(self, state: Sequence) -> Draft:
        draft = super().draft(state)
        return Draft(draft.tokens, draft.parents, chances=[self.chance] * len(draft))


@dataclass(frozen=True)
class Promises(Oracle):
    def promise(self, state: Sequence) -> float:
        return 0.7


def test_it_promises_what_its_surest_part_does() -> None:
    drafter = Combined((Oracle(said()), Promises(said())))
    sequence = Sequence([5], LONG, Key(0), limit=9)
    assert drafter.promise(drafter.start(sequence, drafter.prepare(ToyTarget()))) == 0.7


def test_it_states_chances_unless_nodes_are_drafted_that_do_not_pay() -> None:
    text = said()
    watch = Recorded(Combined((Says(text, chance=0.9), Other(text, right=(0, 0)))))
    run(watch)
    stated = [draft.chances for _, draft, _ in watch.seen[:16]]
    # The turns of the second part and of the first.
    assert [place for place, chances in enumerate(stated) if chances is None] == [0, 15]
    for chances in filter(None, stated):
        assert list(chances) == sorted(chances, reverse=True) and chances[0] > 0.5
    watch = Recorded(Combined((Says(text, chance=0.9), Other(text, right=(0, 0))), row_cost=0))
    run(watch)
    assert {draft.chances for _, draft, _ in watch.seen} == {None}


def test_a_chance_that_is_stated_is_believed_at_once() -> None:
    text = said()
    parts = Says(text, right=(0, 0), chance=0.01), Oracle(text)
    stats = run(Combined(parts, row_cost=0.02, minimum=0))
    assert stats.extra["says_drafted"] == 0
    assert stats.extra["oracle_drafted"] == stats.drafted


def test_and_measured_where_it_is_wrong() -> None:
    text = said()
    says = Recorded(Says(text, right=(0, 0), chance=0.9))
    run(Combined((says, Oracle(text)), row_cost=0.02, minimum=0))
    drafted = [len(step.draft) for _, _, step in says.seen]
    assert drafted[0] and not any(drafted[-8:])


def test_parts_after_one_that_is_sure_enough_are_not_asked() -> None:
    text = said()
    for chance, enough, asked in ((0.95, 0.9, False), (0.85, 0.9, True), (0.95, 1.1, True)):
        sure, other = Recorded(Says(text, chance=chance)), Recorded(Other(text))
        run(Combined((sure, other), enough=enough))
        assert len(other.seen) == len(sure.seen)
        drafted = [place for place, (_, draft, _) in enumerate(other.seen) if len(draft)]
        assert drafted[:3] == ([0, 1, 2] if asked else [0, 16, 32])  # in its turn it drafts in any case
        first, last = Recorded(Other(text)), Recorded(Says(text, chance=chance))
        run(Combined((first, last), enough=enough))
        assert all(len(draft) for _, draft, _ in first.seen[:-1])


def test_parts_that_read_no_hidden_states_draft_in_the_first_step() -> None:
    prompt = PROMPTS[1]
    text = tuple(Engine(ToyTarget(context=None)).generate([prompt], LONG)[0].tokens)
    for layers in ((), (1,)):
        reader, other = Recorded(Oracle(text), layers=(0,)), Recorded(Other(text), layers=layers)
        engine = Engine(ToyTarget(context=None), Combined((reader, other), enough=2.0), adaptive=False)
        assert tuple(engine.generate([prompt], LONG)[0].tokens) == text
        first, second = ([len(part.seen[step][1]) for part in (reader, other)] for step in (0, 1))
        assert first == [0, 0 if layers else 5] and second == [5, 5]


def test_the_turn_of_a_part_does_not_pass_in_a_step_in_which_it_may_not_draft() -> None:
    prompt = PROMPTS[1]
    text = tuple(Engine(ToyTarget(context=None)).generate([prompt], LONG)[0].tokens)
    reader = Recorded(Oracle(text), layers=(0,))
    drafter = Combined((Says(text, chance=0.95), reader))
    Engine(ToyTarget(context=None), drafter, adaptive=False).generate([prompt], [LONG])
    drafted = [step for step, (_, draft, _) in enumerate(reader.seen) if len(draft)]
    assert drafted[:3] == [1, 17, 33]


@dataclass(frozen=True)
class Slow(Other):
    """A drafter that takes time, in plain steps, on a clock of its own."""

    seconds: float = 1.0
    clock: list[float] = field(default_factory=lambda: [0.0], compare=False)

    def propose(self, states: Seq[Any]) -> list[Draft]:
        self.clock[0] += self.seconds * len(states)
        return super().propose(states)


@dataclass(frozen=True)
class Timed(Pinned):
    """Plans 12 nodes; a plain step takes a second, if that is measured."""

    measured: bool = True

    def plan(self, batch: int) -> DraftPlan:
        return DraftPlan(self.nodes, 0.01, plain_seconds=float(batch) if self.measured else None)


@pytest.mark.parametrize(
    ("first", "right", "seconds", "measured", "asked", "prompts"),
    in_turn(
        [
            ((0, 0), (0, 0), 0.3, True, False),  # it adds nothing
            ((0, 0), (0, 0), 0.3, False, True),
            ((0, 0), (0, 10**9), 0.3, True, True),  # it adds all tokens
            ((0, 0), (0, 10**9), 9.0, True, False),
            ((0, 10**9), (0, 10**9), 0.3, True, False),  # the first part proposes the same
        ],
        [[[5]], [[5], [5]]],
    ),
)
def test_a_slow_part_drafts_where_it_adds_more_than_its_time(
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    first: tuple[int, int],
    right: tuple[int, int],
    seconds: float,
    measured: bool,
    asked: bool,
) -> None:
    text = said()
    slow = Slow(text, right=right, seconds=seconds)
    monkeypatch.setattr(
        "outpace.drafters.combined.combined.time", SimpleNamespace(perf_counter=lambda: slow.clock[0])
    )
    watch = Recorded(slow)
    combined = Combined((Says(text, right=first, chance=0.3), watch))
    engine = Engine(ToyTarget(context=None), combined, adaptive=Timed(12, measured=measured))
    for generation in engine.generate(prompts, [LONG] * len(prompts)):
        assert tuple(generation.tokens) == text
    late = [draft for _, draft, _ in watch.seen[len(watch.seen) // 2 :]]
    drafted = sum(len(draft) > 0 for draft in late) / len(late)
    assert drafted > 0.9 if asked else 0 < drafted < 0.15  # in its turn it drafts in any case


@dataclass(frozen=True)
class SureOfOne(Says):
    """A drafter that is sure of one of the prompts."""

    def draft(self, state: Sequence) -> Draft:
        draft = super().draft(state)
        chance = 0.95 if list(state.prompt) == [5] else 0.5
        return Draft(draft.tokens, draft.parents, chances=[chance] * len(draft))


def test_the_sequences_of_a_batch_are_asked_for_one_by_one() -> None:
    other = Recorded(Other(said()))
    engine = Engine(ToyTarget(context=None), Combined((SureOfOne(said()), other)), adaptive=False)
    found = engine.generate([[5], [6]], [LONG, GREEDY])
    plain = Engine(ToyTarget(context=None)).generate([[5], [6]], [LONG, GREEDY])
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    asked = [step.sequence.prompt[0] for _, draft, step in other.seen if len(draft)]
    assert asked.count(6) > 3 * asked.count(5)


def test_a_tight_budget_goes_to_the_likelier_nodes() -> None:
    text = said()
    drafter = Combined((Other(text, right=(0, 0)), Oracle(text)), max_nodes=5, row_cost=0, minimum=0)
    stats = run(drafter)
    assert stats.extra["oracle_drafted"] > 0.8 * stats.drafted
    assert stats.drafted <= 5 * stats.steps


def test_what_two_parts_propose_is_drafted_once() -> None:
    text = said()
    alone = run(Oracle(text))
    both = run(Combined((Oracle(text), Other(text))))
    assert (both.steps, both.drafted) == (alone.steps, alone.drafted)
    assert both.extra["oracle_drafted"] == both.extra["other_drafted"] == alone.drafted


def test_the_counts_of_two_parts_of_one_name_are_told_apart() -> None:
    text = said()
    stats = run(Combined((Oracle(text), Oracle(text, right=(0, 0))), row_cost=0.02))
    assert set(stats.extra) == {
        "oracle_drafted",
        "oracle_accepted",
        "oracle_2_drafted",
        "oracle_2_accepted",
    }
    assert stats.extra["oracle_accepted"] > 0 == stats.extra["oracle_2_accepted"]


def test_rows_cost_less_where_the_weights_take_longer_to_read() -> None:
    drafter = Combined((Jacobi(), Lookahead()))
    costs = []
    for device in ("cpu", "meta"):
        target = ToyTarget()
        target.device = torch.device(device)
        costs.append(drafter.prepare(target).row_cost)
    assert costs == [0.06, 0.01]
    assert Combined((Jacobi(),), row_cost=0.3).prepare(ToyTarget()).row_cost == 0.3


@dataclass(frozen=True)
class Priced(SequenceDrafter[Sequence]):
    """A drafter that notes the cost of a row that it is told."""

    told: list[float | None] = field(default_factory=list, compare=False)

    paper: ClassVar[str] = "none"

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        self.told.append(state.row_cost)
        return Draft()

    def learn(self, state: Sequence, step: Step) -> None:
        assert state.row_cost in (None, 0.01)  # the engine's own


@pytest.mark.parametrize(("given", "adaptive", "told"), [
    (None, False, 0.06), (0.3, False, 0.3), (None, True, 0.01), (0.3, True, 0.3),
])  # fmt: skip
def test_parts_draft_by_the_cost_of_a_row_that_the_tree_is_chosen_by(
    given: float | None, adaptive: bool, told: float
) -> None:
    part, policy = Priced(), Timed(3) if adaptive else False
    run(Combined((Jacobi(), part), row_cost=given), adaptive=policy)
    assert set(part.told) == {told}
    alone = Priced()
    run(Combined((alone,), row_cost=given), adaptive=policy)
    assert set(alone.told) == {0.01 if adaptive else None}


def test_the_likeliest_node_comes_first() -> None:
    text = said()
    watch = Recorded(Combined((Other(text, right=(0, 0)), Oracle(text)), row_cost=0))
    run(watch)
    for _, draft, step in watch.seen[20:]:
        assert step.path == list(range(len(step.path)))
        assert len(draft) > len(step.path)


def test_it_drafts_no_more_than_will_be_taken() -> None:
    watch = Recorded(Combined((RECYCLED, PromptLookup()), row_cost=0))
    stats = run(watch, adaptive=Pinned(3))
    assert max(len(draft) for _, draft, _ in watch.seen) == 3
    assert stats.steps < 400


def test_measurements_are_shared_by_the_sequences_of_an_engine_or_not() -> None:
    text = said()
    drafted = {}
    for share in (True, False):
        parts = (Oracle(text), Other(text, right=(0, 0)))
        engine = Engine(ToyTarget(context=None), Combined(parts, minimum=0, share=share), adaptive=False)
        one, other = (engine.generate([[5]], LONG)[0].stats.extra["other_drafted"] for _ in range(2))
        assert one > 0
        drafted[share] = other == one
    assert drafted == {True: False, False: True}


# -- delegation and refusals -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe(SequenceDrafter[Any]):
    """Notes what is called."""

    name: str
    layers: tuple[int, ...] = ()
    fails: bool = False
    follows: bool = True
    branches: bool = False
    calls: list[str] = field(default_factory=list, compare=False)

    paper: ClassVar[str] = "none"

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        return self.layers

    @property
    def trees(self) -> bool:
        return self.branches

    def prepare(self, target: TargetModel) -> Any:
        self.calls.append("prepare")
        return self.name

    def start(self, sequence: Sequence, shared: Any) -> Any:
        assert shared == self.name
        self.calls.append("start")
        if self.fails:
            raise OutpaceError("no")
        return self.name

    def revise(self, state: Any, unchanged: int) -> bool:
        self.calls.append(f"revise {unchanged}")
        return self.follows

    def draft(self, state: Any) -> Draft:
        assert state == self.name
        return Draft()

    def stop(self, state: Any) -> None:
        assert state == self.name
        self.calls.append("stop")


def test_parts_are_asked_for_what_they_need() -> None:
    one, two = Probe("one", layers=(2, 0)), Probe("two", layers=(1, 2))
    drafter = Combined((one, two))
    again = Combined((Probe("three", layers=(2, 0)), Probe("four", layers=(1, 2))))
    assert again.hidden_layers(again.prepare(ToyTarget())) == (0, 1, 2)
    assert drafter.trees and not Combined((one,)).trees and Combined((Probe("x", branches=True),)).trees
    Engine(ToyTarget(), drafter, adaptive=False).generate([[5]], SamplingParams(max_new_tokens=3))
    assert one.calls == two.calls == ["prepare", "start", "stop"]


def test_where_one_part_does_not_start_the_others_are_stopped() -> None:
    one, two, three = Probe("one"), Probe("two", fails=True), Probe("three")
    engine = Engine(ToyTarget(), Combined((one, two, three)), adaptive=False)
    with pytest.raises(OutpaceError, match="no"):
        engine.generate([[5]])
    assert one.calls == ["prepare", "start", "stop"]
    assert two.calls == ["prepare", "start"]
    assert three.calls == ["prepare"]


@pytest.mark.parametrize("follows", [True, False])
def test_it_follows_another_text_where_all_parts_do(follows: bool) -> None:
    parts = Probe("one"), Probe("two", follows=follows)
    drafter = Combined(parts)
    shared = drafter.prepare(ToyTarget())
    engine = Engine(ToyTarget())
    state = drafter.start(engine.add([5]), shared)
    assert drafter.revise(state, 1) is follows
    assert parts[0].calls[-1] == "revise 1"


def test_sampled_drafts_are_refused_where_they_would_be_weighed() -> None:
    drafter = Combined((DRAFT_MODEL, PromptLookup()))
    assert not drafter.probabilities and Combined((DRAFT_MODEL,)).probabilities
    with pytest.raises(OutpaceError, match=r"merges sampled drafts.*use verifier='match'"):
        Engine(ToyTarget(), drafter, "rejection")
    greedy = Combined((dataclasses.replace(DRAFT_MODEL, draws="greedy"), PromptLookup()))
    assert len(Engine(ToyTarget(), greedy, "rejection").generate(PROMPTS, SAMPLED)) == 3


def test_coupled_draws_are_merged() -> None:
    plain = Engine(ToyTarget()).generate(PROMPTS, SAMPLED)
    found = Engine(ToyTarget(), Combined((DRAFT_MODEL, PromptLookup())), adaptive=False).generate(
        PROMPTS, SAMPLED
    )
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.extra["draft_model_accepted"] for g in found) > 10


def test_it_is_read_from_a_spec() -> None:
    expected = Combined((Lookahead(window=5, ngram=4), PromptLookup()))
    assert load_drafter("combined:(lookahead:window=5,ngram=4)+(prompt_lookup)") == expected
    nested = load_drafter("combined:(combined:(jacobi)+(lookahead),max_nodes=9)+(prompt_lookup),row_cost=0.1")
    assert nested == Combined((Combined((Jacobi(), Lookahead()), max_nodes=9), PromptLookup()), row_cost=0.1)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ((), {}, "give it parts, as in combined:.lookahead."),
        ((Jacobi(), "lookahead"), {}, "a part must be a drafter, as in load_drafter"),
        ((Jacobi(), Lookahead(), Jacobi()), {}, "Jacobi is given twice with the same options"),
        ((Jacobi(),), {"max_nodes": 0}, "max_nodes must be at least 1, not 0"),
        ((Jacobi(),), {"minimum": -1}, "minimum must be at least 0, not -1"),
        ((Jacobi(),), {"row_cost": -0.5}, "row_cost must be a number of at least 0, not -0.5"),
        ((Jacobi(),), {"enough": 0.0}, "enough must be above 0, not 0"),
    ],
)
def test_a_mistake_is_named(parts: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Combined(parts, **options)
