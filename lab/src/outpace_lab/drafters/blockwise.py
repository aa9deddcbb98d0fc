"""Blockwise parallel decoding: heads that draft a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafters.heads.heads import HeadDrafter, Heads
from outpace.drafters.heads.medusa import StateHeads
from outpace.learned.learned import Fit
from outpace.spec import check_least
from outpace_lab.train.modules.heads import TrainedHeads


@dataclass(frozen=True)
class BlockwiseConfig:
    """Heads of blockwise parallel decoding.

    Attributes:
        heads: number of heads, at least 1: k - 1 in the paper, which counts the target's own.
        width: width of the hidden layer per head, relative to the target's hidden size; above 0.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all.
    """

    heads: int = 4
    width: float = 1.0
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        check_least("blockwise", self, heads=1, draft_vocabulary=0)
        if self.width <= 0:
            raise OutpaceError(f"blockwise: width must be above 0, not {self.width}")


class BlockwiseHeads(StateHeads, TrainedHeads):
    """K heads with a common hidden layer, whose output for each is added to the state (section 6)."""

    method: ClassVar[str] = "blockwise"
    config_type: ClassVar[type[Any]] = BlockwiseConfig

    def __init__(self, config: BlockwiseConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, ranks=1, max_nodes=config.heads)
        size = fit.hidden_size
        self.hidden = nn.Linear(size, config.heads * max(1, round(config.width * size)))
        self.outputs = nn.ModuleList(nn.Linear(self.hidden.out_features, size) for _ in range(config.heads))
        for weight in self.outputs.parameters():
            nn.init.zeros_(weight)

    @property
    def decay(self) -> float:
        return 1.0

    def guess(self, states: Tensor, depth: int) -> Tensor:
        own: Tensor = self.outputs[depth](nn.functional.relu(self.hidden(states)))
        return self.drafted.head(self.target)(states + own)


@dataclass(frozen=True)
class Blockwise(HeadDrafter):
    """The heads of blockwise parallel decoding, which guess a chain."""

    kind: ClassVar[type[Heads]] = BlockwiseHeads
    when: ClassVar[str] = "to study the first heads that drafted"
    needs: ClassVar[str] = "a folder from outpace train"
    paper: ClassVar[str] = (
        "Stern et al. 2018, Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115)"
    )
