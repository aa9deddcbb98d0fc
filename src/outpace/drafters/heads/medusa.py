"""Medusa: residual heads on the target's last hidden state, a tree of their best guesses (Cai et al. 2024).

The heads know the same state and nothing of each other's guesses, so the tree is a part of the Cartesian
product of their candidates: the part that is expected to hold the most right ones.

What differs from the paper: the target's own head serves all of them unless ``own_head`` asks for more, and
under sampling the candidates are drawn with the target's own noise (Daliri et al. 2024), so that the tokens
are those of plain decoding. Typical acceptance is a verifier, not a part of this method. The target is frozen
(Medusa-1), unless ``outpace train medusa --tune lora`` trains it too (Medusa-2): plain decoding of the tuned
target is then the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.heads.heads import RANKS, HeadDrafting, HeadGrowth, Heads, HeadState, Residual
from outpace.drafters.support.draws import Noise, check_noise
from outpace.drafters.support.shapes import branching_parents, numbers
from outpace.embedded import nano_drafter_path
from outpace.learned.learned import Fit, head_weights
from outpace.targets.base import TargetModel


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa's heads.

    Attributes:
        heads: tokens guessed ahead, at least 1.
        layers: residual layers of each, at least 1.
        own_head: each has a vocabulary projection of its own, which begins as the target's; else they share
            that.
        decay: weight of each head in the loss, relative to the one before.
        max_nodes: of the tree that training measures.
    """

    heads: int = 4
    layers: int = 1
    own_head: bool = False
    decay: float = 0.8
    max_nodes: int = 32

    def __post_init__(self) -> None:
        if min(self.heads, self.layers, self.max_nodes) < 1:
            raise OutpaceError("medusa: heads, layers and nodes must each be at least 1")


class MedusaHeads(Heads):
    """K heads: residual layers, and the target's projection to the vocabulary or their own."""

    method: ClassVar[str] = "medusa"
    config_type: ClassVar[type[Any]] = MedusaConfig

    def __init__(self, config: MedusaConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, RANKS, config.decay, config.max_nodes)
        size = fit.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Residual(size) for _ in range(config.layers))) for _ in range(config.heads)
        )
        self.projections = nn.ModuleList(
            nn.Linear(size, fit.vocabulary, bias=False) for _ in range(config.heads if config.own_head else 0)
        )

    @classmethod
    def new(cls, config: MedusaConfig, target: TargetModel) -> Self:
        made = super().new(config, target)
        made._begin_with_the_head()
        return made

    @torch.no_grad()
    def _begin_with_the_head(self) -> None:
        """Projections begin as the target's, as far as that is a matrix."""
        found = head_weights(self.target) if len(self.projections) else None
        if found is not None:
            for projection in self.projections:
                cast(nn.Linear, projection).weight.copy_(found[0])

    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        depth = paths.shape[1] - 1
        guessed: Tensor = self.blocks[depth](states.to(self.accuracies.dtype))
        if len(self.projections):
            guessed = self.projections[depth](guessed)
            return guessed[owners]
        return self.target.head(guessed)[owners]


@dataclass(frozen=True)
class Medusa(HeadDrafting, Drafter[HeadState]):
    """Medusa's heads.

    Attributes:
        path: the folder that ``outpace train medusa`` wrote, or the heads themselves. None is the heads for
            the embedded model.
        max_nodes: of the tree of their guesses, chosen by their measured accuracies; None is the heads' own.
        branching: children of the root, of each of its children, and so on, as "4x2x1x1", in place of that.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": the most probable tokens.
    """

    path: Any = field(default=None, repr=False)
    max_nodes: int | None = None
    branching: str | tuple[int, ...] = ()
    draws: Noise = "coupled"

    paper: ClassVar[str] = (
        "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads "
        "(arXiv 2401.10774)"
    )
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_nodes is not None and (self.max_nodes < 1 or self.branching):
            raise OutpaceError("medusa: max_nodes must be at least 1, and without branching")
        if any(count < 1 for count in self._factors()):
            raise OutpaceError(f"medusa: branching must be of numbers of at least 1, not {self.branching!r}")
        check_noise("medusa", self.draws)

    def _factors(self) -> tuple[int, ...]:
        return numbers("branching", self.branching, "x", int, "medusa")

    def prepare(self, target: TargetModel) -> HeadGrowth:
        heads = MedusaHeads.of(nano_drafter_path("medusa") if self.path is None else self.path, target)
        factors = self._factors()
        if len(factors) > heads.depth:
            raise OutpaceError(
                f"medusa: branching has {len(factors)} depths, and there are {heads.depth} heads"
            )
        parents = branching_parents(factors, len(factors)) if factors else heads.tree(self.max_nodes)
        return HeadGrowth.of(heads, parents, self.draws)
