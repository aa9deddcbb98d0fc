"""Jacobi decoding: the fixed point, the shift of the block, and the check of a drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.parallel.jacobi import Jacobi, JacobiState
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.testing import ToyTarget, check_drafter

PROMPT = [3, 9, 2, 7, 3, 9, 2]


@dataclass(frozen=True)
class Recorded(Jacobi):
    """Keeps its drafts and steps; the first block may be given."""

    first: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def start(self, sequence: Sequence, shared: Any) -> JacobiState:
        state = super().start(sequence, shared)
        state.cells[: len(self.first)] = self.first
        return state

    def draft(self, state: JacobiState) -> Draft:
        self.drafts.append(super().draft(state))
        return self.drafts[-1]

    def learn(self, state: JacobiState, step: Step) -> None:
        self.steps.append(step)
        super().learn(state, step)


@pytest.mark.parametrize(
    "drafter",
    [Jacobi(), Jacobi(num_speculative_tokens=1), Jacobi(num_speculative_tokens=3, refill="argmax", seed=5)],
)
def test_it_keeps_the_contract(drafter: Jacobi) -> None:
    check_drafter(drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", [1, 2, 5, 16])
def test_a_block_of_m_tokens_takes_m_steps_at_most(block: int, temperature: float) -> None:
    for seed in range(5):
        params = SamplingParams(max_new_tokens=block, temperature=temperature, seed=seed, ignore_eos=True)
        (found,) = Engine(ToyTarget(), Jacobi(block), adaptive=False).generate([PROMPT], params)
        assert len(found.tokens) == block
        assert found.stats.steps <= block


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_right_block_is_the_fixed_point(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=temperature, seed=4, ignore_eos=True)
    (plain,) = Engine(ToyTarget()).generate([PROMPT], params)
    drafter = Recorded(num_speculative_tokens=8, first=plain.tokens[:8])
    (found,) = Engine(ToyTarget(), drafter, adaptive=False).generate([PROMPT], params)
    assert found.stats.steps == 1
    (step,) = drafter.steps
    assert step.refill(range(-1, 7)) == plain.tokens[:8]


def test_the_block_moves_on_with_the_text() -> None:
    # Hot enough that the keyed noise decides most draws, and a cell may be right on a wrong prefix.
    drafter = Recorded(num_speculative_tokens=6)
    params = SamplingParams(max_new_tokens=60, temperature=4.0, seed=1, ignore_eos=True)
    Engine(ToyTarget(), drafter, adaptive=False).generate([PROMPT], params)
    assert {1, 2, 3, 7} <= {len(step.tokens) for step in drafter.steps}
    for step, new in zip(drafter.steps, drafter.drafts[1:], strict=False):
        kept = len(step.draft) + 1 - len(step.tokens)
        said = step.refill(range(-1, len(step.draft)))
        # The target's row after the last token emitted said that token's successor, and so on to the end.
        assert list(new.tokens[:kept]) == said[len(step.tokens) :]
        assert len(new) == 6


def test_a_block_accepted_whole_is_filled_anew_when_sampling() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    (plain,) = Engine(ToyTarget()).generate([PROMPT], params)
    drafter = Recorded(num_speculative_tokens=3, first=plain.tokens[:3])
    (found,) = Engine(ToyTarget(), drafter, adaptive=False).generate([PROMPT], params)
    assert found.tokens == plain.tokens
    assert len(drafter.steps[0].tokens) == 4


def test_keyed_draws_refill_better_than_the_argmax() -> None:
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=s, ignore_eos=True) for s in range(8)]
    target = ToyTarget(surprise=0.3)

    def steps(drafter: Jacobi) -> int:
        return sum(
            g.stats.steps for g in Engine(target, drafter, adaptive=False).generate([PROMPT] * 8, params)
        )

    assert steps(Jacobi(refill="draw")) < steps(Jacobi(refill="argmax"))


def test_refuses_options_that_make_no_sense() -> None:
    with pytest.raises(OutpaceError, match="num_speculative_tokens"):
        Jacobi(num_speculative_tokens=0)
    with pytest.raises(OutpaceError, match="refill"):
        Jacobi(refill="other")  # type: ignore[arg-type]
