"""Test of a target's bits: whether the logits of a row depend on the rows it is fed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch, Building
from outpace.targets.cpu.trials import using_threads
from outpace.targets.rows import Rows

# For the bit test: rows of a text fed as a prompt, rows after them, and a tree with these as a path.
_PROMPT, _AFTER = 29, 6
_TREE = (-1, 0, 0, 1, 1, 2, 4, 4, 6, 5, 8, 8, 9)
_PATH = (0, 1, 4, 6, 8, 11)

# Operation -> place of a row in the text -> (input, output).
_Trace = dict[str, dict[int, tuple[Tensor, Tensor]]]


def distinct_ids(vocabulary: int, turn: int, count: int) -> list[int]:
    """Token ids for a test, distinct if the vocabulary allows (equal ones only weaken the test)."""
    start = round(0.618 * vocabulary)
    stride = next(n for n in range(start, start + vocabulary + 1) if math.gcd(n, vocabulary) == 1)
    return [(1 + turn + i * stride) % vocabulary for i in range(count)]


@torch.inference_mode()
def why_bits_differ(target: TargetModel, step: nn.Module, vocabulary: int) -> str | None:
    """Compare the bits of a text's logits between plain decoding and other shapes of forwards.

    The other shapes: a tree beside another sequence, after a prompt in chunks; chains of 2 and 4 rows; the
    whole text in one forward; on a CPU the tree with one and with three threads.

    Args:
        step: the module that the target's forward runs.
        vocabulary: number of token ids that have an embedding.

    Returns:
        The operation whose output bits for a row depend on other rows; None if all bits are equal.
    """
    room = _room(target)
    if room < 2:
        return f"its context of {target.context} tokens is too short for a test"
    text = _text(min(target.vocabulary, vocabulary), room)
    plain, *others = [shape(target, text, room) for shape in _SHAPES]
    for shape, logits in zip(_SHAPES[1:], others, strict=True):
        if not torch.equal(logits, plain):
            traces = []
            for forward in (_plainly, shape):
                with _traced(step) as trace:
                    forward(target, text, room, trace)
                traces.append(trace.rows)
            return _culprit(*traces)
    current = torch.get_num_threads()
    for threads in (1, 3) if target.device.type == "cpu" else ():
        with using_threads(threads):
            if not torch.equal(_as_tree(target, text, room), plain):
                return f"its rows have other bits with {threads} threads than with {current}"
    return None


def _room(target: TargetModel) -> int:
    """Number of the prompt's rows in the bit test."""
    rows = _PROMPT + (target.prompt_step if target.prompts_differ else 0)
    return rows if target.context is None else min(rows, target.context - _AFTER - 2)


def _cut(target: TargetModel, rows: int) -> int:
    """Number of rows at which a prompt can be cut: about this, so that its rows keep their bits."""
    step = target.prompt_step if target.prompts_differ else 1
    return max(rows // step * step, step)


def _text(vocabulary: int, room: int) -> list[int]:
    ids = distinct_ids(vocabulary, 0, 19)
    return [ids[number * number % len(ids)] for number in range(room + _AFTER)]


def _plainly(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    """Logits of the rows after the prompt, [_AFTER, vocabulary], with one row per forward."""
    return _fed(target, text, prompt, [prompt, *[1] * _AFTER], trace)


def _in_chains(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    cut = _cut(target, prompt // 2)
    return _fed(target, text, prompt, [cut, prompt - cut, 2, 4], trace)


def _at_once(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    return _fed(target, text, prompt, [len(text)], trace)


def _fed(
    target: TargetModel, text: list[int], prompt: int, widths: list[int], trace: _Tracer | None
) -> Tensor:
    cache = target.new_cache(slots=1, length=64)
    slot, start, logits = cache.allocate(), 0, []
    for width in widths:
        if trace is not None:
            trace.expect(0, 1, width, {row: start + row for row in range(width)})
        building = Building()
        building.add(slot, Rows(text[start : start + width]), prompt=max(min(prompt - start, width), 0))
        output = target.forward(cache, building.made())
        logits.append(output.logits_of(slot).clone())
        cache.keep({slot: range(width)})
        start += width
    return torch.cat(logits)[-_AFTER:]


def _as_tree(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    cache = target.new_cache(slots=2, length=64)
    slots = [cache.allocate(), cache.allocate()]
    start = 0
    cut = _cut(target, prompt // 3)
    for width in (cut, prompt - cut):
        if trace is not None:
            trace.expect(0, 2, width, {row: start + row for row in range(width)})
        feeds = {slots[0]: Rows(text[start : start + width]), slots[1]: Rows(text[: width // 2])}
        target.forward(cache, Batch.of(feeds, None))
        cache.keep({slots[0]: range(width), slots[1]: range(width // 2)})
        start += width
    tokens = [text[node] for node in range(len(_TREE))]
    for number, node in enumerate(_PATH):
        tokens[node] = text[prompt + number]
    if trace is not None:
        trace.expect(0, 2, len(_TREE), {node: prompt + number for number, node in enumerate(_PATH)})
    feeds = {slots[0]: Rows(tokens, _TREE), slots[1]: Rows(text[:3])}
    return target.forward(cache, Batch.of(feeds)).logits_of(slots[0])[list(_PATH)].clone()


_SHAPES = (_plainly, _as_tree, _in_chains, _at_once)


class _Tracer:
    """Recorder of the inputs and outputs of the innermost modules, row by row."""

    def __init__(self) -> None:
        self.rows: _Trace = {}

    def expect(self, index: int, batch: int, width: int, positions: dict[int, int]) -> None:
        """State where the next forward's rows are: row of the sequence ``index`` -> position in the text."""
        self._index, self._batch, self._width, self._positions = index, batch, width, positions

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            for row, position in self._positions.items():
                pair = [self._row(value, row) for value in (args[0] if args else None, output)]
                if all(value is not None for value in pair):
                    self.rows.setdefault(name, {})[position] = (pair[0], pair[1])

        return record

    def _row(self, value: Any, row: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return None
        if value.dim() > 2 and value.shape[0] == self._batch and value.shape[1] >= self._width:
            return value[self._index, row].clone()
        if value.dim() == 2 and value.shape[0] >= self._batch * self._width and self._batch == 1:
            return value[row].clone()
        return None


@contextmanager
def _traced(step: nn.Module) -> Iterator[_Tracer]:
    tracer = _Tracer()
    leaves = [(name, module) for name, module in step.named_modules() if not list(module.children())]
    hooks = [
        module.register_forward_hook(tracer.hook(f"{name} ({type(module).__name__})"))
        for name, module in leaves
    ]
    try:
        yield tracer
    finally:
        for hook in hooks:
            hook.remove()


def _culprit(plain: _Trace, other: _Trace) -> str:
    """The first operation, in the order of the forward, that differs in any row."""
    for name, rows in plain.items():
        both = [(pair, other[name][at]) for at, pair in rows.items() if at in other.get(name, {})]
        if any(not torch.equal(first[0], second[0]) for first, second in both):
            return f"the inputs of {name} differ: attention, rotary or another function outside modules"
        if any(not torch.equal(first[1], second[1]) for first, second in both):
            return f"{name} gives a row other bits among other rows"
    return "the head, or a function after it, gives a row other bits among other rows"
