"""A wrapper around a drafter that checks and records each of its drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outpace.core import Draft
from outpace.drafters.base import Drafter
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel


@dataclasses.dataclass(frozen=True)
class Watch(Drafter[Any]):
    """A wrapper that passes every call on to a drafter, and checks and records its drafts.

    Attributes:
        inner: the drafter.
        vocabulary: the number of token ids of the target.
        seen: the drafts, ``seen[step][sequence]``.
    """

    inner: Drafter[Any]
    vocabulary: int
    seen: list[list[Draft]] = dataclasses.field(default_factory=list)

    def shapes(self) -> list[list[tuple[list[int], list[int]]]]:
        """Tokens and parents of all drafts, for comparing two runs."""
        return [[(list(draft.tokens), list(draft.parents)) for draft in step] for step in self.seen]

    @property
    def reads_references(self) -> bool:
        return self.inner.reads_references

    def attach(self, target: TargetModel) -> TargetModel:
        return self.inner.attach(target)

    def prepare(self, target: TargetModel) -> Any:
        return self.inner.prepare(target)

    def renew(self, shared: Any, target: TargetModel) -> Any:
        return self.inner.renew(shared, target)

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        return self.inner.hidden_layers(shared)

    def drafts_unread(self, shared: Any) -> bool:
        return self.inner.drafts_unread(shared)

    def start(self, sequence: Sequence, shared: Any) -> Any:
        with self._named("start"):
            return self.inner.start(sequence, shared)

    def read(self, states: Seq[Any], hidden: Seq[Mapping[int, Tensor]]) -> None:
        with self._named("read"):
            self.inner.read(states, hidden)

    def propose(self, states: Seq[Any]) -> list[Draft]:
        with self._named("propose"):
            drafts = self.inner.propose(states)
        name = type(self.inner).__name__
        assert isinstance(drafts, list | tuple) and len(drafts) == len(states), (
            f"{name}.propose must return one draft for each of the {len(states)} sequences, not {drafts!r}"
        )
        for draft in drafts:
            _check_draft(draft, self.vocabulary, self.inner)
        self.seen.append(list(drafts))
        return list(drafts)

    def observe(self, states: Seq[Any], steps: Seq[Step]) -> None:
        with self._named("observe"):
            self.inner.observe(states, steps)

    def stop(self, state: Any) -> None:
        with self._named("stop"):
            self.inner.stop(state)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise AssertionError(f"{type(self.inner).__name__}.{method} raises {error!r}") from error


def watch_of(drafter: Drafter[Any], vocabulary: int) -> Watch:
    """A watch with the same class attributes as the drafter."""
    needs = {name: getattr(drafter, name) for name in ("paper", "probabilities")}
    cls: type[Watch] = type("Watch", (Watch,), needs)
    return cls(drafter, vocabulary)


def _check_draft(draft: Any, vocabulary: int, drafter: Drafter[Any]) -> None:
    name = type(drafter).__name__
    assert isinstance(draft, Draft), f"{name} proposes {draft!r}, which is not an outpace Draft"
    assert len(draft.tokens) == len(draft.parents), (
        f"{name} drafts {len(draft.tokens)} tokens with {len(draft.parents)} parents"
    )
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        rides = node >= len(draft) - draft.riders
        assert isinstance(token, int) and token >= 0 and (token < vocabulary or rides), (
            f"{name} drafts {token!r} at node {node}, which is not a token id below {vocabulary}"
        )
        assert isinstance(parent, int) and -1 <= parent < node, (
            f"{name} puts node {node} under {parent!r}; a parent must precede its node, or be -1"
        )
    chances = draft.chances or ()
    for node, chance in enumerate(chances):
        parent = draft.parents[node]
        most = chances[parent] if parent >= 0 else 1.0
        assert 0 < chance <= most, (
            f"{name} gives node {node} a chance of {chance}, not above 0 and at most its parent's, {most}"
        )
    if draft.distributions is None:
        return
    assert drafter.probabilities, f"{name} gives distributions but does not declare `probabilities = True`"
    draft = draft.guesses
    assert draft.distributions is not None
    missing = set(draft.parents) - set(draft.distributions)
    assert not missing, f"{name} gives no distribution for the children of nodes {sorted(missing)}"
    for parent, row in draft.distributions.items():
        where = f"{name}'s distribution after node {parent}"
        assert isinstance(row, Tensor) and row.shape == (vocabulary,), f"{where} lacks shape [{vocabulary}]"
        assert row.dtype == torch.float64, f"{where} is {row.dtype}, not float64"
        assert bool((row >= 0).all()), f"{where} has values that are negative or NaN"
        assert abs(float(row.sum()) - 1) < 1e-9, f"{where} sums to {float(row.sum()):.6g}, not 1"
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        assert draft.distributions[parent][token] > 0, (
            f"{name} drafts token {token} at node {node} but gives it probability 0"
        )
