"""Opt-in trace of a choice's decoding: the tree of each step, the accepted path, and the drafters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from outpace.core import SamplingParams, StreamedToken
from outpace.engine.observer import Observer
from outpace.sequence import Sequence, Step

_INNER = "inner"  # a cascade's counts of its own draft model's steps, which are not steps of the target


class Trace:
    """The unread steps of one choice.

    The engine's thread records a step before the event loop gets its tokens.

    Args:
        drafter: the name of the drafter, to which all nodes are attributed if it does not count its parts.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._noted: dict[int, dict[str, Any]] = {}
        self._counted: dict[str, int] = {}

    def note(self, step: Step) -> None:
        draft = step.draft.guesses
        self._noted[step.sequence.steps[step.root]] = {
            "drafters": self._drafters(step),
            "tree": {"tokens": list(draft.tokens), "parents": list(draft.parents)},
            "path": list(step.path),
        }

    def _drafters(self, step: Step) -> dict[str, dict[str, int]]:
        """Numbers of nodes drafted and accepted by each drafter.

        A node that several propose counts for each of them. As a drafter's tree contains the parents of its
        nodes, what it has accepted is the beginning of the path.
        """
        counts = step.sequence.stats.extra
        new = {name: count - self._counted.get(name, 0) for name, count in counts.items()}
        self._counted = dict(counts)
        parts = [name.removesuffix("_drafted") for name in new if name.endswith("_drafted")]
        found = {
            part: {"drafted": new[f"{part}_drafted"], "accepted": new[f"{part}_accepted"]}
            for part in parts
            if part != _INNER
        }
        if not found and len(step.draft):
            found = {self._drafter: {"drafted": len(step.draft.guesses), "accepted": len(step.path)}}
        return {name: count for name, count in found.items() if count["drafted"]}

    def take(self, tokens: Seq[StreamedToken], text: Callable[[int], str]) -> list[dict[str, Any]]:
        """The steps that emitted these tokens, in order, in the format of responses.

        Args:
            text: text of a single token.
        """
        found = []
        for number, group in itertools.groupby(tokens, lambda token: token.step):
            emitted = list(group)
            step = self._noted.pop(number)
            step["tree"]["texts"] = [text(token) for token in step["tree"]["tokens"]]
            found.append(
                {
                    "step": number,
                    "text": "".join(token.text for token in emitted),
                    "tokens": [token.token for token in emitted],
                    "texts": [text(token.token) for token in emitted],
                }
                | step
            )
        return found


@dataclass(frozen=True)
class Traced(SamplingParams):
    """Parameters of a request whose steps are recorded."""

    trace: Trace = field(default_factory=lambda: Trace("off"), compare=False, repr=False)

    @classmethod
    def of(cls, params: SamplingParams, trace: Trace) -> Traced:
        return cls(**{own.name: getattr(params, own.name) for own in fields(SamplingParams)}, trace=trace)


class Tracer:
    """Observer that records the steps of traced requests only.

    Args:
        learner: a further observer, which is shown everything.
    """

    def __init__(self, learner: Observer | None = None) -> None:
        self._learner = learner

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return () if self._learner is None else self._learner.hidden_layers

    @property
    def timed(self) -> bool:
        return self._learner is not None and self._learner.timed

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        """Show the learner a sequence; nothing is recorded before the first step."""
        if self._learner is not None:
            self._learner.joined(sequence, hidden)

    def stepped(self, steps: Seq[Step]) -> None:
        for step in steps:
            if isinstance(step.sequence.params, Traced):
                step.sequence.params.trace.note(step)
        if self._learner is not None:
            self._learner.stepped(steps)

    def left(self, sequence: Sequence) -> None:
        """Show the learner that a sequence has left; a trace belongs to its request."""
        if self._learner is not None:
            self._learner.left(sequence)
