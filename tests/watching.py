"""A look at an engine's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

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
