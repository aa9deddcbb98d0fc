"""Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427; Song et al. 2021, arXiv 2002.03629).

Greedy decoding is a system of equations, one per output token, in which token i depends on the tokens before
it. A fixed-point iteration solves m of them at once: guess a block of m tokens, predict the token after each
in one forward of the target, replace the guesses by the predictions, repeat. Leading tokens that did not
change are correct, so each step fixes at least one, and m tokens take at most m steps.

Differences from the papers: the block moves with the text instead of waiting until all of it is correct, and
when sampling, a cell is refilled with the target's own keyed draw, so that the fixed point is the sampled
text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from outpace.core import Draft
from outpace.drafters.base import Filler, SequenceDrafter
from outpace.sequence import Sequence, Step
from outpace.tree import chain


@dataclass
class JacobiState:
    """A sequence's block: ``cells[i]`` is a guess of the token i + 1 places after the root."""

    filler: Filler
    cells: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Jacobi(SequenceDrafter[JacobiState]):
    """Jacobi decoding: a block of future tokens, all recomputed in each step.

    Attributes:
        num_speculative_tokens: m, tokens in the block, at least 1.
        refill: "draw" fills cells with the target's keyed draw, "argmax" with its argmax; the same if greedy.
        seed: seed of the filler tokens in cells that no forward has computed.
    """

    num_speculative_tokens: int = 8
    refill: Literal["draw", "argmax"] = "draw"
    seed: int = 0

    when: ClassVar[str] = "to study parallel decoding, which lookahead builds on"
    paper: ClassVar[str] = (
        "Santilli et al. 2023, Accelerating Transformer Inference for Translation via Parallel Decoding "
        "(arXiv 2305.10427); Song et al. 2021, Accelerating Feedforward Computation via Parallel Nonlinear "
        "Equation Solving (arXiv 2002.03629)"
    )

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1)
        self.check_most(num_speculative_tokens=4096)
        self.check_choices("refill")

    def start(self, sequence: Sequence, shared: Any) -> JacobiState:
        state = JacobiState(Filler(sequence, self.seed))
        self._widen(state)
        return state

    def draft(self, state: JacobiState) -> Draft:
        return chain(state.cells)

    def learn(self, state: JacobiState, step: Step) -> None:
        # The prediction after node i is i + 2 places after the old root, and the root moved by
        # len(step.tokens), so node len(step.tokens) - 1 predicts the new cell 0. (A draft trimmed near the
        # token limit lacks its last cells.)
        nodes = range(len(step.tokens) - 1, len(step.draft))
        state.cells = step.refill(nodes, argmax=self.refill == "argmax")
        self._widen(state)

    def _widen(self, state: JacobiState) -> None:
        state.cells.extend(state.filler() for _ in range(self.num_speculative_tokens - len(state.cells)))
