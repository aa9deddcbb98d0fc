"""Hydra: Medusa's heads, each conditioned on the tokens drafted before its own (Ankner et al. 2024).

The head of depth d reads the target's last hidden state and the embeddings of the root and of the d tokens
drafted after it, so guesses differ from node to node.

Differences from the paper: the tree is chosen by accuracies, as in section 2.3.3 of the Medusa paper,
measured per head after correct tokens. Of Hydra++, prefix attention is not implemented; its deeper heads are
``layers``, and its distillation from the target is a training objective (``forward_kl``). When sampling,
candidates are drawn with the target's own noise. Head and embeddings are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.drafters.heads.heads import RANKS, HeadDrafter, Heads, Residual
from outpace.learned.learned import Fit
from outpace.spec import check_least


@dataclass(frozen=True)
class HydraConfig:
    """Hydra's heads.

    Attributes:
        heads: number of heads, one per token guessed ahead, at least 1.
        layers: layers per head, at least 1: the first reads state and embeddings, the others are residual.
        decay: weight of each head in the loss, relative to the one before.
        max_nodes: nodes of the tree that training measures.
    """

    heads: int = 4
    layers: int = 2
    decay: float = 0.8
    max_nodes: int = 32

    def __post_init__(self) -> None:
        check_least("hydra", self, heads=1, layers=1, max_nodes=1)


class HydraHeads(Heads):
    """Heads whose first layer reads d + 2 vectors: the state, the root, the d tokens after it."""

    method: ClassVar[str] = "hydra"
    config_type: ClassVar[type[Any]] = HydraConfig

    def __init__(self, config: HydraConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, RANKS, config.decay, config.max_nodes)
        size = fit.hidden_size
        self.first = nn.ModuleList(nn.Linear((2 + head) * size, size) for head in range(config.heads))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Residual(size) for _ in range(config.layers - 1))) for _ in range(config.heads)
        )

    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        depth = paths.shape[1] - 1
        own = states.to(self.accuracies.dtype)[owners]
        seen = self.target.embed(paths).to(own.dtype).flatten(start_dim=1)
        mixed = own + nn.functional.silu(self.first[depth](torch.cat([own, seen], dim=1)))
        return self.target.head(self.blocks[depth](mixed))


@dataclass(frozen=True)
class Hydra(HeadDrafter):
    """Hydra's heads.

    Attributes:
        max_nodes: nodes of the tree of guesses, chosen by measured accuracies; None is the number that the
            heads were trained with.
    """

    max_nodes: int | None = None

    kind: ClassVar[type[Heads]] = HydraHeads
    paper: ClassVar[str] = (
        "Ankner et al. 2024, Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (arXiv 2402.05109)"
    )
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(max_nodes=1)

    def parents(self, heads: Heads) -> list[int]:
        return heads.tree(self.max_nodes)
