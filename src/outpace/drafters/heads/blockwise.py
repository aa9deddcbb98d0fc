"""Blockwise parallel decoding: feed-forward heads guess a chain of tokens (Stern et al. 2018).

One hidden layer over the target's last state feeds all heads; each adds its part to that state, and the
target's own projection makes a token of the sum (section 6).

What differs from the paper: the target is frozen, since its text is what must not change; all heads are
learnt in every step, where the paper picks one at random to save memory; and under sampling the chain is
drawn with the target's own noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.heads.heads import HeadDrafting, HeadGrowth, Heads, HeadState
from outpace.drafters.support.draws import Noise, check_noise
from outpace.learned.learned import Fit
from outpace.targets.base import TargetModel


@dataclass(frozen=True)
class BlockwiseConfig:
    """Heads of blockwise parallel decoding.

    Attributes:
        heads: tokens guessed ahead, at least 1: k - 1 in the paper, which counts the target's own.
        width: of the hidden layer, for each head, relative to the target's hidden size; above 0.
    """

    heads: int = 4
    width: float = 1.0

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width <= 0:
            raise OutpaceError("blockwise: heads must be at least 1, and width above 0")


class BlockwiseHeads(Heads):
    """A feed-forward layer with an output for each head."""

    method: ClassVar[str] = "blockwise"
    config_type: ClassVar[type[Any]] = BlockwiseConfig

    def __init__(self, config: BlockwiseConfig, fit: Fit) -> None:
        super().__init__(config, fit, config.heads, ranks=1, decay=1.0, nodes=config.heads)
        size = fit.hidden_size
        self.hidden = nn.Linear(size, config.heads * max(1, round(config.width * size)))
        self.outputs = nn.ModuleList(nn.Linear(self.hidden.out_features, size) for _ in range(config.heads))
        for output in self.outputs:
            assert isinstance(output, nn.Linear)
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)

    def tree(self, nodes: int | None = None) -> list[int]:
        return list(range(-1, self.depth - 1))[:nodes]

    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        own = states.to(self.hidden.weight.dtype)
        output = self.outputs[paths.shape[1] - 1]
        return self.target.head(own + output(nn.functional.relu(self.hidden(own))))[owners]


@dataclass(frozen=True)
class Blockwise(HeadDrafting, Drafter[HeadState]):
    """The heads of blockwise parallel decoding.

    Attributes:
        path: the folder that ``outpace train blockwise`` wrote, or the heads themselves.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": the most probable tokens.
    """

    path: Any = field(repr=False)
    draws: Noise = "coupled"

    paper: ClassVar[str] = (
        "Stern et al. 2018, Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115)"
    )

    def __post_init__(self) -> None:
        check_noise("blockwise", self.draws)

    def prepare(self, target: TargetModel) -> HeadGrowth:
        heads = BlockwiseHeads.of(self.path, target)
        return HeadGrowth.of(heads, heads.tree(), self.draws)
