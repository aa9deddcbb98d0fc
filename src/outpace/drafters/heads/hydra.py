"""Hydra: Medusa's heads, each conditioned on the tokens drafted before its own (Ankner et al. 2024).

The head of depth d reads the target's last hidden state and the embeddings of the root and of the d tokens
drafted after it, so guesses differ from node to node.

Differences from the paper: the tree is chosen by accuracies, as in section 2.3.3 of the Medusa paper,
measured per head after correct tokens. Of Hydra++, prefix attention is not implemented; its deeper heads are
``layers``, and its distillation from the target is a training objective (``forward_kl``). When sampling,
candidates are drawn with the target's own noise. The embeddings are the target's, and so is the head unless
``own_head`` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.drafters.heads.heads import RANKS, HeadConfig, Heads, Residual, TreeHeads
from outpace.learned import published_hydra
from outpace.learned.learned import Fit
from outpace.learned.published import find
from outpace.targets.base import TargetModel


@dataclass(frozen=True)
class HydraConfig(HeadConfig):
    """Hydra's heads, of whose layers the first reads state and embeddings, and the others are residual.

    Attributes:
        own_residual: whether the first layer adds a learned linear map of all that it reads, as published
            heads do, in place of the state.
    """

    layers: int = 2
    own_residual: bool = False

    method: ClassVar[str] = "hydra"


class HydraHeads(Heads):
    """Heads whose first layer reads d + 2 vectors: the state, the root, the d tokens after it."""

    method: ClassVar[str] = "hydra"
    config_type: ClassVar[type[Any]] = HydraConfig

    def __init__(self, config: HydraConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, RANKS, config.max_nodes)
        size = fit.hidden_size
        self.first = nn.ModuleList(nn.Linear((2 + head) * size, size) for head in range(config.heads))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Residual(size) for _ in range(config.layers - 1))) for _ in range(config.heads)
        )
        self.residuals = nn.ModuleList(
            nn.Linear((2 + head) * size, size) for head in range(config.heads if config.own_residual else 0)
        )
        self.projections = nn.ModuleList(
            nn.Linear(size, fit.vocabulary) for _ in range(config.heads if config.own_head else 0)
        )

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        """Load a folder that outpace wrote, or published heads, which may be a name on the hub.

        Published heads come without measured accuracies, so their tree follows from a rough prior.
        See ``outpace.learned.published_hydra``.
        """
        place = find(folder, "hydra")
        described = published_hydra.read(place)
        if described is None:
            return super().load(place, target)
        tensors, heads, layers = published_hydra.read_tensors(place, described)
        vocabulary, size = tensors["projections.0.weight"].shape
        fit = Fit(vocabulary, size, str(described.get("base_model_name_or_path") or "the target"))
        config = HydraConfig(heads, layers, own_head=True, own_residual=True)
        made = cls.sketched(config, fit, target, tensors, str(place), given=("accuracies",))
        return made.drafting(target, {**tensors, "accuracies": made.accuracies}, str(place))

    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        depth = paths.shape[1] - 1
        own = states.to(self.accuracies.dtype)[owners]
        seen = self.target.embed(paths).to(own.dtype).flatten(start_dim=1)
        read = torch.cat([own, seen], dim=1)
        kept = self.residuals[depth](read) if len(self.residuals) else own
        guessed: Tensor = self.blocks[depth](kept + nn.functional.silu(self.first[depth](read)))
        if len(self.projections):
            projected: Tensor = self.projections[depth](guessed)
            return projected
        return self.drafted.head(self.target)(guessed)


@dataclass(frozen=True)
class Hydra(TreeHeads):
    """Hydra's heads: each guesses the next token from the states and the tokens guessed before it.

    Attributes:
        path: a folder that ``outpace train hydra`` wrote, published heads (zankner/Hydra) by folder or hub
            name, or the heads themselves.
    """

    kind: ClassVar[type[Heads]] = HydraHeads
    when: ClassVar[str] = "with Hydra's heads of your model, published or trained"
    needs: ClassVar[str] = "their folder"
    paper: ClassVar[str] = (
        "Ankner et al. 2024, Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (arXiv 2402.05109)"
    )
