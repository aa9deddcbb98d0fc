"""Parallel speculative sampling: look-ahead embeddings make the target guess ahead (PaSS, Monea et al. 2023).

Rows with learned embeddings in place of tokens ride along in a step: the i-th of them stands where a token is
not known yet, and what the target says there is its guess for the token after. The next step verifies the
guesses, and takes look-ahead rows along again, so a step is one forward.

What differs from the paper: there drafting and verifying are two forwards; here they are one, with look-ahead
rows behind the root and, by default, behind each guess, so that wherever the text turns out to stand a full
draft is there (Stern et al. 2018, section 4, merge the two likewise). Guesses are drawn with the target's own
noise. Without trained embeddings the mean of the target's own is taken, which guesses badly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.drafting.lookahead_rows import LookAhead
from outpace.sequence import KeyedDraw, Sequence, Step
from outpace.targets.base import TargetModel


@dataclass
class Ahead:
    """What the target said ahead of one sequence.

    Attributes:
        vocabulary: ids from here on are look-ahead embeddings.
        rows: its logits [vocabulary] for the tokens after the next root, in order.
    """

    sequence: Sequence
    vocabulary: int
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class ParallelTokens(SequenceDrafter[Ahead]):
    """Look-ahead embeddings for the target.

    Attributes:
        path: the folder that ``outpace train parallel_tokens`` wrote, or the embeddings; None drafts
            with the mean of the target's own.
        num_lookahead: look-ahead rows in a row, and so guesses at most; at least 1.
        behind: "all": behind the root and each guess, num_lookahead * (num_lookahead + 2) nodes in a step;
            "root": behind the root only, 2 * num_lookahead nodes, and the next draft is shorter by what was
            accepted.
        coupled: draw with the target's own noise, where the verifier allows it; else independently.
    """

    path: Any = field(default=None, repr=False)
    num_lookahead: int = 3
    behind: Literal["all", "root"] = "all"
    coupled: bool = True

    paper: ClassVar[str] = "Monea, Joulin, Grave 2023, PaSS: Parallel Speculative Sampling (arXiv 2311.13581)"
    probabilities: ClassVar[bool] = True
    ramp: ClassVar[int] = 2  # the first step only looks ahead

    def __post_init__(self) -> None:
        if self.num_lookahead < 1:
            raise OutpaceError(f"parallel_tokens: num_lookahead must be at least 1, not {self.num_lookahead}")
        if self.behind not in ("all", "root"):
            raise OutpaceError(f"parallel_tokens: behind must be 'all' or 'root', not {self.behind!r}")

    @property
    def widths(self) -> tuple[int, ...]:
        count = self.num_lookahead
        return (count * (count + 2) if self.behind == "all" else 2 * count,)

    def attach(self, target: TargetModel) -> TargetModel:
        if self.path is None:
            return target.with_embeddings(self.num_lookahead)
        table = LookAhead.of(self.path, target).embeddings
        if len(table) < self.num_lookahead:
            raise OutpaceError(
                f"parallel_tokens: there are {len(table)} trained embeddings, too few for "
                f"num_lookahead={self.num_lookahead}"
            )
        return target.with_embeddings(table)

    def prepare(self, target: TargetModel) -> int:
        if target.extra < self.num_lookahead:
            raise OutpaceError(
                "parallel_tokens rides in the target's own steps, so it drafts alone: use it so"
            )
        return target.vocabulary

    def start(self, sequence: Sequence, shared: int) -> Ahead:
        return Ahead(sequence, shared)

    def draft(self, state: Ahead) -> Draft:
        tokens, rows = self._guess(state)
        guesses = len(tokens)
        parents = list(range(-1, guesses - 1))
        for node in range(-1, guesses if self.behind == "all" else 0):
            first = len(tokens)
            tokens += range(state.vocabulary, state.vocabulary + self.num_lookahead)
            parents += [node, *range(first, first + self.num_lookahead - 1)]
        state.sequence.stats.count("guesses", guesses)
        return Draft(tokens, parents, rows or None, riders=len(tokens) - guesses)

    def _guess(self, state: Ahead) -> tuple[list[int], dict[int, Tensor]]:
        """A chain from what the target said ahead, and what each token was drawn from, where it was drawn."""
        draw = KeyedDraw(state.sequence)
        tokens: list[int] = []
        rows: dict[int, Tensor] = {}
        for row in state.rows:
            token, distribution = draw.draft(row, tokens, len(tokens), self.coupled)
            if distribution is not None:
                if not distribution[token] > 0:  # rounded to nothing: no verifier takes it
                    break
                rows[len(tokens) - 1] = distribution
            tokens.append(token)
            if token in state.sequence.stop_tokens:
                break
        return tokens, rows

    def learn(self, state: Ahead, step: Step) -> None:
        draft = step.draft
        riders = {
            (draft.parents[node], draft.tokens[node]): node
            for node in range(len(draft) - draft.riders, len(draft))
        }
        last = step.path[-1] if step.path else -1
        # Behind the last accepted node all are of use; behind the root those past what was accepted.
        start, known = (last, 0) if (last, state.vocabulary) in riders else (-1, len(step.path))
        nodes = []
        node = riders.get((start, state.vocabulary))
        while node is not None:
            nodes.append(node)
            node = riders.get((node, state.vocabulary + len(nodes)))
        state.rows = [step.logits[node].clone() for node in nodes[known:]]
