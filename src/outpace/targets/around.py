"""Base of targets that wrap another target and share its layers, embeddings and head."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.targets.base import HiddenStates, TargetModel


class AroundTarget(TargetModel):
    """A target whose layers, hidden states, embeddings and head are those of an inner target.

    Attributes:
        inner: the inner target.
    """

    inner: TargetModel

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def layers(self) -> int:
        return self.inner.layers

    @property
    def hidden(self) -> HiddenStates:
        return self.inner.hidden

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def head(self, states: Tensor) -> Tensor:
        return self.inner.head(states)
