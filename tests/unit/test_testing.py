"""ToyTarget is a proper model, no draft changes its tokens, and check_drafter names what is broken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import Drafter, SequenceDrafter
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.engine.engine import Engine
from outpace.sequence import Sequence as Text
from outpace.sequence import Step
from outpace.targets import Rows
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import chain, path_to
from parts import first

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=60, temperature=0.7, seed=1, ignore_eos=True)


# -- the toy is a proper model ----------------------------------------------------------------------------


def row(target: ToyTarget, text: list[int]) -> torch.Tensor:
    """The logits after a text, fed as one chain."""
    cache = target.new_cache()
    slot = cache.allocate()
    return target.forward(cache, Batch.of({slot: text})).logits_of(slot)[-1]


def test_a_tree_beside_another_sequence_has_the_rows_of_its_paths() -> None:
    target = ToyTarget()
    prompts, parents = [[4, 8, 15, 16, 23], [7, 7]], [-1, 0, 0, 1, 1, 2, 4]
    tree, beside = Rows([1, 2, 3, 2, 5, 6, 7], parents), Rows([9, 9])
    cache = target.new_cache(slots=1, length=2)
    slots = []
    for prompt in prompts:
        slots.append(slot := cache.allocate())
        target.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(len(prompt))})
    output = target.forward(cache, Batch.of(dict(zip(slots, (tree, beside), strict=True))))
    logits = [output.logits_of(slot) for slot in slots]
    assert logits[0].dtype == torch.float64
    for node in range(len(parents)):
        path = [tree.tokens[i] for i in path_to(parents, node)]
        torch.testing.assert_close(logits[0][node], row(target, prompts[0] + path))
    torch.testing.assert_close(logits[1][1], row(target, [7, 7, 9, 9]))


def test_it_is_the_same_in_every_run_and_another_by_seed() -> None:
    text = [1, 2, 3]
    assert torch.equal(row(ToyTarget(), text), row(ToyTarget(), text))
    assert not torch.equal(row(ToyTarget(seed=1), text), row(ToyTarget(), text))


def test_every_token_and_every_position_counts() -> None:
    target, text = ToyTarget(), list(range(1, 21))
    before = row(target, text)
    for place in range(len(text)):
        other = [*text[:place], 25, *text[place + 1 :]]
        assert (row(target, other) - before).abs().max() > 0.1
        shorter = text[:place] + text[place + 1 :]
        assert (row(target, shorter) - before).abs().max() > 0.1


def test_text_repeats_itself_but_not_in_a_loop() -> None:
    for params in (GREEDY, SAMPLED):
        (found,) = Engine(ToyTarget(context=None)).generate([[5]], replace(params, max_new_tokens=300))
        pairs = list(itertools.pairwise(found.tokens))
        assert 30 < len(set(pairs)) < 200
        assert len(set(found.tokens)) > 20


def test_options() -> None:
    ended = SamplingParams(max_new_tokens=400, temperature=1.5, seed=2)
    target = ToyTarget(vocabulary=8, eos=3, context=500)
    (found,) = Engine(target).generate([[5]], ended)
    assert found.finish_reason == "eos" and found.tokens[-1] == 3
    (found,) = Engine(ToyTarget(vocabulary=8, eos=None, context=50)).generate([[5]], ended)
    assert found.finish_reason == "length" and len(found.tokens) == 49
    surprises = [Engine(ToyTarget(surprise=s)).generate([[5]], GREEDY)[0].tokens for s in (0.0, 1.0)]
    assert len(set(surprises[0])) < 40 and surprises[0] != surprises[1]
    assert set(surprises[0][:31]) == set(surprises[0])  # a cycle of every token but one


def test_hidden_states_are_given_by_layer() -> None:
    target = ToyTarget()
    cache = target.new_cache()
    slot = cache.allocate()
    output = target.forward(cache, Batch.of({slot: [1, 2, 3]}, None), (0, 1, -1))
    hidden = output.hidden[slot]
    assert {layer: tuple(states.shape) for layer, states in hidden.items()} == dict.fromkeys(
        (0, 1, -1), (3, 16)
    )
    assert not torch.equal(hidden[0], hidden[1])


# -- drafts change no token -------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_drafts_change_no_token(params: SamplingParams) -> None:
    plain = Engine(ToyTarget()).generate(PROMPTS, params)
    drafter = Lookahead(window=4, ngram=3, guesses=4)
    drafted = Engine(ToyTarget(), drafter, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]


@dataclass(frozen=True)
class Oracle(SequenceDrafter[Text]):
    """A drafter of plain decoding's tokens."""

    answers: dict[tuple[int, ...], list[int]]
    paper: ClassVar[str] = "none"

    def start(self, sequence: Text, shared: Any) -> Text:
        return sequence

    def draft(self, state: Text) -> Draft:
        answer = self.answers[tuple(state.prompt)]
        return chain(answer[state.output_length :][:8])


def test_prompt_and_draft_in_one_forward() -> None:
    """The first step feeds the prompt too; it is the only one that hangs the draft under a longer chain."""
    prompts = [[(7 * i + 3 * start) % 32 for i in range(6)] for start in range(8)]
    plain = [g.tokens for g in Engine(ToyTarget()).generate(prompts, GREEDY)]
    oracle = Oracle(dict(zip(map(tuple, prompts), plain, strict=True)))
    sound = Engine(ToyTarget(), oracle, adaptive=False).generate(prompts, GREEDY)
    assert [g.tokens for g in sound] == plain
    assert [g.stats.steps for g in sound] == [7] * 8  # 60 tokens, 9 a step


# -- a broken drafter is named ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Guess(SequenceDrafter[Text]):
    """Drafts the first few token ids: sound, and now and then right."""

    count: int = 3
    table: list[int] = field(default_factory=list)

    paper: ClassVar[str] = "none"

    def start(self, sequence: Text, shared: Any) -> Text:
        return sequence

    def draft(self, state: Text) -> Draft:
        return chain(range(1, 1 + self.count))


@dataclass(frozen=True)
class Sampled(Guess):
    """Draws from a fixed distribution."""

    probabilities: ClassVar[bool] = True

    def distribution(self) -> torch.Tensor:
        return torch.arange(32, dtype=torch.float64).add(1).softmax(dim=-1).roll(5)

    def draft(self, state: Text) -> Draft:
        if state.params.greedy:
            return Draft()
        rows = {node - 1: self.distribution() for node in range(self.count)}
        random = np.random.default_rng([state.key.seed, state.output_length])
        tokens = random.choice(32, self.count, p=self.distribution().numpy()).tolist()
        return replace(chain(tokens), distributions=rows)


@dataclass(frozen=True)
class Remembers(Guess):
    def draft(self, state: Text) -> Draft:
        object.__setattr__(self, "_last", state)
        return Draft()


@dataclass(frozen=True)
class WritesToItsOption(Guess):
    def draft(self, state: Text) -> Draft:
        self.table.append(1)
        return Draft()


@dataclass(frozen=True)
class ForgetsADraft(Guess):
    def propose(self, states: Sequence[Text]) -> list[Draft]:
        return super().propose(states)[1:]


@dataclass(frozen=True)
class WrongParents(Guess):
    def draft(self, state: Text) -> Draft:
        return Draft((1, 2), (1, 0))


@dataclass(frozen=True)
class ParentsPastTheCheck(Guess):
    def draft(self, state: Text) -> Draft:
        draft = Draft((1, 2), (-1, 0))
        object.__setattr__(draft, "parents", (-1, 1))
        return draft


@dataclass(frozen=True)
class SurerOfTheChild(Guess):
    def draft(self, state: Text) -> Draft:
        return Draft([1, 2], [-1, 0], chances=[0.5, 0.6])


@dataclass(frozen=True)
class TooLarge(Guess):
    def draft(self, state: Text) -> Draft:
        return chain([1, 32])


@dataclass(frozen=True)
class Negative(Guess):
    def draft(self, state: Text) -> Draft:
        return chain([-1])


@dataclass(frozen=True)
class Tensors(Guess):
    def draft(self, state: Text) -> Draft:
        return chain([torch.tensor(1)])  # type: ignore[list-item]


@dataclass(frozen=True)
class NotADraft(Guess):
    def draft(self, state: Text) -> Draft:
        return [1, 2]  # type: ignore[return-value]


@dataclass(frozen=True)
class Raises(Guess):
    def learn(self, state: Text, step: Step) -> None:
        raise KeyError("lost")


@dataclass(frozen=True)
class WritesToTheText(Guess):
    def learn(self, state: Text, step: Step) -> None:
        state.tokens[-1] = 7


@dataclass(frozen=True)
class ExpectsItsDraft(Guess):
    def learn(self, state: Text, step: Step) -> None:
        if state.room > self.count and not len(step.draft):
            raise KeyError("no draft")


@dataclass(frozen=True)
class EndsTheText(Guess):
    def learn(self, state: Text, step: Step) -> None:
        state.limit = 10


@dataclass(frozen=True)
class Changes(Guess):
    calls: ClassVar[Any] = itertools.count()

    def draft(self, state: Text) -> Draft:
        return chain([1 + next(self.calls) % 31])


@dataclass(frozen=True)
class SharedAcrossEngines(Guess):
    texts: ClassVar[dict[str, int]] = {}

    def start(self, sequence: Text, shared: Any) -> Text:
        if len(sequence.tokens) == 1:
            self.texts["last"] = 1  # a new run begins, so that runs one after the other are alike
        return sequence

    def draft(self, state: Text) -> Draft:
        self.texts["last"] = self.texts["last"] * 5 % 31
        return chain([self.texts["last"]])


@dataclass(frozen=True)
class DoesNotSumToOne(Sampled):
    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        rows = {node: row * 0.9 for node, row in (draft.distributions or {}).items()}
        return replace(draft, distributions=rows or None)


@dataclass(frozen=True)
class Impossible(Sampled):
    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        rows = {node: row.clone() for node, row in (draft.distributions or {}).items()}
        for node, token in zip(rows, draft.tokens, strict=False):
            rows[node][token] = 0.0
            rows[node] /= rows[node].sum()
        return replace(draft, distributions=rows or None)


@dataclass(frozen=True)
class MissesADistribution(Sampled):
    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        return replace(draft, distributions={-1: self.distribution()} if len(draft) else None)


@dataclass(frozen=True)
class SinglePrecision(Sampled):
    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        rows = {node: row.float() for node, row in (draft.distributions or {}).items()}
        return replace(draft, distributions=rows or None)


@dataclass(frozen=True)
class Undeclared(Sampled):
    probabilities: ClassVar[bool] = False


@dataclass(frozen=True)
class DrawsFromAnother(Sampled):
    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        flat = torch.full((32,), 1 / 32, dtype=torch.float64)
        rows = dict.fromkeys(draft.distributions or (), flat)
        return replace(draft, distributions=rows or None)


@dataclass(frozen=True)
class LooksAtTheVerifiersDraws(Sampled):
    """A drafter of the token that the verifier's own draw will select, declared as an independent draw."""

    def draft(self, state: Text) -> Draft:
        draft = super().draft(state)
        if not len(draft):
            return draft
        flat = torch.full((32,), 1 / 32, dtype=torch.float64)
        from outpace.draws.noise import Stream, uniform

        token = int(uniform(state.key.node(Stream.ACCEPT, state.output_length, 0)) * 32)
        return Draft((token,), (-1,), {-1: flat})


class Options(Guess):
    """Not decorated, so its new option is no field."""

    more: int = 1


@dataclass(frozen=True)
class DoesNotPickle(Guess):
    helper: Any = field(default_factory=lambda: lambda: 0)


@dataclass(frozen=True)
class GrowsWhenReplaced(Guess):
    def __post_init__(self) -> None:
        object.__setattr__(self, "count", self.count + 1)


@dataclass(frozen=True)
class NoPaper(SequenceDrafter[Text]):
    def start(self, sequence: Text, shared: Any) -> Text:
        return sequence

    def draft(self, state: Text) -> Draft:
        return Draft()


@pytest.mark.parametrize("drafter", first(2, [Guess(), Sampled(count=1), Sampled(), Guess(count=1)]))
def test_a_sound_drafter_passes(drafter: Drafter[Any]) -> None:
    check_drafter(drafter)


@dataclass(frozen=True)
class Refuses(Guess):
    def prepare(self, target: Any) -> None:
        raise OutpaceError("needs another target")


BROKEN = [
    (Remembers, "sets _last on itself"),
    (WritesToItsOption, "changes its own option table"),
    (ForgetsADraft, "must return one draft for each of the 4 sequences"),
    (WrongParents, "WrongParents.propose raises ValueError.*parent must come before"),
    (ParentsPastTheCheck, "puts node 1 under 1; a parent must precede its node"),
    (SurerOfTheChild, "at most its parent.s, 0.5"),
    (TooLarge, "drafts 32 at node 1, which is not a token id below 32"),
    (Negative, "drafts -1 at node 0"),
    (Tensors, r"drafts tensor\(1\) at node 0"),
    (NotADraft, r"proposes \[1, 2\], which is not an outpace Draft"),
    (Raises, r"Raises.observe raises KeyError\('lost'\)"),
    (ExpectsItsDraft, r"ExpectsItsDraft.observe raises KeyError\('no draft'\)"),
    (WritesToTheText, "changes the tokens with"),
    (EndsTheText, "changes the tokens with"),
    (Changes, "drafts differently when the same run is repeated"),
    (SharedAcrossEngines, "drafts differently while another engine uses it"),
    (DoesNotSumToOne, "distribution after node -1 sums to 0.9, not 1"),
    (Impossible, "but gives it probability 0"),
    (MissesADistribution, r"no distribution for the children of nodes \[0, 1\]"),
    (SinglePrecision, "is torch.float32, not float64"),
    (Undeclared, "does not declare `probabilities = True`"),
    (DrawsFromAnother, "DrawsFromAnother drafts tokens that do not follow their distribution"),
    (LooksAtTheVerifiersDraws, "the engine emits tokens that do not follow their distribution"),
    (DoesNotPickle, "does not survive pickle"),
    (GrowsWhenReplaced, "count is 4, but 5 after dataclasses.replace"),
    (NoPaper, "paper must name the publication"),
]


@pytest.mark.parametrize(("cls", "message"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])
def test_a_broken_drafter_is_named(cls: type[Drafter[Any]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_drafter(cls())


def test_a_class_that_is_no_frozen_dataclass_is_named() -> None:
    with pytest.raises(AssertionError, match="Options must be a frozen dataclass"):
        check_drafter(Options())
    with pytest.raises(AssertionError, match="does not derive from"):
        check_drafter(object())  # type: ignore[arg-type]


def test_a_drafter_that_does_not_fit_says_so_itself() -> None:
    with pytest.raises(OutpaceError, match="needs another target"):
        check_drafter(Refuses())


def test_another_target_may_be_given() -> None:
    check_drafter(NoDraft(), ToyTarget(vocabulary=3, context=8, eos=None))
    check_drafter(Lookahead(window=2, ngram=2, guesses=1), ToyTarget(context=None))
