"""Gemma 4's assistants: a few layers that attend to the target's own keys and values (Google 2026).

An assistant has no keys and values of its own. Each of its layers attends to those of the target's last layer
of the same kind, at the committed places. So it reads no prompt, and all rows of a draft have the root's
position. A row reads the token and what the row before gave, for the first one the target's state.

Differences from transformers' ``SinglePositionMultiTokenCandidateGenerator``: drafts are drawn with the
target's own noise by default, trees grow by confidence with ``expand``, and only committed places are
attended to; there the place after them is too, whose keys are those of a rejected token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.drafters.assistant.assistant_module import AssistantModule
from outpace.drafters.support.continuing import Continuing
from outpace.drafters.support.layer_cache import Forward, LayerCache
from outpace.drafters.support.part import PartDrafter
from outpace.drafters.support.vocabulary import part_of
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import shapes_for


@dataclass(frozen=True, kw_only=True)
class AssistantShared(Continuing):
    """Data that an engine's sequences share; for a row's output see ``AssistantModule``."""

    module: AssistantModule
    head: nn.Module

    @property
    def layers_read(self) -> tuple[int, ...]:
        return self.module.layers_read

    def committed(self, hidden: Mapping[int, Tensor], before: Tensor) -> Tensor:
        return torch.cat([hidden[layer] for layer in self.layers_read], dim=-1)

    def run(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        if depth:
            return self.module.draft(forward, tokens, read, depth)
        return self.module.read(forward, tokens, read)

    def logits(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.module.states(outputs))
        return logits


@dataclass(frozen=True)
class Assistant(PartDrafter):
    """The assistant that Gemma 4 is published with, which attends to the target's own keys and values.

    Attributes:
        path: folder or hub name of the assistant, or the transformers model itself.
        num_speculative_tokens: tokens on a path of the draft; by default the number in the assistant's
            generation config.
    """

    when: ClassVar[str] = "for Gemma 4, with the assistant that is published beside it"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Google 2026, Gemma 4 assistants (transformers' Gemma4AssistantForCausalLM); drafting from a feature "
        "and a token: Li et al. 2024, EAGLE (arXiv 2401.15077); a part of the vocabulary: Zhao et al. 2025, "
        "FR-Spec (arXiv 2502.14856)"
    )

    def prepare(self, target: TargetModel) -> AssistantShared:
        module = AssistantModule.of(self.path, target)
        ids = self.drafted(target)
        return AssistantShared(
            **self.growth(module.tokens),
            vocabulary=part_of(ids, target.vocabulary),
            module=module,
            head=module.head(ids),
            cache=LayerCache(list(module.shapes.values()), shapes_for(target)),
        )
