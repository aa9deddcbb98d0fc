"""Self-tests of a model as a target: its logits for a tree of tokens, and their bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.core import Source, UnsupportedModel
from outpace.targets.base import Rows, TargetModel
from outpace.targets.checks import family
from outpace.targets.kernels import using_threads

# The logits [n, vocabulary] of a text decoded from a source, by a plain forward without outpace's parts.
Plain = Callable[[Source | None, list[int]], Tensor]

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


@torch.inference_mode()
def self_test(
    target: TargetModel,
    model: PreTrainedModel,
    vocabulary: int,
    plain: Plain,
    sources: tuple[Source | None, Source | None] = (None, None),
) -> None:
    """Decode a tree beside a second sequence, keep a path, feed one more row; compare with plain forwards.

    For a target of chains only the tree is a chain.

    Two things must hold. A token does not affect rows outside its subtree: two forwards of one shape agree
    there to the last bit (nearly, in a mixture of experts). And a tree's rows have the logits of their paths,
    up to rounding: this detects ignored positions, and models whose rows attend to later ones.

    Args:
        vocabulary: number of token ids that have an embedding.
        plain: decodes a text without a target.
        sources: the two sequences' sources, if the model has an encoder.

    Raises:
        UnsupportedModel: some logits differ by more than rounding.
    """
    # In half precision, rounding may route a row of a mixture to other experts, which changes all its logits.
    # This is chance, so other tokens are tried; an unsupported family fails with any tokens.
    tries = 3 if model.dtype in (torch.float16, torch.bfloat16) else 1
    for turn in range(tries):
        pad, count = getattr(model.config, "pad_token_id", None), min(target.vocabulary, vocabulary)
        # Some families do not count a pad's position in a whole text, or hide it, but not in plain decoding.
        ids = [(token + 1) % count if token == pad else token for token in _spread(count, turn)]
        try:
            return _test_tree(target, model, ids, plain, sources)
        except UnsupportedModel:
            if turn == tries - 1:
                raise
        except Exception as error:
            shape = "chain" if target.chains_only else "tree"
            raise UnsupportedModel(f"{family(model)} fails on a {shape} of tokens: {error!r}") from error


def _test_tree(
    target: TargetModel,
    model: PreTrainedModel,
    ids: list[int],
    plain: Plain,
    sources: tuple[Source | None, Source | None],
) -> None:
    room = 9 if target.context is None else target.context - 5
    if room < 1:
        raise UnsupportedModel(f"{family(model)} has a context of only {target.context} tokens")
    prompts = [ids[: min(5, room)], ids[5 : 5 + min(3, room)]]
    tree, beside, last = ids[8:15], ids[15:17], ids[17]
    shape = _CHAIN_OF_SEVEN if target.chains_only else _TREE_OF_SEVEN
    cache = target.new_cache(slots=2, length=64)
    slots = []
    for prompt, source in zip(prompts, sources, strict=True):
        slots.append(slot := target.open(cache, source))
        target.forward(cache, {slot: Rows(prompt)}, logits_from=None)
        cache.keep({slot: range(len(prompt))})

    def rows(tokens: list[int]) -> list[Tensor]:
        output = target.forward(cache, {slots[0]: Rows(tokens, shape.parents), slots[1]: Rows(beside)})
        return [output.logits_of(slot).double() for slot in slots]

    def alone(place: int, prefix: list[int], path: list[int]) -> Tensor:
        """The logits after each token of a path, from plain decoding."""
        return plain(sources[place], [*prefix, *path])[-len(path) :].double()

    other = rows([*tree[:_CHANGED], ids[18], *tree[_CHANGED + 1 :]])
    found = rows(tree)
    allowed = _allowed(model.dtype, _check_subtree(model, shape, found[0], other[0]))
    for nodes in shape.paths:
        path = [tree[node] for node in nodes]
        _check_path(model, shape, found[0][list(nodes)], alone(0, prompts[0], path), allowed)
    _check_path(model, shape, found[1], alone(1, prompts[1], beside), allowed)
    cache.keep({slots[0]: shape.kept, slots[1]: range(2)})
    # A plain step: some decoders leave out the mask of a single row, which texts of different lengths need.
    after = target.forward(cache, {slot: Rows([last]) for slot in slots})
    kept = [*prompts[0], *(tree[node] for node in shape.kept)]
    for place, text in enumerate((kept, [*prompts[1], *beside])):
        found_last = after.logits_of(slots[place]).double()
        _check_path(model, shape, found_last, alone(place, text, [last]), allowed)
    pad = getattr(model.config, "pad_token_id", None)
    if target.chains_only and pad is not None and 0 <= pad < target.vocabulary:
        _check_pad(target, model, sources[0], [ids[0], pad, ids[1]], allowed)


def _spread(vocabulary: int, turn: int) -> list[int]:
    """Token ids for a test, distinct if the vocabulary allows (equal ones only weaken the test)."""
    start = round(0.618 * vocabulary)
    stride = next(n for n in range(start, start + vocabulary + 1) if math.gcd(n, vocabulary) == 1)
    return [(1 + turn + i * stride) % vocabulary for i in range(19)]


def agree(dtype: torch.dtype, found: Tensor, expected: Tensor) -> bool:
    """True if two computations of the same logits, [n, vocabulary], differ only by rounding."""
    return difference(expected.double(), found.double()) <= _allowed(dtype, math.inf)


def difference(rows: Tensor, others: Tensor) -> float:
    """The largest root mean square over rows, as a share of the spread of a row's logits."""
    difference = (rows - others.to(rows.device)).square().mean(dim=-1).sqrt()
    return float((difference / rows.std(dim=-1, correction=0).clamp(min=1e-12)).max())


def _allowed(dtype: torch.dtype, effect: float) -> float:
    """The difference attributed to rounding, as a share of the spread of a row's logits.

    An error is about as large as the effect of one token on another's logits. This is small with untrained
    weights, so the limit is half of it, but at least the usual and at most the largest effect of rounding.
    """
    if dtype == torch.float64:
        low, high = 1e-6, 1e-4  # some attention always computes its softmax in float32
    elif dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        low, high = 1e-5, 1e-3
    elif dtype == torch.float32:
        low, high = 1e-3, 1e-2
    else:
        low, high = 0.03, 0.25  # SmolLM2 in bfloat16 reaches 0.17
    return min(max(effect / 2, low), high)


def _check_subtree(model: PreTrainedModel, shape: _Shape, rows: Tensor, others: Tensor) -> float:
    """Check that rows outside a node's subtree do not depend on its token, for two tokens.

    Returns the effect of the token on a row inside, as a share of the spread of a row's logits.
    """
    leak = difference(rows[shape.blind], others[shape.blind])
    effect = difference(rows[[shape.sees]], others[[shape.sees]])
    if not leak <= effect / 4:
        why = "it honours no 4-D mask" if shape is _TREE_OF_SEVEN else "its attention is not causal"
        raise UnsupportedModel(
            f"{family(model)} lets rows of a {shape.name} see more than their ancestors: {why} "
            f"(a token changes logits below it by {effect:.2g} of their spread, others by {leak:.2g})"
        )
    return effect


def _check_path(model: PreTrainedModel, shape: _Shape, found: Tensor, plain: Tensor, allowed: float) -> None:
    """Compare rows of a tree or chain with the same tokens in plain decoding."""
    off = difference(plain, found)
    if not off <= allowed:
        what = "a tree of tokens than for its paths: it does not honour a 4-D mask or positions"
        if shape is _CHAIN_OF_SEVEN:
            what = "a chain of tokens after those in a cache than for the whole text"
        raise UnsupportedModel(
            f"{family(model)} gives other logits for {what} (off by {off:.2g} of their spread; rounding "
            f"explains {allowed:.2g})"
        )


def _check_pad(
    target: TargetModel, model: PreTrainedModel, source: Source | None, text: list[int], allowed: float
) -> None:
    """Compare a chain with a pad in it with the same tokens one at a time.

    A model that counts positions itself may count pads otherwise if they are alone.
    """
    cache = target.new_cache(slots=2, length=64)
    rows = []
    for widths in ([len(text)], [1] * len(text)):
        slot, start = target.open(cache, source), 0
        for width in widths:
            output = target.forward(cache, {slot: Rows(text[start : start + width])})
            cache.keep({slot: range(width)})
            start += width
        rows.append(output.logits_of(slot)[-1:].double())
    if not difference(rows[1], rows[0]) <= allowed:
        raise UnsupportedModel(
            f"{family(model)} counts the positions after a pad (token {text[1]}) otherwise in a chain than "
            "in plain decoding, and they cannot be set"
        )


# For the bit test: rows of a text fed as a prompt, rows after them, and a tree with these as a path.
_PROMPT, _AFTER = 29, 6
_TREE = (-1, 0, 0, 1, 1, 2, 4, 4, 6, 5, 8, 8, 9)
_PATH = (0, 1, 4, 6, 8, 11)

# Operation -> place of a row in the text -> (input, output).
_Trace = dict[str, dict[int, tuple[Tensor, Tensor]]]


@torch.inference_mode()
def bit_test(target: TargetModel, step: nn.Module, vocabulary: int) -> str:
    """Compare the bits of a text's logits between plain decoding and other shapes of forwards.

    The other shapes: a tree beside another sequence, after a prompt in chunks; chains of 2 and 4 rows; the
    whole text in one forward; on a CPU the tree with one and with three threads.

    Args:
        step: the module that the target's forward runs.
        vocabulary: number of token ids that have an embedding.

    Returns:
        The operation whose output bits for a row depend on other rows; empty if all bits are equal.
    """
    room = _room(target)
    if room < 2:
        return f"its context of {target.context} tokens is too short for a test"
    text = _text(min(target.vocabulary, vocabulary), room)
    plain, *others = [shape(target, text, room) for shape in _SHAPES]
    for shape, logits in zip(_SHAPES[1:], others, strict=True):
        if not torch.equal(logits, plain):
            traces = []
            for one in (_plainly, shape):
                with _traced(step) as trace:
                    one(target, text, room, trace)
                traces.append(trace.rows)
            return _culprit(*traces)
    own = torch.get_num_threads()
    for threads in (1, 3) if target.device.type == "cpu" else ():
        with using_threads(threads):
            if not torch.equal(_as_tree(target, text, room), plain):
                return f"its rows have other bits with {threads} threads than with {own}"
    return ""


def _room(target: TargetModel) -> int:
    """Number of the prompt's rows in the bit test."""
    return _PROMPT if target.context is None else min(_PROMPT, target.context - _AFTER - 2)


def _text(vocabulary: int, room: int) -> list[int]:
    ids = _spread(vocabulary, 0)
    return [ids[place * place % len(ids)] for place in range(room + _AFTER)]


def _plainly(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    """Logits of the rows after the prompt, [_AFTER, vocabulary], with one row per forward."""
    return _fed(target, text, [prompt, *[1] * _AFTER], trace)


def _in_chains(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    return _fed(target, text, [prompt // 2, prompt - prompt // 2, 2, 4], trace)


def _at_once(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    return _fed(target, text, [len(text)], trace)


def _fed(target: TargetModel, text: list[int], widths: list[int], trace: _Tracer | None) -> Tensor:
    cache = target.new_cache(slots=1, length=64)
    slot, start, logits = cache.allocate(), 0, []
    for width in widths:
        if trace is not None:
            trace.expect(0, 1, width, {row: start + row for row in range(width)})
        output = target.forward(cache, {slot: Rows(text[start : start + width])})
        logits.append(output.logits_of(slot).clone())
        cache.keep({slot: range(width)})
        start += width
    return torch.cat(logits)[-_AFTER:]


def _as_tree(target: TargetModel, text: list[int], prompt: int, trace: _Tracer | None = None) -> Tensor:
    cache = target.new_cache(slots=2, length=64)
    slots = [cache.allocate(), cache.allocate()]
    start = 0
    for width in (prompt // 3, prompt - prompt // 3):
        if trace is not None:
            trace.expect(0, 2, width, {row: start + row for row in range(width)})
        feeds = {slots[0]: Rows(text[start : start + width]), slots[1]: Rows(text[: width // 2])}
        target.forward(cache, feeds, logits_from=None)
        cache.keep({slots[0]: range(width), slots[1]: range(width // 2)})
        start += width
    tokens = [text[node] for node in range(len(_TREE))]
    for place, node in enumerate(_PATH):
        tokens[node] = text[prompt + place]
    if trace is not None:
        trace.expect(0, 2, len(_TREE), {node: prompt + place for place, node in enumerate(_PATH)})
    feeds = {slots[0]: Rows(tokens, _TREE), slots[1]: Rows(text[:3])}
    return target.forward(cache, feeds).logits_of(slots[0])[list(_PATH)].clone()


_SHAPES = (_plainly, _as_tree, _in_chains, _at_once)


class _Tracer:
    """Recorder of the inputs and outputs of the innermost modules, row by row."""

    def __init__(self) -> None:
        self.rows: _Trace = {}

    def expect(self, place: int, batch: int, width: int, positions: dict[int, int]) -> None:
        """State where the next forward's rows are: row of the sequence at a place -> place in the text."""
        self._place, self._batch, self._width, self._positions = place, batch, width, positions

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, given: Any, output: Any) -> None:
            for row, position in self._positions.items():
                pair = [self._row(value, row) for value in (given[0] if given else None, output)]
                if all(value is not None for value in pair):
                    self.rows.setdefault(name, {})[position] = (pair[0], pair[1])

        return record

    def _row(self, value: Any, row: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return None
        if value.dim() > 2 and value.shape[0] == self._batch and value.shape[1] >= self._width:
            return value[self._place, row].clone()
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
        if any(not torch.equal(one[0], two[0]) for one, two in both):
            return f"the inputs of {name} differ: attention, rotary or another function outside modules"
        if any(not torch.equal(one[1], two[1]) for one, two in both):
            return f"{name} gives a row other bits among other rows"
    return "the head, or a function after it, gives a row other bits among other rows"
