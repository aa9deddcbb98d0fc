"""Test of layers: whether a target computes its model.

Each of its layers is compared with the stock layer, given the very inputs that it had in the target
(``replay.py``), in plain steps and in a tree. The error of the stock layer, against the same layer in a wider
dtype, is what rounding explains there; the target's may be a few times that. So rounding that grows over
layers, to whatever size, does not count, and a wrong scale does. Modules in place of the model's own are
compared once more with random weights, since some weights let rounding hide a mistake. A model whose layers
cannot be told apart, or do not run in a wider dtype, is compared by its logits, against what they change if
its embeddings change by a unit in the last place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.cache import Slot
from outpace.core import Source, UnsupportedModel, out_of_memory
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.cpu.linear import Linear
from outpace.targets.inputs.config import family, several_states
from outpace.targets.inputs.forward import device_of
from outpace.targets.inputs.mapped import FileMemory
from outpace.targets.inputs.surgery import keep_layers
from outpace.targets.rows import Output
from outpace.targets.step.agreement import difference, hooks_restored, largest_difference, shaken
from outpace.targets.step.reference import SHORT, Imprecise, StockModel, TrialTexts, dtype_name
from outpace.targets.step.replay import Replay, layers_of, shown, wider
from outpace.targets.step.tame import tame
from outpace.targets.step.tree_test import checked_subtree
from outpace.transfer import widened

_log = logging.getLogger(__name__)

# Times the stock layer's own error that a layer's may be: the median over rows, and each row's. In half
# dtypes either rounds a result once: over 20 families and norms of scale 0.25 to 8, targets reach 1.25 and
# 11; with a scale of attention that is off by a tenth the median is 5 and more. In others the error is that
# of the order of sums, which differs among kernels and grows with the width; that mistake is thousands of it.
_HALF = 2.0, 32.0
_FULL = 16.0, 256.0
# Share of what a layer adds that rounding may change, and where weights, and with them rows, have few bits.
_ADDED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_ROUNDED = 0.5


@dataclass(frozen=True)
class _Fed:
    """A text's rows in a target: inputs of the layers, each [n, hidden size], and logits [n, vocabulary]."""

    prompt: int
    text: list[int]
    states: list[Tensor]
    logits: Tensor


def compare_layers(target: TargetModel, stock: StockModel, turn: int) -> None:
    """Compare plain steps and a tree, with the model's own weights, with the stock model's layers."""
    texts = TrialTexts.for_target(target, stock.embedded, SHORT, turn)
    try:
        _compare(target, stock, texts)
    except UnsupportedModel as error:
        ids = torch.tensor([texts.prompts[0]], device=target.device)
        if bool(stock.run(stock.model, stock.sources[0], ids).logits.isfinite().all()):
            raise
        raise UnsupportedModel(
            f"{family(target.model)} overflows in {dtype_name(target.dtype)}: its own logits are not finite"
        ) from error


def _compare(target: TargetModel, stock: StockModel, texts: TrialTexts) -> None:
    cache, slots = texts.open(target, stock.sources)
    checked_subtree(target, cache, slots, texts)
    wide = wider(target.dtype, target.device)
    hooked = any("forward" in vars(module) for module in stock.model.modules())
    known = wide is not None and not hooked and not several_states(stock.model)
    layers = layers_of(stock.model) if known else []
    with hooks_restored(*stock.parts):
        traces = _traces(target, stock, texts, range(len(layers)))
    found = []
    if layers:
        try:
            found = [_replayed(stock, layers, traces, shown(stock.model), dtype) for dtype in (None, wide)]
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


def compare_replaced(target: TargetModel, stock: StockModel, turn: int) -> None:
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
    compare_layers(other, other.reference(), turn)


@torch.inference_mode()
def compare_all(target: TargetModel, stock: StockModel) -> None:
    """Compare what each layer adds to its inputs, in one forward of a text, with what the stock layer adds.

    For the layers that ``compare_layers`` was not given: one that has another's weights, norm, bias or
    rotation is seen here. What is as small as rounding is not.

    Raises:
        Imprecise: a layer adds something else.
    """
    texts = TrialTexts.for_target(target, stock.embedded, SHORT)
    text, layers = [*texts.prompts[0], *texts.tree], layers_of(stock.model)
    with hooks_restored(*stock.parts):
        cache = target.new_cache(slots=1, length=64)
        slot = target.open(cache, None)
        output = target.forward(cache, Batch.of({slot: text}), range(len(layers)))
        *states, logits = _rows(output, slot, range(len(text)), range(len(layers)))
    files, every = FileMemory(), range(len(layers))
    fed = _Fed(0, text, states, logits)
    expected = _replayed(stock, layers, [fed], every, after=lambda layer: files.drop(layer.parameters()))
    share, eps = _ADDED[target.dtype], torch.finfo(target.dtype).eps
    if target.quantised:
        share = _ROUNDED
    for layer, (given, found, (stocks,)) in enumerate(zip(states, states[1:], expected[1:], strict=False)):
        right = widened(stocks)
        added = _size(right - widened(given)) + eps / share * _size(right)
        off = float((_size(widened(found) - right) / added).median())
        if not off <= share:
            raise Imprecise(
                f"{family(target.model)} does not compute its own layer {layer}: what it adds is off by "
                f"{off:.2g} of its size, where rounding explains {share:.2g}"
            )


def _traces(target: TargetModel, stock: StockModel, texts: TrialTexts, layers: Sequence[int]) -> list[_Fed]:
    """The rows of all paths of a tree, in plain steps and in the tree itself."""
    cache, slots = target.new_cache(slots=2, length=64), []
    read = []
    for text, source in zip(texts.prompts, stock.sources, strict=True):
        slots.append(slot := target.open(cache, source))
        output = target.forward(cache, Batch.of({slot: text}), layers)
        read.append(_rows(output, slot, range(len(text)), layers))
        cache.keep({slot: range(len(text))})
    traces = []
    for prompt, nodes, text in texts.paths():
        slot, parts = slots[prompt], [read[prompt]]
        with cache.provisional():
            for token in text[len(texts.prompts[prompt]) :][: len(nodes)]:
                output = target.forward(cache, Batch.of({slot: [token]}), layers)
                cache.keep({slot: range(1)})
                parts.append(_rows(output, slot, [0], layers))
        traces.append(_joined(prompt, text, parts))
    output = target.forward(cache, Batch.of(texts.feeds(slots)), layers)
    for prompt, nodes, text in texts.paths():
        traces.append(_joined(prompt, text, [read[prompt], _rows(output, slots[prompt], nodes, layers)]))
    return traces


def _rows(output: Output, slot: Slot, rows: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
    """Copies of a slot's rows: inputs of the layers, then logits."""
    at = list(rows)
    hidden = output.hidden.get(slot, {})
    return [*(hidden[layer][at].clone() for layer in layers), output.logits_of(slot)[at].clone()]


def _joined(prompt: int, text: list[int], parts: Sequence[Sequence[Tensor]]) -> _Fed:
    *states, logits = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return _Fed(prompt, text, states, logits)


def _replayed(
    stock: StockModel,
    layers: Sequence[nn.Module],
    traces: Sequence[_Fed],
    numbers: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    after: Callable[[nn.Module], None] | None = None,
) -> list[list[Tensor]]:
    """For each layer and the head: what the stock model gives them, for each trace, [n, size].

    Args:
        numbers: of the layers that run.
        dtype: of the modules' copies; None for their own.
        after: called with each layer that ran.
    """
    replay = Replay(stock.model, layers, dtype, numbers, after) if layers else None
    found: dict[int, list[Tensor]] = {}
    places = [next(at for at, one in enumerate(stock.sources) if one is source) for source in stock.sources]
    for place in sorted(set(places)):  # texts of one source in one forward
        numbers = [number for number, trace in enumerate(traces) if places[trace.prompt] == place]
        texts = [traces[number].text for number in numbers]
        longest = max(map(len, texts))
        device = device_of(stock.model.get_input_embeddings())  # logits may be elsewhere
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        inputs = [
            torch.stack([_filled(traces[number].states[layer], longest) for number in numbers])
            for layer in range(len(layers))
        ]

        def run(model: Any, source: Source | None = stock.sources[place], ids: Tensor = ids) -> Tensor:
            logits: Tensor = stock.run(model, source, ids).logits
            return logits

        results = [run(stock.model)] if replay is None else replay(run, inputs)
        for row, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            found[number] = [result[row, : len(text)] for result in results]
    return [list(rows) for rows in zip(*(found[number] for number in range(len(traces))), strict=True)]


def _filled(rows: Tensor, count: int) -> Tensor:
    """Rows followed by copies of the last one, which no earlier row attends to."""
    return torch.cat([rows, rows[-1:].expand(count - len(rows), -1)])


@dataclass(frozen=True)
class _Worst:
    """The largest error of a layer's result.

    Attributes:
        layer: the layer, or the number of layers for the logits.
        error, stock: the target's error and that of the stock layer's rounding, as a share of the result.
        refused: it is more than rounding explains.
    """

    layer: int
    error: float
    stock: float
    refused: bool
    what: str = ""

    def __str__(self) -> str:
        return (
            f"does not compute its own {self.what}: they are off by {self.error:.2g} of their size, where "
            f"rounding in the stock model explains {self.stock:.2g}"
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
    of_median, of_row = _HALF if dtype in (torch.float16, torch.bfloat16) else _FULL
    worst = _Worst(0, 0.0, 0.0, False)
    most = 0.0
    for layer, (stocks, exacts) in enumerate(zip(narrow, wide, strict=True)):
        errors, stock_errors = [], []
        for trace, stock, exact in zip(traces, stocks, exacts, strict=True):
            right = widened(exact.to(dtype))
            size = _size(right).clamp(min=1e-30)
            rows = trace.states[layer] if layer < len(trace.states) else trace.logits
            errors.append(_size(widened(rows) - right) / size)
            stock_errors.append(_size(widened(stock) - right) / size)
        error, rounding = torch.cat(errors), torch.cat(stock_errors).clamp(min=least)
        middle = float(rounding.median())
        row = int((error / rounding.clamp(min=middle)).nan_to_num(torch.inf).argmax())
        for off, explained, times in (
            (float(error.median()), middle, of_median),
            (float(error[row]), max(float(rounding[row]), middle), of_row),
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


def _tells_inputs(stock: StockModel, layers: Sequence[nn.Module]) -> bool:
    """True if a model's hidden states are the inputs of its layers."""
    inputs: list[Tensor] = []
    ours = threading.get_ident()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == ours:
            inputs.append(args[0] if args else kwargs["hidden_states"])

    with hooks_restored(stock.model):
        for layer in layers:
            layer.register_forward_pre_hook(note, with_kwargs=True)
        ids = torch.tensor([[0, 1]], device=stock.model.device)
        output = stock.run(stock.model, stock.sources[0], ids, output_hidden_states=True)
    states = getattr(output, "decoder_hidden_states", None) or output.hidden_states
    return len(inputs) == len(layers) and all(map(torch.equal, inputs, states))


def _compare_logits(target: TargetModel, stock: StockModel, traces: Sequence[_Fed]) -> None:
    """Compare logits of plain steps and a tree with stock's, by what rounded embeddings change in those."""
    half = len(traces) // 2
    pairs = zip(traces[:half], traces[half:], strict=True)
    spread = max(difference(widened(step.logits), widened(tree.logits)) for step, tree in pairs)
    full = target.dtype not in (torch.float16, torch.bfloat16)
    if full and _quantised(stock.model) and not spread <= largest_difference(target.dtype, 0.0):
        raise UnsupportedModel(
            f"{family(target.model)} gives other logits for a tree of tokens than for its paths: rounding "
            f"moves its quantised activations to other values (off by {spread:.2g} of the logits' spread)"
        )
    (expected,) = _replayed(stock, [], traces)
    with shaken(stock.model):
        (others,) = _replayed(stock, [], traces)
    off, apart = (
        max(difference(widened(row), widened(other)) for row, other in zip(expected, rows, strict=True))
        for rows in ([trace.logits for trace in traces], others)
    )
    # A difference of the last bit may round a row's number to another one of 8 bits.
    coarse = any(isinstance(module, Linear) and module.kernel.rounds for module in stock.model.modules())
    if not off <= (limit := largest_difference(torch.bfloat16 if coarse else target.dtype, apart)):
        raise Imprecise(
            f"{family(target.model)} gives other logits than its own stock forward: off by {off:.2g} of "
            f"their spread, of which rounding explains {limit:.2g}"
        )


def _quantised(model: Any) -> bool:
    """True if some weights of a model are not plain tensors."""
    return any(type(weight) not in (Tensor, nn.Parameter) for weight in model.parameters())
