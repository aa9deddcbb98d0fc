"""What an EAGLE drafter is made of, and how it is trained: the options of ``outpace train eagle``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from outpace.core import OutpaceError
from outpace.learned.hidden_layers import default_layers
from outpace.learned.layers import LayerConfig
from outpace.learned.published import NORMS
from outpace.targets.base import TargetModel

_TOKENS = 5  # of a draft, where neither a user nor a file says how many


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """What an EAGLE drafter is made of, and how it is trained.

    Attributes:
        version: 1 predicts the input of the target's head; 3 fuses several layers and predicts tokens alone.
        layers: of the target, whose states EAGLE-3 reads, as ``Output.hidden`` counts them; by default a low,
            a middle and a high one. EAGLE-1 reads the input of the head.
        draft_vocabulary: how many of the target's ids are drafted, the first ones; 0 is all.
        depth: decoder layers.
        norm_before_residual: whether the residual branch starts from the normed feature.
        norm_before_fc: whether EAGLE-3 norms the target's states, side by side, before it fuses them.
        fc_norm: whether it norms each of them by itself instead.
        norm_output: whether it goes on with its normed output, as EAGLE-3.1 does.
        own_head: whether EAGLE-3 has a head of its own; else, as in EAGLE-1, it is the target's.
        own_embeddings: whether it has embeddings of its own; else they are the target's.
        steps: depths that training unrolls; by default 5, and 1 of EAGLE-1. See ``tokens``.
        decay: weight of each depth's loss, relative to that of the depth before it.
        classification: weight of EAGLE-1's loss on tokens, beside that of its regression on features.
    """

    version: int = 3
    layers: tuple[int, ...] = ()
    draft_vocabulary: int = 0
    depth: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_head: bool = True
    own_embeddings: bool = False
    steps: int = 0
    decay: float = 0.8
    classification: float = 0.1

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise OutpaceError(
                f"eagle: version must be 1 or 3, not {self.version}; EAGLE-2 is either, drafting with expand"
            )
        for name in ("steps", "draft_vocabulary"):
            if getattr(self, name) < 0:
                raise OutpaceError(f"eagle: {name} must be at least 0, not {getattr(self, name)}")
        if self.depth < 1:
            raise OutpaceError(f"eagle: depth must be at least 1, not {self.depth}")
        if self.norm_before_fc and self.fc_norm:
            raise OutpaceError("eagle: norm_before_fc and fc_norm are two ways to norm the same: give one")
        for name in NORMS:
            if self.version == 1 and getattr(self, name):
                raise OutpaceError(f"eagle: {name} is of EAGLE-3; leave it out, or train with version=3")

    @property
    def tokens(self) -> int:
        """Those on a path of the drafts that are measured, and that are made where nobody says otherwise: as
        many as training unrolls. An EAGLE-1 that was trained on single rows drafts 5 all the same.
        """
        return _TOKENS if self.version == 1 and self.steps == 1 else self.steps

    def made_for(self, target: TargetModel) -> EagleConfig:
        """The same with nothing left open."""
        layers = (-1,) if self.version == 1 else self.layers or default_layers(target)
        return dataclasses.replace(
            self.sized(target.hidden.size),
            layers=layers,
            draft_vocabulary=self.draft_vocabulary or target.vocabulary,
            own_head=self.own_head and self.version == 3,
            steps=self.steps or (1 if self.version == 1 else _TOKENS),
        )
