"""Test of flat forwards: whether rows one after the other have the logits that they have in windows."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from outpace.core import UnsupportedModel, described, out_of_memory
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Rows
from outpace.targets.step.agreement import difference, largest_difference
from outpace.targets.step.bit_test import distinct_ids
from outpace.targets.step.reference import TREE_OF_SEVEN
from outpace.targets.step.tame import tame
from outpace.targets.step.tree_test import short
from outpace.transfer import widened

_CHAIN = 60  # rows of a prompt beside a tree: enough that padding costs more than a flat forward


@torch.inference_mode()
def why_not_flat(target: Any, embedded: int) -> str | None:
    """The reason why flat forwards of a stock target are not those of windows; None if they are.

    Whether the code of a model computes each row by itself does not depend on its weights, so it is seen on
    random ones (``tame.py``). Where the target promises bits, they are compared with its own weights.

    Args:
        embedded: number of token ids that have an embedding.
    """
    try:
        padded, flat = _both(target.reference().target(short(tame(target.model))), embedded)
        if not difference(flat, padded) <= largest_difference(torch.float32, 0):
            return "rows one after the other have other logits than in windows"
        if target.bit_exact and not torch.equal(*_both(target, embedded)):
            return "rows one after the other have other bits than in windows"
    except Exception as error:
        if out_of_memory(error):
            raise
        return described(error)
    return None


def _both(target: Any, embedded: int) -> tuple[Tensor, Tensor]:
    """Logits of the same rows, by a padded and by a flat forward.

    Raises:
        UnsupportedModel: it cannot run a flat one.
    """
    padded = _logits(target, embedded)
    before = target.plan.layouts["flat"]
    target._modules.flat = target._modules.with_flat()
    try:
        flat = _logits(target, embedded)
    finally:
        target._modules.flat = None
    if target.plan.layouts["flat"] == before:
        raise UnsupportedModel("its attention has no flat form, or its context is too short for a test")
    return padded, flat


def _logits(target: TargetModel, embedded: int) -> Tensor:
    """Logits of a prompt beside a tree and a single row, which follow prompts of different lengths."""
    count = _CHAIN if target.context is None else min(_CHAIN, target.context)
    ids = iter(distinct_ids(min(target.vocabulary, embedded), 0, _CHAIN + 16))
    shape = TREE_OF_SEVEN.parents
    cache = target.new_cache(slots=3, length=64)
    slots = [cache.allocate() for _ in range(3)]
    prompts = {slots[0]: list(islice(ids, 5)), slots[2]: list(islice(ids, 3))}
    target.forward(cache, Batch.of(prompts, None))
    cache.keep({slot: range(len(prompt)) for slot, prompt in prompts.items()})
    rows = [Rows(list(islice(ids, len(shape))), shape), Rows(list(islice(ids, count))), Rows([next(ids)])]
    output = target.forward(cache, Batch.of(dict(zip(slots, rows, strict=True))))
    return torch.cat([widened(output.logits_of(slot)) for slot in slots])
