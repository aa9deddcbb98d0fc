"""A look at an engine's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from outpace import Engine
from outpace.sequence import Step


@dataclass
class Watch:
    """Looks on while an engine decodes, and keeps its steps."""

    hidden_layers: tuple[int, ...] = ()
    timed: bool = False
    steps: list[Step] = field(default_factory=list)

    def joined(self, sequence: object, hidden: Mapping[int, Tensor]) -> None: ...

    def stepped(self, steps: Sequence[Step]) -> None:
        self.steps += steps

    def left(self, sequence: object) -> None: ...


def preemptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the outputs of the sequences that were preempted."""
    make_room, preempted = engine._batch.scheduler.make_room, []

    def watch(cache: Any, give_way: Any) -> None:
        def shed(active: Any) -> None:
            preempted.append(active.sequence.output_length)
            give_way(active)

        make_room(cache, shed)

    monkeypatch.setattr(engine._batch.scheduler, "make_room", watch)
    return preempted
