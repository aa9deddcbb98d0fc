"""Test of trees: whether a tree of tokens has the logits of its paths.

Whether a model's code honours masks, positions, windows and a cache does not depend on its weights. So the
same code runs on random weights of a moderate size in float32 (``tame.py``): rounding is then some 1e-6 of
the logits' spread, and a wrong bit of a mask, a shifted position or a window that is off by one some 1e-2;
half of the digits must agree. (Where a setting lets the processor round the products of float32, the same in
float64 decides.) With the model's own weights, a token may change no row outside its subtree, in two forwards
of one shape.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.core import Source, UnsupportedModel, out_of_memory
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import family
from outpace.targets.inputs.forward import device_of
from outpace.targets.inputs.surgery import keep_layers
from outpace.targets.rows import Rows
from outpace.targets.step.agreement import difference, largest_difference
from outpace.targets.step.reference import CHANGED, PAST_WINDOW, StockModel, TrialTexts, dtype_name
from outpace.targets.step.replay import kinds_of
from outpace.targets.step.tame import ROWS, tame
from outpace.transfer import widened

_log = logging.getLogger(__name__)


def compare_tree(target: TargetModel, stock: StockModel) -> None:
    """Compare a tree with stock forwards of its paths, with random weights.

    In float32; where that fails in float64 too, since settings may let a processor round float32's products.
    (A kernel that takes no float64 must pass in float32.)
    """
    try:
        _test_tame(target, stock, torch.float32)
    except UnsupportedModel as error:
        if target.device.type == "mps" or not stock.wider:
            raise
        try:
            ran = _test_tame(target, stock, torch.float64)
        except UnsupportedModel:
            ran = False
        if not ran:
            raise error


def _test_tame(target: TargetModel, stock: StockModel, dtype: torch.dtype) -> bool:
    """Compare a tree with its paths in a copy of this dtype; returns False if stock's forward fails there."""
    model = short(tame(target.model, dtype))
    sources = _converted(stock.sources, model.dtype)
    text = torch.tensor([[0, 1]], device=target.device)
    try:
        stock.run(model, sources[0], text)
    except Exception as error:  # the copy of some code that outpace does not know is no model
        if out_of_memory(error):
            raise
        _log.debug("%s has no copy with random weights in %s", family(target.model), dtype, exc_info=True)
        return False
    other = stock.target(model)
    texts = TrialTexts.for_target(other, stock.embedded, PAST_WINDOW)
    cache, slots = texts.open(other, sources)
    found = checked_subtree(other, cache, slots, texts)
    for prompt, rows, whole in texts.paths():
        _same_path(stock, model, sources[prompt], whole, found[prompt][list(rows)])
    cache.keep({slots[0]: texts.shape.kept, slots[1]: range(2)})
    # A plain step: some decoders leave out the mask of a single row, which texts of different lengths need.
    after = other.forward(cache, Batch.of({slot: [texts.last] for slot in slots}))
    for prompt, before in enumerate((texts.until(texts.shape.kept), texts.paths()[-1][2])):
        _same_path(stock, model, sources[prompt], [*before, texts.last], after.logits_of(slots[prompt]))
    pad = getattr(model.config, "pad_token_id", None)
    if other.why_chains_only and pad is not None and 0 <= pad < stock.embedded:
        # The copy has no embedding of a pad with a large id.
        embeds, encoded = (other, sources) if pad < ROWS else (target, stock.sources)
        _check_pad(embeds, encoded[0], texts.tree, pad)
    return True


def short(model: Any) -> Any:
    """A model's first layers, with one of each kind; all of them, if it is no plain stack or there are few.

    Whether the code of a layer honours a mask does not depend on how many of its kind there are.
    """
    kinds = kinds_of(model)
    count = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    if len(kinds) - count < 2:
        return model
    try:
        part = keep_layers(model, range(max(count, 2)))
        part(input_ids=torch.tensor([[0, 1]], device=device_of(model.get_input_embeddings())))
    except Exception as error:
        if out_of_memory(error):
            raise
        _log.debug("%s does not run with %d layers", family(model), count, exc_info=True)
        return model
    return part


def _check_pad(target: TargetModel, source: Source | None, ids: Sequence[int], pad: int) -> None:
    """Compare a chain with a pad in it with the same tokens one at a time.

    A model that counts positions itself may count pads otherwise if they are alone.
    """
    off, apart = (
        difference(
            *(_last_of(target, source, [ids[0], token, ids[1]], widths) for widths in ([3], [1, 1, 1]))
        )
        for token in (pad, ids[2])
    )
    if not off <= largest_difference(target.dtype, apart):
        raise UnsupportedModel(
            f"{family(target.model)} counts the positions after a pad (token {pad}) otherwise in a chain "
            "than in plain decoding, and they cannot be set"
        )


def _last_of(
    target: TargetModel, source: Source | None, text: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Logits of a text's last row, [1, vocabulary], fed in forwards of these widths."""
    cache = target.new_cache(slots=2, length=64)
    slot, start = target.open(cache, source), 0
    for width in widths:
        output = target.forward(cache, Batch.of({slot: text[start : start + width]}))
        cache.keep({slot: range(width)})
        start += width
    return widened(output.logits_of(slot)[-1:])


def checked_subtree(
    target: TargetModel, cache: Cache, slots: Sequence[Slot], texts: TrialTexts
) -> list[Tensor]:
    """The logits of a tree and of the rows beside it, if rows do not depend on tokens outside their path.

    For one token and another in its place: two forwards of one shape agree elsewhere to the last bit (nearly,
    in a mixture of experts).
    """
    changed = [*texts.tree[:CHANGED], texts.other, *texts.tree[CHANGED + 1 :]]
    shape = texts.shape
    others = target.forward(cache, Batch.of(texts.feeds(slots) | {slots[0]: Rows(changed, shape.parents)}))
    before = others.logits_of(slots[0]).clone()
    output = target.forward(cache, Batch.of(texts.feeds(slots)))
    rows = output.logits_of(slots[0])
    leak = difference(widened(rows[shape.blind]), widened(before[shape.blind]))
    effect = difference(widened(rows[[shape.sees]]), widened(before[[shape.sees]]))
    if not leak <= effect / 4:
        why = "its attention is not causal" if target.why_chains_only else "it honours no 4-D mask"
        raise UnsupportedModel(
            f"{family(target.model)} lets rows of a {shape.name} see more than their ancestors: {why} "
            f"(a token changes logits below it by {effect:.2g} of their spread, others by {leak:.2g})"
        )
    return [output.logits_of(slot).clone() for slot in slots]


def _same_path(stock: StockModel, model: Any, source: Source | None, text: list[int], found: Tensor) -> None:
    """Compare the logits of the last rows of a text with a stock forward of a copy with random weights."""
    ids = torch.tensor([text], device=device_of(model.get_input_embeddings()))
    expected = stock.run(model, source, ids).logits[0]
    off = difference(widened(expected[-len(found) :]), widened(found))
    if not off <= (limit := largest_difference(found.dtype, 0.0)):
        other = stock.target(model)
        what = "a tree of tokens than for its paths"
        if other.why_chains_only:
            what = "a chain of tokens after those in a cache than for the whole text"
        raise UnsupportedModel(
            f"{family(model)} gives other logits for {what}: "
            f"{_cause(other, source, text, expected, limit)} (with random weights in "
            f"{dtype_name(found.dtype)} they are off by {off:.2g} of their spread, of which rounding "
            f"explains {limit:.1g})"
        )


def _cause(
    target: TargetModel, source: Source | None, text: list[int], expected: Tensor, limit: float
) -> str:
    """The mistake of a model that fails on a tree, by a chain of its text.

    Args:
        expected: stock's logits of the text, [n, vocabulary].
    """
    cache = target.new_cache(length=len(text))
    slot, found = target.open(cache, source), []
    for start, stop in ((0, 1), (1, len(text))):
        found.append(target.forward(cache, Batch.of({slot: text[start:stop]})).logits_of(slot).clone())
        cache.keep({slot: range(stop - start)})
    rows = zip(widened(torch.cat(found)), widened(expected), strict=True)
    wrong = [row for row, pair in enumerate(rows) if not difference(pair[1][None], pair[0][None]) <= limit]
    if not wrong:
        return (
            "sequences side by side differ"
            if target.why_chains_only
            else "it does not honour a 4-D mask or positions"
        )
    window = getattr(target.model.config.get_text_config(decoder=True), "sliding_window", None)
    if window and wrong[0] >= window - 1:
        return f"its sliding window is not the {window} tokens of its config"
    return "steps with a cache and a mask, of a chain too, compute something else than one forward does"


def _converted(sources: Sequence[Source | None], dtype: torch.dtype) -> list[Source | None]:
    return [source and replace(source, states=source.states.to(dtype)) for source in sources]
