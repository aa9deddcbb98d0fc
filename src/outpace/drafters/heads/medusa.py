"""Medusa: residual heads on the target's last hidden state, a tree of their best guesses (Cai et al. 2024).

The heads read the same state independently, so the tree is a part of the Cartesian product of their
candidates: the part with the most expected right guesses. Blockwise parallel decoding (Stern et al. 2018,
section 6) is Medusa with one guess per head, a chain, and with heads that share a hidden layer.

Differences from the papers: the heads share the target's vocabulary projection unless ``own_head`` is set;
all heads are trained in every step, where Stern et al. pick one at random to save memory; and when sampling,
candidates are drawn with the target's own noise (Daliri et al. 2024), so that the tokens are those of plain
decoding. Typical acceptance is a separate verifier. The target is frozen (Medusa-1), unless
``outpace train medusa --tune lora`` trains it too (Medusa-2): plain decoding of the tuned target is then the
reference.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.heads.heads import RANKS, HeadConfig, Heads, Residual, TreeHeads
from outpace.drafters.support.shapes import Static, TreeShape, branching_parents, numbers
from outpace.embedded import nano_drafter_path
from outpace.learned import published_medusa
from outpace.learned.learned import Fit
from outpace.learned.published import find
from outpace.targets.base import TargetModel


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Medusa's heads, of ``layers`` residual layers; their own projections begin as the target's."""

    method: ClassVar[str] = "medusa"


class StateHeads(Heads):
    """Heads that read only the target's state."""

    @abstractmethod
    def guess(self, states: Tensor, depth: int) -> Tensor:
        """Logits [B, drafted ids] of the head of a depth, from states [B, hidden size]."""

    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        logits = self.guess(states.to(self.accuracies.dtype), paths.shape[1] - 1)
        return logits[owners.to(logits.device)]  # the target's head may be on another device


class MedusaHeads(StateHeads):
    """K heads: residual layers, then the target's vocabulary projection or their own."""

    method: ClassVar[str] = "medusa"
    config_type: ClassVar[type[Any]] = MedusaConfig

    def __init__(self, config: MedusaConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, RANKS, config.max_nodes)
        size = fit.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Residual(size) for _ in range(config.layers))) for _ in range(config.heads)
        )
        self.projections = nn.ModuleList(
            nn.Linear(size, fit.vocabulary, bias=False) for _ in range(config.heads if config.own_head else 0)
        )

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        """Load a folder that outpace wrote, or published heads, which may be a name on the hub.

        Published heads come without measured accuracies, so their tree follows from a rough prior.
        See ``outpace.learned.published_medusa``.
        """
        place = find(folder, "medusa")
        described = published_medusa.read(place)
        if described is None:
            return super().load(place, target)
        tensors, heads, layers = published_medusa.read_tensors(place)
        projection = tensors.get("projections.0.weight")
        if layers < 1 or projection is None or projection.dim() != 2:
            raise OutpaceError(f"medusa: the heads in {place} lack a residual layer or a projection")
        vocabulary, size = projection.shape
        fit = Fit(vocabulary, size, str(described.get("base_model_name_or_path") or "the target"))
        config = MedusaConfig(heads, layers, own_head=True)
        made = cls.sketched(config, fit, target, tensors, str(place), given=("accuracies",))
        return made.drafting(target, {**tensors, "accuracies": made.accuracies}, str(place))

    def guess(self, states: Tensor, depth: int) -> Tensor:
        guessed: Tensor = self.blocks[depth](states)
        if len(self.projections):
            projected: Tensor = self.projections[depth](guessed)
            return projected
        return self.drafted.head(self.target)(guessed)


@dataclass(frozen=True)
class Medusa(TreeHeads):
    """Medusa's heads.

    Attributes:
        path: a folder that ``outpace train medusa`` wrote, published heads (FasterDecoding/Medusa) by folder
            or hub name, or the heads themselves. None is the heads for the embedded model.
        branching: children of the root, of each of its children, and so on, as "4x2x1x1": a tree chosen by
            hand, in place of ``max_nodes`` and ``expand``.
    """

    path: Any = field(default=None, repr=False)
    branching: str | tuple[int, ...] = ()

    kind: ClassVar[type[Heads]] = MedusaHeads
    when: ClassVar[str] = "with Medusa's heads of your model, published or trained"
    needs: ClassVar[str] = "their folder"
    paper: ClassVar[str] = (
        "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads "
        "(arXiv 2401.10774)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branching and (self.max_nodes is not None or self.expand is not None):
            raise OutpaceError("medusa: branching excludes max_nodes and expand")
        if any(count < 1 for count in self._factors()):
            raise OutpaceError(f"medusa: branching must be numbers of at least 1, not {self.branching!r}")

    def _factors(self) -> tuple[int, ...]:
        return numbers("branching", self.branching, "x", int, "medusa")

    def heads(self, target: TargetModel) -> Heads:
        return MedusaHeads.of(nano_drafter_path("medusa") if self.path is None else self.path, target)

    def shape(self, heads: Heads) -> TreeShape:
        factors = self._factors()
        if len(factors) > heads.depth:
            raise OutpaceError(
                f"medusa: branching has {len(factors)} depths, but there are only {heads.depth} heads"
            )
        return Static(branching_parents(factors, len(factors))) if factors else super().shape(heads)
