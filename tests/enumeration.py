"""Exact output distributions of a verifier: every branch of its draws, with its weight.

A verifier draws through ``draw`` only. ``Enumerated`` replays a script of outcomes and, at the first draw
past its end, takes the first possible outcome and notes the others as scripts to run later. The weights of
all runs add up to 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outpace.core import Draft, Verdict
from outpace.draws.logits import Logits
from outpace.tree import path_to

Text = tuple[int, ...]
# The distribution that follows a text: float64, shape [vocabulary].
Model = Callable[[Text], Tensor]
Verify = Callable[[Logits, Draft, "Enumerated"], Verdict]
# Below the first, two probabilities are the same; above the second, they surely are not.
EXACT = 1e-12
WRONG = 1e-3


class Script:
    """A prescribed beginning of outcomes; branches beyond it are collected."""

    def __init__(self, outcomes: list[int]) -> None:
        self.outcomes = outcomes
        self.others: list[list[int]] = []
        self.weight = 1.0
        self._used = 0

    def draw(self, weights: list[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if self._used == len(self.outcomes):
            self.others.extend([*self.outcomes, other] for other in possible[1:])
            self.outcomes = [*self.outcomes, possible[0]]
        outcome = self.outcomes[self._used]
        self._used += 1
        self.weight *= weights[outcome]
        return outcome


def all_scripts(run: Callable[[Script], None]) -> Iterator[Script]:
    """Runs a procedure once for each sequence of outcomes."""
    waiting: list[list[int]] = [[]]
    while waiting:
        script = Script(waiting.pop())
        run(script)
        waiting.extend(script.others)
        yield script


class Enumerated:
    """A verifier's draws for one script. The target's prediction depends on the *node*."""

    greedy = False

    def __init__(self, script: Script, target: Model, draft: Draft, eos: int | None = None) -> None:
        self._script = script
        self._target = target
        self._draft = draft
        self._eos = eos
        self.emitted: list[int] = []

    def distribution(self, logits: Logits, node: int, guessed: Sequence[int] = ()) -> Tensor:
        text = tuple(self._draft.tokens[n] for n in path_to(self._draft.parents, node))
        assert text == (*self.emitted, *guessed)
        return self._target(text)

    def logprobs(self, logits: Logits, node: int) -> Tensor:
        return self.distribution(logits, node).log()

    def token(self, logits: Logits, node: int) -> int:
        return self._script.draw(self.distribution(logits, node).tolist())

    def accept(self, probability: float, node: int) -> bool:
        assert 0 <= probability <= 1
        return self._script.draw([1 - probability, probability]) == 1

    def choose(self, distribution: Tensor, node: int) -> int:
        assert bool((distribution >= 0).all())
        return self._script.draw((distribution / distribution.sum()).tolist())

    def emit(self, token: int, logits: Logits, node: int) -> bool:
        self.emitted.append(token)
        return token != self._eos


def verdicts(
    verify: Verify, target: Model, drafts: Callable[[Script], Draft], eos: int | None = None
) -> Iterator[tuple[Verdict, float]]:
    """Every verdict on a draft, with its weight."""
    found: list[Verdict] = []

    def run(script: Script) -> None:
        draft = drafts(script)
        draw = Enumerated(script, target, draft, eos)
        verdict = verify(Logits(torch.empty(len(draft) + 1, 0)), draft, draw)
        assert verdict.tokens == draw.emitted
        accepted = [draft.tokens[n] for n in verdict.path]
        assert accepted == verdict.tokens[: len(accepted)]
        assert verdict.path == path_to(draft.parents, verdict.path[-1] if verdict.path else -1)
        bonus = len(verdict.tokens) - len(verdict.path)
        assert bonus == 1 or (bonus == 0 and verdict.tokens[-1] == eos)
        found.append(verdict)

    for script in all_scripts(run):
        assert script.weight > 0
        yield found.pop(), script.weight


def output_distribution(
    verify: Verify,
    target: Model,
    drafts: Callable[[Script], Draft],
    length: int,
    eos: int | None = None,
) -> dict[Text, float]:
    """Probability of each text of ``length`` tokens (or up to eos): a verified draft, then plain decoding."""
    begun: dict[Text, float] = defaultdict(float)
    for verdict, weight in verdicts(verify, target, drafts, eos):
        begun[tuple(verdict.tokens)] += weight
    assert abs(sum(begun.values()) - 1) < EXACT
    return plain_distribution(target, length, eos, begun)


def expected_length(verify: Verify, target: Model, drafts: Callable[[Script], Draft]) -> float:
    """Mean number of drafted tokens accepted."""
    return sum(weight * len(verdict.path) for verdict, weight in verdicts(verify, target, drafts))


def plain_distribution(
    target: Model, length: int, eos: int | None = None, begun: Mapping[Text, float] | None = None
) -> dict[Text, float]:
    """Probability of each text of ``length`` tokens (or up to eos) by plain decoding.

    Args:
        begun: texts to go on from, with their probabilities.
    """
    whole: dict[Text, float] = defaultdict(float)
    texts: Mapping[Text, float] = {(): 1.0} if begun is None else begun
    while texts:
        grown: dict[Text, float] = defaultdict(float)
        for text, weight in texts.items():
            if len(text) >= length or (eos is not None and text[-1:] == (eos,)):
                whole[text[:length]] += weight
                continue
            for token, probability in enumerate(target(text).tolist()):
                if probability > 0:
                    grown[(*text, token)] += weight * probability
        texts = grown
    return whole


def difference(first: dict[Text, float], second: dict[Text, float]) -> float:
    """The largest difference of two distributions at any text."""
    return max(abs(first.get(text, 0.0) - second.get(text, 0.0)) for text in first.keys() | second.keys())


def error(
    verify: Verify, target: Model, drafts: Callable[[Script], Draft], length: int, eos: int | None = None
) -> float:
    """The largest difference of a verifier's output distribution to that of plain decoding."""
    found = output_distribution(verify, target, drafts, length, eos)
    return difference(found, plain_distribution(target, length, eos))
