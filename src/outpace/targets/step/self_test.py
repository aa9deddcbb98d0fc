"""Self-test of a model as a target: its logits for a tree of tokens.

Two questions, each asked where rounding cannot hide the answer, without a limit tuned on some model.

*Does a tree equal its paths?* Whether a model's code honours masks, positions, windows and a cache does not
depend on its weights. So the same code runs on random weights of a moderate size in float32 (``tame.py``):
rounding is then some 1e-6 of the logits' spread, and a wrong bit of a mask, a shifted position or a window
that is off by one some 1e-2; half of the digits must agree. (Where a setting lets the processor round the
products of float32, the same in float64 decides.) With the model's own weights, a token may change no row
outside its subtree, in two forwards of one shape, and ``bit_test.py`` compares bits: where all are equal, a
tree equals its paths to the last one.

*Does the target compute the model?* Each of its layers is compared with the stock layer, given the very
inputs that it had in the target (``replay.py``), in plain steps and in a tree. The error of the stock layer,
against the same layer in a wider dtype, is what rounding explains there: the target's median over rows may be
twice that, and no row's many times it. So rounding that grows over layers, to whatever size, does not count,
and a wrong scale does. Modules in place of the model's own are compared once more with random weights, since
some weights let rounding hide a mistake. A model whose layers cannot be told apart, or do not run in a wider
dtype, is compared by its logits, against what they change if its embeddings change by a unit in the last
place.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.cache import Cache, Slot
from outpace.core import OutpaceError, Source, UnsupportedModel, described, out_of_memory
from outpace.targets.base import Output, Rows, TargetModel
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.config import family
from outpace.targets.inputs.surgery import exchange, keep_layers
from outpace.targets.step.agreement import difference, hooks_restored, largest_difference, shaken
from outpace.targets.step.bit_test import distinct_ids
from outpace.targets.step.replay import Replay, layers_of, wider
from outpace.targets.step.tame import ROWS, WINDOW, tame

_log = logging.getLogger(__name__)

_CHANGED = 2  # the row of a tree whose token is changed


class _Shape(NamedTuple):
    """Seven rows for the test.

    Attributes:
        paths: its paths, as rows.
        kept: the rows that are kept.
        sees: a row whose logits must change if the token at row ``_CHANGED`` does; ``blind``: rows whose must
            not.
    """

    name: str
    parents: Sequence[int]
    paths: Sequence[Sequence[int]]
    kept: Sequence[int]
    sees: int
    blind: list[int]


# A tree that is four deep, with branches that interleave; a chain of which a part is kept.
_TREE_OF_SEVEN = _Shape(
    "tree", (-1, 0, 0, 1, 1, 2, 4), ((0, 1, 3), (0, 1, 4, 6), (0, 2, 5)), (0, 1, 4, 6), 5, [0, 1, 3, 4, 6]
)
_CHAIN_OF_SEVEN = _Shape("chain", range(-1, 6), (range(7),), range(4), 5, [0, 1])


def _shape_of(target: TargetModel) -> _Shape:
    return _CHAIN_OF_SEVEN if target.chains_only else _TREE_OF_SEVEN


# Tokens before the tree, where windows matter and where they do not, and before the rows beside it.
_PAST_WINDOW, _SHORT, _BESIDE = WINDOW + 1, 3, 2

# Times the stock layer's own error that a layer's may be: the median over rows, and each row's. Over 20
# families, three dtypes and norms of scale 0.25 to 8, targets reach 1.25 and 11; with a scale of attention
# that is off by a tenth the median is 5 and more.
_MEDIAN, _ROW = 2.0, 32.0


class Imprecise(UnsupportedModel):
    """A target computes its model with more error than rounding explains."""


@dataclass(frozen=True)
class Stock:
    """A model without outpace's parts, and how forwards and targets are made of it.

    Attributes:
        model: the modules whose forward the target's steps must equal.
        run: plain forward of a copy of the model over texts [B, n] decoded from a source; takes its options.
        target: a target of a copy, not tested, of which nothing is replaced.
        same: a target of a copy, not tested, with the same kinds of modules in place of its own; None if the
            model's own are in place.
        embedded: number of token ids that have an embedding.
        parts: modules that the target runs.
        sources: the test's two sources, if the model has an encoder.
    """

    model: Any
    run: Callable[..., Any]
    target: Callable[[Any], TargetModel]
    embedded: int
    parts: Sequence[Any]
    same: Callable[[Any], TargetModel] | None = None
    sources: tuple[Source | None, Source | None] = (None, None)


def tested(target: TargetModel, stock: Stock, make: Callable[..., TargetModel]) -> str:
    """Run the self-test.

    Args:
        make: makes a target of a model, not tested, with the options that replace those of ``target``.

    Returns:
        An empty string.

    Raises:
        UnsupportedModel, Imprecise: as ``self_test``; the message ends with a way that was tried and loads.
    """
    try:
        self_test(target, stock)
    except UnsupportedModel as error:
        for words, model, options in _others(target, isinstance(error, Imprecise)):
            try:
                other: Any = make(model(), **options)
                self_test(other, other.reference())
            except Exception:
                _log.debug("%s does not load with %s", family(target.model), words, exc_info=True)
                continue
            raise type(error)(f"{error}; it loads with {words}") from error
        raise
    return ""


def _others(target: TargetModel, imprecise: bool) -> Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """Ways in which a refused model may load: their name, the model, and options.

    Args:
        imprecise: the cause may be what replaces the model's own modules.
    """
    model: Any = target.model
    if imprecise and target.bit_exact:
        yield "exact=False", lambda: model, {"exact": False}
    if imprecise and target.plan.fused:
        yield "fuse=False", lambda: model, {"fuse": False}
    if imprecise and target.plan.packed and not target.quantised:
        yield "pack=False", lambda: model, {"pack": False}
        yield "pack=False, exact=False", lambda: model, {"pack": False, "exact": False}
    own = model.config.get_text_config(decoder=True)._attn_implementation
    for attention in ("sdpa", "eager"):
        if attention != own:
            other = partial(exchange, model, lambda _: None, attention)
            yield f"attn_implementation={attention!r}", other, {}
    weights = list(model.parameters())
    size = sum(weight.numel() for weight in weights) * torch.float32.itemsize
    free = free_bytes(target.device)
    whole = all(weight.is_floating_point() for weight in weights)
    if target.dtype in (torch.float16, torch.bfloat16) and whole and free is not None and free > 2 * size:
        yield "dtype=torch.float32", lambda: copy.deepcopy(model).float(), {}


@torch.inference_mode()
def self_test(target: TargetModel, stock: Stock) -> None:
    """Answer the two questions for a target.

    Raises:
        UnsupportedModel: a tree's rows have other logits than its paths, or see more than these.
        Imprecise: the target computes something else than its model.
    """
    try:
        _test_tree(target, stock)
        # Rounding may route a row of a mixture to other experts, which changes all that follows from it. This
        # is chance, so other tokens are tried; what is wrong is wrong with any tokens.
        tries = 3 if target.dtype in (torch.float16, torch.bfloat16) else 1
        for turn in range(tries):
            try:
                _test_weights(target, stock, turn)
                return _test_kernels(target, stock, turn)
            except UnsupportedModel:
                if turn == tries - 1:
                    raise
    except OutpaceError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UnsupportedModel(
            f"{family(target.model)} fails on a {_shape_of(target).name} of tokens: {described(error)}"
        ) from error


# -- the texts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Texts:
    """Token ids: two prompts, a tree after the first, rows beside it after the second, one after a path."""

    shape: _Shape
    prompts: tuple[list[int], list[int]]
    tree: list[int]
    beside: list[int]
    last: int
    other: int

    @classmethod
    def of(cls, target: TargetModel, embedded: int, length: int, turn: int = 0) -> _Texts:
        """Texts with a first prompt of this many tokens, or as many as the context has room for."""
        room = length if target.context is None else target.context - 5
        if room < 1:
            raise UnsupportedModel(f"{family(target.model)} has a context of only {target.context} tokens")
        shape = _shape_of(target)
        count, rows = min(target.vocabulary, embedded), len(shape.parents)
        pad = getattr(target.model.config, "pad_token_id", None)
        # Some families do not count a pad's position in a whole text, or hide it, but not in plain decoding.
        spread = distinct_ids(count, turn, length + _BESIDE + rows + 4)
        ids = iter([(token + 1) % count if token == pad else token for token in spread])
        sizes = min(length, room), min(_BESIDE, room), rows, 2, 1, 1
        first, second, tree, beside, (last,), (other,) = (list(islice(ids, size)) for size in sizes)
        return cls(shape, (first, second), tree, beside, last, other)

    def open(self, target: TargetModel, sources: Sequence[Source | None]) -> tuple[Cache, list[Slot]]:
        """A cache with both prompts."""
        cache, slots = target.new_cache(slots=2, length=64), []
        for prompt, source in zip(self.prompts, sources, strict=True):
            slots.append(slot := target.open(cache, source))
            target.forward(cache, {slot: Rows(prompt)}, logits_from=None)
            cache.keep({slot: range(len(prompt))})
        return cache, slots

    def feeds(self, slots: Sequence[Slot]) -> dict[Slot, Rows]:
        return {slots[0]: Rows(self.tree, self.shape.parents), slots[1]: Rows(self.beside)}

    def paths(self) -> list[tuple[int, Sequence[int], list[int]]]:
        """Place of a prompt, rows of its forward, and the text that ends with these rows' tokens."""
        first = [(0, nodes, self.until(nodes)) for nodes in self.shape.paths]
        return [*first, (1, range(2), [*self.prompts[1], *self.beside])]

    def until(self, nodes: Sequence[int]) -> list[int]:
        """The first prompt and these nodes of the tree after it."""
        return [*self.prompts[0], *(self.tree[node] for node in nodes)]


# -- does a tree equal its paths? --------------------------------------------------------------------------


def _test_tree(target: TargetModel, stock: Stock) -> None:
    """Compare a tree with stock forwards of its paths, with random weights.

    In float32; where that fails in float64 too, since settings may let a processor round float32's products.
    """
    try:
        _test_tame(target, stock, torch.float32)
    except UnsupportedModel as error:
        if target.device.type == "mps":
            raise
        try:
            ran = _test_tame(target, stock, torch.float64)
        except UnsupportedModel:
            ran = False
        if not ran:
            raise error


def _test_tame(target: TargetModel, stock: Stock, dtype: torch.dtype) -> bool:
    """Compare a tree with its paths in a copy of this dtype; returns False if stock's forward fails there."""
    model = tame(target.model, dtype)
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
    texts = _Texts.of(other, stock.embedded, _PAST_WINDOW)
    cache, slots = texts.open(other, sources)
    found = _checked_subtree(other, cache, slots, texts)
    for place, rows, whole in texts.paths():
        _same_path(stock, model, sources[place], whole, found[place][list(rows)])
    cache.keep({slots[0]: texts.shape.kept, slots[1]: range(2)})
    # A plain step: some decoders leave out the mask of a single row, which texts of different lengths need.
    after = other.forward(cache, {slot: Rows([texts.last]) for slot in slots})
    for place, before in enumerate((texts.until(texts.shape.kept), texts.paths()[-1][2])):
        _same_path(stock, model, sources[place], [*before, texts.last], after.logits_of(slots[place]))
    pad = getattr(model.config, "pad_token_id", None)
    if other.chains_only and pad is not None and 0 <= pad < stock.embedded:
        # The copy has no embedding of a pad with a large id.
        own, given = (other, sources) if pad < ROWS else (target, stock.sources)
        _check_pad(own, given[0], texts.tree, pad)
    return True


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
        output = target.forward(cache, {slot: Rows(text[start : start + width])})
        cache.keep({slot: range(width)})
        start += width
    return output.logits_of(slot)[-1:].double()


def _checked_subtree(target: TargetModel, cache: Cache, slots: Sequence[Slot], texts: _Texts) -> list[Tensor]:
    """The logits of a tree and of the rows beside it, if rows do not depend on tokens outside their path.

    For one token and another in its place: two forwards of one shape agree elsewhere to the last bit (nearly,
    in a mixture of experts).
    """
    changed = [*texts.tree[:_CHANGED], texts.other, *texts.tree[_CHANGED + 1 :]]
    shape = texts.shape
    others = target.forward(cache, texts.feeds(slots) | {slots[0]: Rows(changed, shape.parents)})
    before = others.logits_of(slots[0]).clone()
    output = target.forward(cache, texts.feeds(slots))
    rows = output.logits_of(slots[0])
    leak = difference(rows[shape.blind].double(), before[shape.blind].double())
    effect = difference(rows[[shape.sees]].double(), before[[shape.sees]].double())
    if not leak <= effect / 4:
        why = "its attention is not causal" if target.chains_only else "it honours no 4-D mask"
        raise UnsupportedModel(
            f"{family(target.model)} lets rows of a {shape.name} see more than their ancestors: {why} "
            f"(a token changes logits below it by {effect:.2g} of their spread, others by {leak:.2g})"
        )
    return [output.logits_of(slot).clone() for slot in slots]


def _same_path(stock: Stock, model: Any, source: Source | None, text: list[int], found: Tensor) -> None:
    """Compare the logits of the last rows of a text with a stock forward of a copy with random weights."""
    ids = torch.tensor([text], device=found.device)
    expected = stock.run(model, source, ids).logits[0]
    off = difference(expected[-len(found) :].double(), found.double())
    if not off <= (limit := largest_difference(found.dtype, 0.0)):
        other = stock.target(model)
        what = "a tree of tokens than for its paths"
        if other.chains_only:
            what = "a chain of tokens after those in a cache than for the whole text"
        raise UnsupportedModel(
            f"{family(model)} gives other logits for {what}: "
            f"{_cause(other, source, text, expected, limit)} (with random weights in "
            f"{_name(found.dtype)} they are off by {off:.2g} of their spread, of which rounding explains "
            f"{limit:.1g})"
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
        found.append(target.forward(cache, {slot: Rows(text[start:stop])}).logits_of(slot).clone())
        cache.keep({slot: range(stop - start)})
    rows = zip(torch.cat(found).double(), expected.double(), strict=True)
    wrong = [row for row, pair in enumerate(rows) if not difference(pair[1][None], pair[0][None]) <= limit]
    if not wrong:
        return (
            "sequences side by side differ"
            if target.chains_only
            else "it does not honour a 4-D mask or positions"
        )
    window = getattr(target.model.config.get_text_config(decoder=True), "sliding_window", None)
    if window and wrong[0] >= window - 1:
        return f"its sliding window is not the {window} tokens of its config"
    return "steps with a cache and a mask, of a chain too, compute something else than one forward does"


def _converted(sources: Sequence[Source | None], dtype: torch.dtype) -> list[Source | None]:
    return [None if one is None else replace(one, states=one.states.to(dtype)) for one in sources]


# -- does the target compute the model? --------------------------------------------------------------------


@dataclass(frozen=True)
class _Fed:
    """A text's rows in a target: inputs of the layers, each [n, hidden size], and logits [n, vocabulary]."""

    place: int
    text: list[int]
    states: list[Tensor]
    logits: Tensor


def _test_weights(target: TargetModel, stock: Stock, turn: int) -> None:
    """Compare plain steps and a tree, with the model's own weights, with the stock model's layers."""
    texts = _Texts.of(target, stock.embedded, _SHORT, turn)
    try:
        _compare(target, stock, texts)
    except UnsupportedModel as error:
        ids = torch.tensor([texts.prompts[0]], device=target.device)
        if bool(stock.run(stock.model, stock.sources[0], ids).logits.isfinite().all()):
            raise
        raise UnsupportedModel(
            f"{family(target.model)} overflows in {_name(target.dtype)}: its own logits are not finite"
        ) from error


def _compare(target: TargetModel, stock: Stock, texts: _Texts) -> None:
    cache, slots = texts.open(target, stock.sources)
    _checked_subtree(target, cache, slots, texts)
    wide = wider(target.dtype, target.device)
    known = wide is not None and not any("forward" in vars(module) for module in stock.model.modules())
    layers = layers_of(stock.model) if known else []
    with hooks_restored(*stock.parts):
        traces = _traces(target, stock, texts, range(len(layers)))
    found = []
    if layers:
        try:
            found = [_replayed(stock, layers, traces, dtype) for dtype in (None, wide)]
        except Exception as error:  # as of quantised modules, which cannot be copied to another dtype
            if out_of_memory(error):
                raise
            _log.debug("%s cannot be replayed in %s", family(target.model), wide, exc_info=True)
    if not found:
        return _compare_logits(target, stock, traces)
    worst = _worst(traces, *found)
    if worst.refused and not _tells_inputs(stock, layers):
        return _compare_logits(target, stock, traces)
    if worst.refused:
        raise Imprecise(f"{family(target.model)} {worst}")


def _test_kernels(target: TargetModel, stock: Stock, turn: int) -> None:
    """Compare modules in place of the model's own with these, with random weights in the target's dtype.

    Two layers of the copy, in which rounding hides less of a mistake than it may with the model's weights.
    """
    if stock.same is None:
        return
    try:
        model = keep_layers(tame(target.model, target.dtype, gain=1.0), range(min(2, target.layers)))
    except UnsupportedModel:  # no plain stack of layers
        return
    other: Any = stock.same(model)
    _test_weights(other, other.reference(), turn)


def _traces(target: TargetModel, stock: Stock, texts: _Texts, layers: Sequence[int]) -> list[_Fed]:
    """The rows of all paths of a tree, in plain steps and in the tree itself."""
    cache, slots = target.new_cache(slots=2, length=64), []
    read = []
    for prompt, source in zip(texts.prompts, stock.sources, strict=True):
        slots.append(slot := target.open(cache, source))
        output = target.forward(cache, {slot: Rows(prompt)}, hidden_layers=layers)
        read.append(_rows(output, slot, range(len(prompt)), layers))
        cache.keep({slot: range(len(prompt))})
    traces = []
    for place, nodes, text in texts.paths():
        slot, start = slots[place], len(texts.prompts[place])
        cache.truncate(slot, start)
        parts = [read[place]]
        for count in range(1, len(nodes) + 1):
            output = target.forward(cache, {slot: Rows([text[start + count - 1]])}, hidden_layers=layers)
            cache.keep({slot: range(1)})
            parts.append(_rows(output, slot, [0], layers))
        traces.append(_joined(place, text, parts))
    for place, slot in enumerate(slots):
        cache.truncate(slot, len(texts.prompts[place]))
    output = target.forward(cache, texts.feeds(slots), hidden_layers=layers)
    for place, nodes, text in texts.paths():
        traces.append(_joined(place, text, [read[place], _rows(output, slots[place], nodes, layers)]))
    return traces


def _rows(output: Output, slot: Slot, rows: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
    """Copies of a slot's rows: inputs of the layers, then logits."""
    at = list(rows)
    hidden = output.hidden.get(slot, {})
    return [*(hidden[layer][at].clone() for layer in layers), output.logits_of(slot)[at].clone()]


def _joined(place: int, text: list[int], parts: Sequence[Sequence[Tensor]]) -> _Fed:
    *states, logits = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return _Fed(place, text, states, logits)


def _replayed(
    stock: Stock, layers: Sequence[nn.Module], traces: Sequence[_Fed], dtype: torch.dtype | None
) -> list[list[Tensor]]:
    """For each layer and the head: what the stock model gives them, for each trace, [n, size].

    Args:
        dtype: of the modules' copies; None for their own.
    """
    replay = Replay(stock.model, layers, dtype) if layers else None
    found: dict[int, list[Tensor]] = {}
    for place in sorted({trace.place for trace in traces}):
        own = [at for at, trace in enumerate(traces) if trace.place == place]
        longest = max(len(traces[at].text) for at in own)
        device = traces[0].logits.device
        ids = torch.tensor(
            [traces[at].text + [0] * (longest - len(traces[at].text)) for at in own], device=device
        )
        given = [
            torch.stack([_filled(traces[at].states[layer], longest) for at in own])
            for layer in range(len(layers))
        ]

        def run(model: Any, place: int = place, ids: Tensor = ids) -> Tensor:
            logits: Tensor = stock.run(model, stock.sources[place], ids).logits
            return logits

        results = [run(stock.model)] if replay is None else replay(run, given)
        for row, at in enumerate(own):
            found[at] = [result[row, : len(traces[at].text)] for result in results]
    return [list(rows) for rows in zip(*(found[at] for at in range(len(traces))), strict=True)]


def _filled(rows: Tensor, count: int) -> Tensor:
    """Rows followed by copies of the last one, which no earlier row attends to."""
    return torch.cat([rows, rows[-1:].expand(count - len(rows), -1)])


@dataclass(frozen=True)
class _Worst:
    """The largest error of a layer's result.

    Attributes:
        layer: the layer, or the number of layers for the logits.
        error, own: the target's error and that of the stock layer's rounding, as a share of the result.
        refused: it is more than rounding explains.
    """

    layer: int
    error: float
    own: float
    refused: bool
    what: str = ""

    def __str__(self) -> str:
        return (
            f"does not compute its own {self.what}: they are off by {self.error:.2g} of their size, where "
            f"rounding in the stock model explains {self.own:.2g}"
        )


def _worst(
    traces: Sequence[_Fed], narrow: Sequence[Sequence[Tensor]], wide: Sequence[Sequence[Tensor]]
) -> _Worst:
    """The largest error of a target's layers against the stock ones' in a wider dtype.

    Args:
        narrow, wide: what the stock model gives each layer and the head, in the two dtypes.
    """
    dtype = traces[0].logits.dtype
    least = torch.finfo(dtype).eps / 4  # about the error of rounding a result once
    worst = _Worst(0, 0.0, 0.0, False)
    most = 0.0
    for layer, (stocks, exacts) in enumerate(zip(narrow, wide, strict=True)):
        errors, own = [], []
        for trace, stock, exact in zip(traces, stocks, exacts, strict=True):
            right = exact.to(dtype).double()
            size = _size(right).clamp(min=1e-30)
            given = trace.states[layer] if layer < len(trace.states) else trace.logits
            errors.append(_size(given.double() - right) / size)
            own.append(_size(stock.double() - right) / size)
        error, rounding = torch.cat(errors), torch.cat(own).clamp(min=least)
        middle = float(rounding.median())
        row = int((error / rounding.clamp(min=middle)).nan_to_num(torch.inf).argmax())
        for off, explained, times in (
            (float(error.median()), middle, _MEDIAN),
            (float(error[row]), max(float(rounding[row]), middle), _ROW),
        ):
            share = off / (explained * times)
            if not share <= most:
                what = (
                    "logits"
                    if layer == len(narrow) - 1
                    else "embeddings"
                    if not layer
                    else f"layer {layer - 1}"
                )
                most = share
                worst = _Worst(layer, off, explained, not share <= 1, what)
    return worst


def _size(rows: Tensor) -> Tensor:
    """Root mean square of each row."""
    return rows.square().mean(dim=-1).sqrt()


def _tells_inputs(stock: Stock, layers: Sequence[nn.Module]) -> bool:
    """True if a model's hidden states are the inputs of its layers."""
    given: list[Tensor] = []
    ours = threading.get_ident()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == ours:
            given.append(args[0] if args else kwargs["hidden_states"])

    with hooks_restored(stock.model):
        for layer in layers:
            layer.register_forward_pre_hook(note, with_kwargs=True)
        ids = torch.tensor([[0, 1]], device=stock.model.device)
        output = stock.run(stock.model, stock.sources[0], ids, output_hidden_states=True)
    states = getattr(output, "decoder_hidden_states", None) or output.hidden_states
    return len(given) == len(layers) and all(map(torch.equal, given, states))


def _compare_logits(target: TargetModel, stock: Stock, traces: Sequence[_Fed]) -> None:
    """Compare logits of plain steps and a tree with stock's, by what rounded embeddings change in those."""
    half = len(traces) // 2
    pairs = zip(traces[:half], traces[half:], strict=True)
    spread = max(difference(step.logits.double(), tree.logits.double()) for step, tree in pairs)
    full = target.dtype not in (torch.float16, torch.bfloat16)
    if full and _quantised(stock.model) and not spread <= largest_difference(target.dtype, 0.0):
        raise UnsupportedModel(
            f"{family(target.model)} gives other logits for a tree of tokens than for its paths: rounding "
            f"moves its quantised activations to other values (off by {spread:.2g} of the logits' spread)"
        )
    (expected,) = _replayed(stock, [], traces, None)
    with shaken(stock.model):
        (others,) = _replayed(stock, [], traces, None)
    off, apart = (
        max(difference(own.double(), other.double()) for own, other in zip(expected, rows, strict=True))
        for rows in ([trace.logits for trace in traces], others)
    )
    if not off <= (limit := largest_difference(target.dtype, apart)):
        raise Imprecise(
            f"{family(target.model)} gives other logits than its own stock forward: off by {off:.2g} of "
            f"their spread, of which rounding explains {limit:.2g}"
        )


def _quantised(model: Any) -> bool:
    """True if some weights of a model are not plain tensors."""
    return any(type(weight) not in (Tensor, nn.Parameter) for weight in model.parameters())


# -- differences of logits ---------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
