"""EAGLE (Li et al. 2024; EAGLE-2, 2024; EAGLE-3, 2025): a layer that continues the target's hidden states.

Differences from the papers: drafts are drawn with the target's own noise by default, as with a draft model;
the tree is EAGLE-2's with ``expand``, otherwise a chain; no noise is added to features in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outpace.drafters.eagle.eagle_module import EagleModule
from outpace.drafters.support.continuing import Continuing, ContinuingDrafter
from outpace.drafters.support.layer_cache import Forward, LayerCache
from outpace.drafters.support.vocabulary import part_of
from outpace.embedded import nano_drafter_path
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import shapes_for


@dataclass(frozen=True, kw_only=True)
class EagleShared(Continuing):
    """Data that an engine's sequences share; a row's output is its state, [hidden size]."""

    module: EagleModule

    @property
    def layers_read(self) -> tuple[int, ...]:
        return self.module.hidden_layers

    def revision(self) -> int:
        return 0 if self.module.config.own_head else self.module.targets_head.revision()

    def committed(self, hidden: Mapping[int, Tensor], before: Tensor) -> Tensor:
        return self.module.features(hidden)

    def run(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        return self.module.advance(tokens, read, forward.positions, forward.mask, forward.store)

    def logits(self, outputs: Tensor) -> Tensor:
        return self.module.drafted_logits(outputs)


@dataclass(frozen=True)
class Eagle(ContinuingDrafter):
    """EAGLE-1 or EAGLE-3, depending on the folder.

    Attributes:
        path: folder of a trained drafter: one of outpace, or a published EAGLE-3 in the layout of speculators
            or EAGLE, or a published EAGLE-1, or the name of one on the hub; or the module itself. None is the
            EAGLE-3 for the embedded model.
        num_speculative_tokens: tokens on a path of the draft, at least 1; by default the number it was
            trained for, or 5 if that is unknown.
    """

    when: ClassVar[str] = "with an EAGLE drafter of your model, published or trained"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv "
        "2401.15077); Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees "
        "(arXiv 2406.16858); Li et al. 2025, EAGLE-3: Scaling up Inference Acceleration of Large Language "
        "Models via Training-Time Test (arXiv 2503.01840)"
    )

    def prepare(self, target: TargetModel) -> EagleShared:
        module = EagleModule.of(nano_drafter_path("eagle") if self.path is None else self.path, target)
        weight = next(module.parameters())
        return EagleShared(
            **self.growth(module.config.tokens),
            vocabulary=part_of(module.drafted, target.vocabulary),
            module=module,
            cache=LayerCache.of(module.config, module.config.depth, weight, shapes_for(target)),
        )
