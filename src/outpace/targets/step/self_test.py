"""Self-test of a model as a target: its logits for a tree of tokens.

Two questions, each asked where rounding cannot hide the answer, without a limit tuned on some model: *does a
tree equal its paths?* (``tree_test.py``) and *does the target compute the model?* (``layer_test.py``). The
third, *are all bits equal?*, is for steps that claim it (``bit_test.py``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from outpace.core import OutpaceError, UnsupportedModel, described, out_of_memory
from outpace.targets.base import TargetModel
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.config import family
from outpace.targets.inputs.surgery import exchange
from outpace.targets.step.layer_test import compare_layers, compare_replaced
from outpace.targets.step.reference import Imprecise, StockModel, shape_of
from outpace.targets.step.tree_test import compare_tree

_log = logging.getLogger(__name__)


def tested(
    target: TargetModel, stock: StockModel, make: Callable[..., TargetModel], model: Any = None
) -> None:
    """Run the self-test.

    Args:
        make: makes a target of a model, not tested, with the options that replace those of ``target``.
        model: the one of which the target has some layers; None for its own.

    Raises:
        UnsupportedModel, Imprecise: as ``self_test``; the message ends with a way that was tried and loads.
    """
    try:
        self_test(target, stock)
    except UnsupportedModel as error:
        model = target.model if model is None else model
        for words, other_model, options in _others(target, model, isinstance(error, Imprecise)):
            try:
                other: Any = make(other_model(), **options)
                self_test(other, other.reference())
            except Exception:
                _log.debug("%s does not load with %s", family(target.model), words, exc_info=True)
                continue
            raise type(error)(f"{error}; it loads with {words}") from error
        raise


def _others(
    target: TargetModel, model: Any, imprecise: bool
) -> Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """Ways in which a refused model may load: their name, the model, and options.

    Args:
        imprecise: the cause may be what replaces the model's own modules.
    """
    if imprecise and target.bit_exact:
        yield "exact=False", lambda: model, {"exact": False}
    for plan in ("exact", "packed", "stock") if imprecise else ():
        if plan != target.plan.name:
            yield f"plan={plan!r}", lambda: model, {"plan": plan, "exact": "auto"}
    current = model.config.get_text_config(decoder=True)._attn_implementation
    for attention in ("sdpa", "eager"):
        if attention != current:
            other = partial(exchange, model, lambda _: None, attention)
            yield f"attn_implementation={attention!r}", other, {}
    weights = list(model.parameters())
    size = sum(weight.numel() for weight in weights) * torch.float32.itemsize
    free = free_bytes(target.device)
    whole = all(weight.is_floating_point() for weight in weights)
    if target.dtype in (torch.float16, torch.bfloat16) and whole and free is not None and free > 2 * size:
        yield "dtype=torch.float32", lambda: copy.deepcopy(model).float(), {}


@torch.inference_mode()
def self_test(target: TargetModel, stock: StockModel) -> None:
    """Answer the two questions for a target.

    Raises:
        UnsupportedModel: a tree's rows have other logits than its paths, or see more than these.
        Imprecise: the target computes something else than its model.
    """
    try:
        compare_tree(target, stock)
        # Rounding may route a row of a mixture to other experts, which changes all that follows from it. This
        # is chance, so other tokens are tried; what is wrong is wrong with any tokens.
        tries = 3 if target.dtype in (torch.float16, torch.bfloat16) else 1
        for turn in range(tries):
            try:
                compare_layers(target, stock, turn)
                return compare_replaced(target, stock, turn)
            except UnsupportedModel:
                if turn == tries - 1:
                    raise
    except OutpaceError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UnsupportedModel(
            f"{family(target.model)} fails on a {shape_of(target).name} of tokens: {described(error)}"
        ) from error
