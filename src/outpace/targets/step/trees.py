"""Forwards with branches on a GPU: on a copy of the step, with attention by a kernel for trees.

The model's own attention copies keys and values for grouped queries, and takes a mask over all columns
(``gpu/tree_attention.py`` does neither). Which forwards run on the copy: ``Modules.over``.
"""

from __future__ import annotations

import torch

from outpace.core import UnsupportedModel
from outpace.native.gpu import why_no_triton
from outpace.targets.base import TargetModel
from outpace.targets.inputs.config import GPU
from outpace.targets.inputs.masks import TREE
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.step.modules import Modules
from outpace.targets.step.plans import StepRequest
from outpace.targets.step.reference import StockModel
from outpace.targets.step.self_test import self_test

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def give_trees(asked: StepRequest, modules: Modules, never: str | None) -> str | None:
    """Give a step its copy for trees; returns the reason if it has none.

    Args:
        never: why targets of this kind have none; None if they may have one.
    """
    reason = never or _why_refused(asked, modules)
    if reason is None:
        try:
            modules.trees = modules.with_trees()
        except UnsupportedModel as error:
            reason = str(error)
    return reason


def why_disproved(target: TargetModel, stock: StockModel) -> str | None:
    """The reason why a target fails the self-test; None if it passes."""
    try:
        self_test(target, stock)
    except UnsupportedModel as error:
        return str(error)
    return None


def _why_refused(asked: StepRequest, modules: Modules) -> str | None:
    """The reason not to make the copy; None to make it."""
    model, options = asked.model, asked.options
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if options.stock:
        return "stock steps run as transformers runs them"
    if asked.chains:
        return "the model takes chains only"
    if modules.step is not model:
        return "other modules run in place of the model's, with an attention of their own"
    if attention == TREE:
        return "all steps run on the kernel for trees"
    if attention not in ("sdpa", "eager"):
        return f"the model uses its own attention, {attention!r}"
    if not model._supports_attention_backend:
        return "the model's attention is code of its own, which cannot be replaced"
    if why := why_no_triton():
        return why
    if model.dtype not in _DTYPES:
        return f"the kernel takes no {model.dtype}"
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1:
        return f"layers are on {len(devices)} devices"
    return why_untouchable(model, GPU)
