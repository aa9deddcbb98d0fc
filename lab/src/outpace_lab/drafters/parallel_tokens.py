"""Parallel speculative sampling: the target guesses ahead by look-ahead embeddings (PaSS, Monea et al. 2023).

A step's forward includes rows with learned embeddings in place of tokens: after a node at place t, row k,
from 0, represents the unknown token at place t + 1 + k, and the target's prediction there is a guess of the
token at place t + 2 + k. The next step verifies the guesses and again includes look-ahead rows, so a step is
one forward.

Differences from the paper: there drafting and verifying are two forwards; here they are one, with look-ahead
rows after the root and, by default, after each guess, so that a full draft is ready whichever guesses are
accepted (Stern et al. 2018, section 4, merge the two in the same way). Guesses are drawn with the target's
own noise. Without trained embeddings the mean of the target's embeddings is used, which guesses badly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.support.draws import Draws, Noise
from outpace.drafters.support.growth import Growth, grow
from outpace.drafters.support.shapes import Growing, shape_of
from outpace.learned.learned import Fit
from outpace.sequence import Sequence, Step
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace_lab.train.modules.blocks import draw_places
from outpace_lab.train.trained import Losses, Objective, Trained, TrainingBatch, accepted_of_chain, measure

_PLACES = 128  # places of a text per forward when all places get look-ahead rows


@dataclass(frozen=True)
class LookAheadConfig:
    """Look-ahead embeddings.

    Attributes:
        num_speculative_tokens: number of embeddings, at least 1.
        places: number of places per row to train on, drawn at random for each batch; at least 1.
    """

    num_speculative_tokens: int = 3
    places: int = 16

    def __post_init__(self) -> None:
        check_least("parallel_tokens", self, num_speculative_tokens=1, places=1)


class LookAhead(Trained):
    """Table of embeddings, trained through the frozen target."""

    method: ClassVar[str] = "parallel_tokens"
    config_type: ClassVar[type[Any]] = LookAheadConfig

    def __init__(self, config: LookAheadConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.embeddings = nn.Parameter(torch.zeros(config.num_speculative_tokens, fit.hidden_size))

    @classmethod
    def new(cls, config: Any, target: TargetModel) -> LookAhead:
        made = super().new(config, target)
        tokens = torch.arange(target.vocabulary, device=target.hidden.device)
        with torch.no_grad():
            made.embeddings.copy_(target.embed(tokens).float().mean(dim=0).expand_as(made.embeddings))
        return made

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()

    def rows(self, batch: TrainingBatch, places: Tensor) -> Tensor:
        """The target's predictions at look-ahead rows after places of each text.

        Args:
            places: the places, [B, G].

        Returns:
            Logits [B, G, K, vocabulary]: row k, from 0, predicts the token k + 2 places after the given one.
        """
        (batch_size, width), count = batch.tokens.shape, self.config.num_speculative_tokens
        groups = places.shape[1]
        text = self.target.embed(batch.tokens)
        own = self.embeddings.to(text.dtype).expand(batch_size, groups, -1, -1).flatten(1, 2)
        steps = torch.arange(count, device=places.device)
        ahead = batch.positions.gather(1, places)[..., None] + 1 + steps
        positions = torch.cat([batch.positions, ahead.flatten(1)], dim=1)
        output = self.target.through(torch.cat([text, own], dim=1), positions, self._seen(batch, places))
        assert output.logits is not None
        found: Tensor = output.logits[:, width:].unflatten(1, (groups, count))
        return found

    def _seen(self, batch: TrainingBatch, places: Tensor) -> Tensor:
        """The mask [B, N, N] of the text's rows followed by the look-ahead rows of each place."""
        width, count = batch.tokens.shape[1], self.config.num_speculative_tokens
        order = torch.arange(width, device=places.device)
        documents = torch.cat(
            [batch.documents, batch.documents.gather(1, places).repeat_interleave(count, 1)], 1
        )
        ends = torch.cat([order.expand_as(batch.tokens), places.repeat_interleave(count, 1)], dim=1)
        size = ends.shape[1]
        seen = torch.zeros(len(ends), size, size, dtype=torch.bool, device=places.device)
        seen[:, :, :width] = (order <= ends[..., None]) & (batch.documents[:, None] == documents[..., None])
        chain = torch.ones(count, count, dtype=torch.bool, device=places.device).tril()
        seen[:, width:, width:] = torch.block_diag(*[chain] * places.shape[1])
        return seen

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        weights = [1.0] * self.config.num_speculative_tokens
        return measure(objective, self._depths(batch), weights)

    def _depths(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        places = draw_places(batch, self.config.places, range(2, self.config.num_speculative_tokens + 2))
        rows = self.rows(batch, places)
        for depth in range(self.config.num_speculative_tokens):
            at, group = batch.ahead(depth + 2).gather(1, places).nonzero(as_tuple=True)
            chosen = places[at, group]
            yield (
                rows[at, group, depth],
                batch.logits[at, chosen + 1 + depth],
                batch.tokens[at, chosen + 2 + depth],
            )

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        size, width = batch.tokens.shape
        guesses = torch.full(
            (size, width, self.config.num_speculative_tokens), -1, device=batch.tokens.device
        )
        # The draft of a root at place t + 1 is predicted at the look-ahead rows of place t.
        for places in torch.arange(width - 1, device=batch.tokens.device).split(_PLACES):
            guesses[:, places + 1] = self.rows(batch, places.expand(size, -1)).argmax(dim=-1)
        same = batch.documents[:, 1:] == batch.documents[:, :-1]
        guesses[:, 1:][~same] = -1
        # The first step after a prompt has no draft to verify.
        guesses[:, :-1][batch.counted[:, 1:] & ~batch.counted[:, :-1]] = -1
        return accepted_of_chain(batch, guesses)


@dataclass
class Ahead:
    """A sequence, and the target's guesses of its next tokens.

    Attributes:
        vocabulary: the first id that is a look-ahead embedding.
        rows: the target's logits [vocabulary] for the tokens after the next root, in order.
    """

    sequence: Sequence
    shared: Growth
    vocabulary: int
    rows: list[Tensor] = field(default_factory=list)
    tree: Growing = field(init=False)


@dataclass(frozen=True)
class ParallelTokens(SequenceDrafter[Ahead]):
    """Look-ahead embeddings for the target.

    Attributes:
        path: a folder that ``outpace train parallel_tokens`` wrote, or the embeddings; None drafts with the
            mean of the target's embeddings.
        num_speculative_tokens: K, number of consecutive look-ahead rows and length of the longest draft; at
            least 1. By default the number of trained embeddings, or 3.
        behind: "all": look-ahead rows after the root and each guess, K * (K + 2) nodes per step; "root":
            after the root only, 2 * K nodes, and the next draft is shorter by the number of accepted tokens.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens.
    """

    path: Any = field(default=None, repr=False)
    num_speculative_tokens: int | None = None
    behind: Literal["all", "root"] = "all"
    draws: Noise = "coupled"

    when: ClassVar[str] = "to study guesses by learned tokens, without a second model"
    needs: ClassVar[str] = "a folder from outpace train"
    paper: ClassVar[str] = "Monea, Joulin, Grave 2023, PaSS: Parallel Speculative Sampling (arXiv 2311.13581)"
    probabilities: ClassVar[bool] = True
    ramp: ClassVar[int] = 2  # the first step only looks ahead

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1)
        self.check_choices("behind", "draws")

    @property
    def _count(self) -> int:
        """K, the number of look-ahead rows after a node."""
        made = LookAheadConfig() if self.path is None else LookAhead.config_of(self.path)
        given = self.num_speculative_tokens
        return int(made.num_speculative_tokens if given is None else given)

    @property
    def widths(self) -> tuple[int, ...]:
        count = self._count
        return (count * (count + 2) if self.behind == "all" else 2 * count,)

    def attach(self, target: TargetModel) -> TargetModel:
        if self.path is None:
            return target.with_embeddings(self._count)
        table = LookAhead.of(self.path, target).embeddings
        if len(table) < self._count:
            raise OutpaceError(
                f"parallel_tokens: there are {len(table)} trained embeddings, too few for "
                f"num_speculative_tokens={self.num_speculative_tokens}; leave it out"
            )
        return target.with_embeddings(table)

    def prepare(self, target: TargetModel) -> tuple[Growth, int]:
        if target.extra < (count := self._count):
            raise OutpaceError("parallel_tokens drafts in the target's own steps; use it by itself")
        shape = shape_of(count, method="parallel_tokens")
        return Growth(shape=shape, draws=Draws(self.draws)), target.vocabulary

    def start(self, sequence: Sequence, shared: tuple[Growth, int]) -> Ahead:
        return Ahead(sequence, *shared)

    def draft(self, state: Ahead) -> Draft:
        state.tree = Growing(len(state.rows), state.shared.shape)
        while state.tree.depth < len(state.rows) and state.tree.front:
            grow([state], state.rows[state.tree.depth][None])
        chain = state.tree.finish()
        tokens, parents = list(chain.tokens), list(chain.parents)
        guesses, count = len(tokens), state.shared.shape.depth
        for node in range(-1, guesses if self.behind == "all" else 0):
            first = len(tokens)
            tokens += range(state.vocabulary, state.vocabulary + count)
            parents += [node, *range(first, first + count - 1)]
        state.sequence.stats.count("guesses", guesses)
        return Draft(tokens, parents, chain.distributions, riders=len(tokens) - guesses)

    def learn(self, state: Ahead, step: Step) -> None:
        draft = step.draft
        riders = {
            (draft.parents[node], draft.tokens[node]): node
            for node in range(len(draft) - draft.riders, len(draft))
        }
        last = step.path[-1] if step.path else -1
        # All K rows after the last accepted node are useful; of those after the root, only the rows from
        # len(path) on, since earlier ones predicted tokens that are now accepted.
        start, known = (last, 0) if (last, state.vocabulary) in riders else (-1, len(step.path))
        nodes = []
        node = riders.get((start, state.vocabulary))
        while node is not None:
            nodes.append(node)
            node = riders.get((node, state.vocabulary + len(nodes)))
        state.rows = [step.logits[node].clone() for node in nodes[known:]]
