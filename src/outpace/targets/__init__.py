"""Models that verify drafts. ``Target(model)`` picks the class."""

from __future__ import annotations

from typing import Any

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.base import Output, Rows, TargetModel
from outpace.targets.causal import CausalTarget

__all__ = ["CausalTarget", "Output", "Rows", "Target", "TargetModel"]


def Target(model: Any, **options: Any) -> TargetModel:  # noqa: N802 - reads as the class it picks
    """A target for a model.

    Args:
        model: a decoder-only transformers model, or a target already.
        options: of the class picked; see ``CausalTarget``.

    Raises:
        UnsupportedModel: the model cannot be verified or undone; the message names the reason.
    """
    if isinstance(model, TargetModel):
        if options:
            raise OutpaceError(f"a target is made already; its options ({', '.join(options)}) come too late")
        return model
    config = getattr(model, "config", None)
    if config is None or not callable(model):
        raise UnsupportedModel(f"a {type(model).__name__} is not a transformers model; pass a loaded model")
    return CausalTarget(model, **options)
