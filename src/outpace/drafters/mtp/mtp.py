"""Multi-token prediction (Gloeckle et al. 2024; DeepSeek-AI 2024, section 2.2): layers of the checkpoint.

Differences from the papers: drafts are drawn with the target's own noise by default, as with a draft model,
and trees grow by confidence with ``expand``. A single layer drafts on from its own output; of several, each
drafts one place, so that a draft has at most as many places as there are layers. The drafted tokens may be
a part of the vocabulary (FR-Spec, Zhao et al. 2025; FastMTP, Cai et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outpace.core import OutpaceError
from outpace.drafters.mtp.mtp_module import MtpModule
from outpace.drafters.support.continuing import Continuing
from outpace.drafters.support.layer_cache import Forward, LayerCache
from outpace.drafters.support.part import PartDrafter
from outpace.drafters.support.shapes import Growing
from outpace.drafters.support.vocabulary import part_of
from outpace.learned.head import PartialHead
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import shapes_for

_TOKENS = 3  # of a draft by a single layer, which was trained for the first


@dataclass(frozen=True, kw_only=True)
class MtpShared(Continuing):
    """Data that an engine's sequences share; for a row's output see ``MtpModule.run``."""

    module: MtpModule
    head: PartialHead

    def revision(self) -> int:
        return self.head.revision()

    def begin(self, sequence: Sequence) -> Growing:
        tree = super().begin(sequence)
        if len(self.module) > 1:  # in a shorter text a draft has rows that a later layer cannot read
            tree.layers = min(tree.layers, len(sequence.tokens) - 1)
        return tree

    @property
    def layers_read(self) -> tuple[int, ...]:
        return (-1,)

    def committed(self, hidden: Mapping[int, Tensor], before: Tensor) -> Tensor:
        return self.module.committed(hidden[-1], before)

    def run(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        return self.module.run(forward, tokens, read, depth)

    def logits(self, outputs: Tensor) -> Tensor:
        return self.head(outputs[:, -1])


@dataclass(frozen=True)
class Mtp(PartDrafter):
    """Multi-token prediction by the layers that the target's own checkpoint has for it.

    Attributes:
        path: folder or hub name of a checkpoint with these layers; None is the one that the target was loaded
            from.
        num_speculative_tokens: tokens on a path of the draft; by default one per layer, or 3 if there is one
            layer. Several layers cannot draft more.
    """

    when: ClassVar[str] = (
        "for models whose checkpoint has prediction layers, as DeepSeek, GLM and Qwen3.5 have"
    )
    needs: ClassVar[str] = "a checkpoint with prediction layers"
    paper: ClassVar[str] = (
        "Gloeckle et al. 2024, Better & Faster Large Language Models via Multi-token Prediction (arXiv "
        "2404.19737); DeepSeek-AI 2024, DeepSeek-V3 Technical Report (arXiv 2412.19437); a part of the "
        "vocabulary: Zhao et al. 2025, FR-Spec (arXiv 2502.14856), Cai et al. 2025, FastMTP (arXiv "
        "2509.18362)"
    )

    def prepare(self, target: TargetModel) -> MtpShared:
        module = self.path if isinstance(self.path, MtpModule) else MtpModule.of(self.path, target)
        layers, asked = len(module), self.num_speculative_tokens
        if layers > 1 and asked is not None and asked > layers:
            raise OutpaceError(
                f"mtp: num_speculative_tokens is at most {layers}, the number of {target.name}'s prediction "
                f"layers, each of which drafts one place; not {asked}"
            )
        ids = self.drafted(target, module.tables)
        head = PartialHead(target, ids)
        if ids is not None and not head.is_matrix:
            raise OutpaceError(
                f"mtp: a part of the vocabulary is drafted with a part of the head, and {target.name}'s "
                "is no matrix; leave draft_vocabulary and draft_text out"
            )
        return MtpShared(
            **self.growth(_TOKENS if layers == 1 else layers),
            vocabulary=part_of(ids, target.vocabulary),
            module=module,
            head=head,
            cache=LayerCache(module.shapes, shapes_for(target)),
        )
