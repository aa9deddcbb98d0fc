"""Recurrent layers of stock models over a tree of tokens: each node starts from the state of its parent.

All families of transformers call a causal convolution, and one of few recurrences (``scans.py``), by a global
name. In a copy of the model the forward of such a layer has other globals: these two functions ask the cache
object of the running forward, which knows the tree. The convolution of a row sees the row's own ancestors.
The recurrence goes level by level: all nodes of one depth are computed together, each from its parent's
state. No weight is read twice for that, since the layers' products see plain rows. The model is unchanged,
and so is the copy without such a cache object.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from outpace.cache import LayerShape, NextStates, StateShape, StateWindow
from outpace.core import UnsupportedModel
from outpace.targets.inputs.config import family
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.probe import Probe
from outpace.targets.inputs.scans import SCANS, Scan
from outpace.targets.inputs.shared import shared_here
from outpace.targets.inputs.surgery import exchange
from outpace.targets.rows import Rows
from outpace.tree import is_chain

_CONVOLUTION = "causal_conv1d_fn"
Key = tuple[str, int, int]  # "conv" or "scan"; the layer; which of its convolutions or scans


def with_states(model: Any) -> Any:
    """A copy of a model whose recurrent layers ask the cache object for convolutions and recurrences.

    Raises:
        UnsupportedModel: no layer calls them by the names that are known.
    """
    if has_states(model):
        return model
    copied = exchange(model, lambda _: None, None)
    found = [module for module in copied.modules() if _CONVOLUTION in _names_of(module)]
    if not found:
        raise UnsupportedModel(
            f"{family(model)} keeps a recurrent state by functions that outpace does not know, so a rejected "
            "draft could not be taken out of it (transformers has had known ones since 5.24)"
        )
    for module in found:
        module.__class__ = _adapted(type(module))
    return copied


class _Adapted:
    """Base of the classes of layers that ask the cache object."""


def is_adapted(module: Any) -> bool:
    """True for a layer that asks the cache object."""
    return isinstance(module, _Adapted)


def has_states(model: Any) -> bool:
    """True if ``with_states`` made a model, or it was copied from one that it made."""
    return any(map(is_adapted, model.modules()))


def convolutions_of(model: Any) -> list[nn.Module]:
    """The convolutions of a model's adapted layers, which are computed here."""
    layers = filter(is_adapted, model.modules())
    return [child for layer in layers for child in layer.children() if isinstance(child, nn.Conv1d)]


def reads_step_weight(module: Any) -> bool:
    """True for a layer that multiplies the weight of its ``dt_proj`` itself, as Mamba's do."""
    return is_adapted(module) and "mamba_selective_scan" in _names_of(module) and hasattr(module, "dt_proj")


def _names_of(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of layers whose forward has other globals."""
    forward: Any = inspect.unwrap(kind.forward)
    changed = dict(forward.__globals__)
    changed[_CONVOLUTION] = partial(_convolve, changed[_CONVOLUTION])
    for name, scan in SCANS.items():
        if name in forward.__code__.co_names:
            changed[name] = partial(_scan, scan, changed[name], _parameters_of(changed[name]))
    copied = types.FunctionType(
        forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind, _Adapted), {"forward": copied, "__module__": kind.__module__})


def _parameters_of(function: Any) -> dict[str, Any]:
    """A function's parameters, in order, with their default values."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _convolve(
    original: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    states: StatesOfLayers | None = shared_here().states
    if states is None:
        return original(rows, weight, bias, activation=activation, **options)
    return states.convolve(rows, weight, bias, activation)


def _scan(
    scan: Scan, original: Callable[..., Any], parameters: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    states: StatesOfLayers | None = shared_here().states
    if states is None:
        return original(*args, **options)
    given = dict(parameters) | dict(zip(parameters, args, strict=False)) | options
    return states.scan(scan, original, {name: each for name, each in given.items() if name in parameters})


class StatesOfLayers:
    """The part of transformers' cache that recurrent layers use: it has no state, so they compute all rows.

    A layer asks for its states before it calls the functions that ``with_states`` has replaced.
    """

    _conv: Key
    _layer = _scans = -1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._layer, self._scans = layer_idx, 0

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._conv = "conv", layer_idx, state_idx
        return rows

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        if self._layer != layer_idx or not self._scans:
            raise UnsupportedModel(
                f"layer {layer_idx} keeps a recurrent state by a function that outpace does not know"
            )
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def _next_scan(self) -> Key:
        self._scans += 1
        return "scan", self._layer, self._scans - 1

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The causal convolution of rows, [B, channels, R], each with its own ancestors."""
        raise NotImplementedError

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """The output of a recurrence for all rows, and a state, which nothing reads."""
        raise NotImplementedError


class StateProbe(StatesOfLayers, Probe):
    """Recorder of the rows and the states of each layer.

    Attributes:
        states: shape of each state.
        grid: prompts are computed in pieces that begin at multiples of this; 0 where the recurrences compute
            one token after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared.states = self
        self.states: dict[Key, StateShape] = {}
        self.grid = 0

    def layout(self, model: Any) -> tuple[dict[int, int], list[LayerShape]]:
        if not self.rows:  # no layer attends
            return {}, []
        return super().layout(model)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        size = rows.shape[1], weight.shape[-1] - 1
        self.states[self._conv] = StateShape(size, rows.dtype, rows.device)
        before = rows.new_zeros((rows.shape[0], *size))
        return _convolved(_taps(torch.cat([before, rows], -1), weight.shape[-1], None), weight, bias, activation)

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        out, state = original(**given | {scan.final: True})
        wide = torch.promote_types(state.dtype, torch.float32)
        self.states[self._next_scan()] = StateShape(tuple(state.shape[1:]), wide, state.device)
        if scan.chunked:
            self.grid = math.lcm(self.grid or 1, given["chunk_size"])
        return out, state


class StateAdapter(StatesOfLayers, CacheAdapter):
    """A window of a ``StateCache`` as transformers' cache.

    Args:
        rows: of the window's slots, in its order.
        indices: index of each state in the cache.
        prompt: number of the first rows, of a window of one slot, that are computed in chunks.
        budget: bytes that the states of all rows may take. If they take more, the recurrences' inputs are
            kept instead, and run again over the accepted path.
    """

    window: StateWindow

    def __init__(
        self,
        window: StateWindow,
        cache_layers: dict[int, int],
        rows: Sequence[Rows],
        indices: Mapping[Key, int],
        prompt: int,
        budget: int,
    ) -> None:
        super().__init__(window, cache_layers)
        self.shared.states = self
        self._rows, self._indices, self._prompt = rows, indices, prompt
        self._columns_by_size: dict[int, Tensor | None] = {}
        nodes = sum(len(row.tokens) for row in rows) - prompt
        self._kept = nodes * window.state_bytes <= budget or nodes <= len(rows)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        index, size = self._indices[self._conv], weight.shape[-1]
        seen = torch.cat([self.window.states(index), rows], -1)
        self.window.made[index] = ConvolvedRows(seen, size - 1)
        if size not in self._columns_by_size:
            self._columns_by_size[size] = _columns(self._rows, self._width, size, rows.device)
        return _convolved(_taps(seen, size, self._columns_by_size[size]), weight, bias, activation)

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        index = self._indices[self._next_scan()]
        rows = {
            name: given[name].movedim(scan.dim, 1) for name in scan.rows if isinstance(given[name], Tensor)
        }
        initial = self.window.states(index)
        outputs, states = [], []
        if self._prompt:
            outputs, initial = self._read(scan, original, given, rows, initial)
        parents = initial
        for level in self._levels.levels:
            before = parents if level.parents is None else parents[level.parents]
            out, parents = scan.step(before, {**given, **{name: each[level.rows] for name, each in rows.items()}})
            outputs.append((level.rows, out))
            states.append(parents)
        made: NextStates = ScannedRows(states, self._levels.where, self._prompt, initial)
        if not self._kept:
            made = ReplayedRows(scan, given, rows, self._prompt, initial)
        self.window.made[index] = made
        return _joined(outputs, (len(self._rows), self._width)).movedim(1, scan.dim), initial

    @cached_property
    def _levels(self) -> Levels:
        return Levels(self._rows, self._prompt, self.window.states(0).device)

    def _read(
        self,
        scan: Scan,
        original: Callable[..., Any],
        given: Mapping[str, Any],
        rows: Mapping[str, Tensor],
        state: Tensor,
    ) -> tuple[list[tuple[Index, Tensor]], Tensor]:
        """The outputs of a prompt's rows, in chunks with borders at multiples of their size, and the state.

        A row's chunk depends on its position alone, so its bits do not depend on how the prompt was cut, if
        cuts are at borders too. After another cut rows are computed one by one up to the next border.
        """
        start, size, row = self.window.offsets[0], given["chunk_size"], 0
        outputs: list[tuple[Index, Tensor]] = []
        while row < self._prompt:
            if (start + row) % size:
                piece = {name: each[:, row] for name, each in rows.items()}
                out, state = scan.step(state, {**given, **piece})
                outputs.append(((slice(None), row), out))
                row += 1
                continue
            stop = min(row + size, self._prompt)
            piece = {name: each[:, row:stop].movedim(1, scan.dim) for name, each in rows.items()}
            out, state = original(**{**given, **piece, scan.initial: state, scan.final: True})
            outputs.append(((slice(None), slice(row, stop)), out.movedim(scan.dim, 1)))
            row = stop
        return outputs, state


Index = tuple[Any, Any]  # of rows in [B, R, ...]


class Level(NamedTuple):
    """The nodes of one depth, over all sequences of a window.

    Attributes:
        rows: their indices in [B, R, ...].
        parents: index of each one's parent in the level before, or of its sequence; None if these are the
            same as the nodes, one by one.
    """

    rows: Index
    parents: Tensor | None


class Levels:
    """The rows of a window by their depth in their trees, without those of a prompt before them.

    Attributes:
        levels: by depth.
        where: for each sequence, and each row after the prompt: its level, and its index there.
    """

    def __init__(self, rows: Sequence[Rows], prompt: int, device: torch.device) -> None:
        levels: list[list[tuple[int, int, int]]] = []  # sequence, row, index of the parent
        self.where: list[list[tuple[int, int]]] = []
        for sequence, row in enumerate(rows):
            if row.fed:
                raise UnsupportedModel("recurrent layers do not take a tree in several forwards")
            where: list[tuple[int, int]] = []
            for node, parent in enumerate(row.tree[prompt:]):
                depth, above = (0, sequence) if parent < prompt else where[parent - prompt]
                depth += parent >= prompt
                if depth == len(levels):
                    levels.append([])
                where.append((depth, len(levels[depth])))
                levels[depth].append((sequence, prompt + node, above))
            self.where.append(where)
        counts = [len(rows), *map(len, levels)]
        self.levels = [
            _level(nodes, before, len(rows), device) for before, nodes in zip(counts, levels, strict=False)
        ]


def _level(nodes: Sequence[tuple[int, int, int]], before: int, sequences: int, device: torch.device) -> Level:
    at, rows, parents = zip(*nodes, strict=True)
    even = at == tuple(range(sequences)) and len({*rows}) == 1
    index = (slice(None), rows[0]) if even else tuple(torch.tensor([at, rows], device=device).unbind())
    same = parents == tuple(range(before))
    return Level(index, None if same else torch.tensor(parents, device=device))


@dataclass
class ConvolvedRows(NextStates):
    """The columns before a convolution's next row.

    Attributes:
        seen: the columns before, and the rows, [B, channels, before + R].
        before: number of columns before.
    """

    seen: Tensor
    before: int

    def at(self, before: Tensor, sequence: int, path: Sequence[int]) -> Tensor:
        count = len(path)
        if path[-1] == count - 1:
            return self.seen[sequence, :, count : count + self.before]
        columns = [*range(self.before), *(self.before + row for row in path)][count:]
        return self.seen[sequence][:, torch.tensor(columns, device=self.seen.device)]


@dataclass
class ScannedRows(NextStates):
    """The states after all rows.

    Attributes:
        levels: states after the nodes of each level, [N, ...].
        where: see ``Levels``.
        prompt: number of a prompt's rows before them, and ``after`` the states after these.
    """

    levels: Sequence[Tensor]
    where: Sequence[Sequence[tuple[int, int]]]
    prompt: int
    after: Tensor

    def at(self, before: Tensor, sequence: int, path: Sequence[int]) -> Tensor:
        if (node := path[-1] - self.prompt) >= 0:
            level, index = self.where[sequence][node]
            return self.levels[level][index]
        return _after_prompt(self.after, sequence, path, self.prompt)


@dataclass
class ReplayedRows(NextStates):
    """A recurrence's inputs, of which the accepted ones are run again.

    Attributes:
        given, rows: its arguments; those with a dimension of rows, [B, R, ...].
        prompt, after: as of ``ScannedRows``.
    """

    recurrence: Scan
    given: Mapping[str, Any]
    rows: Mapping[str, Tensor]
    prompt: int
    after: Tensor

    @torch.inference_mode()
    def at(self, before: Tensor, sequence: int, path: Sequence[int]) -> Tensor:
        if path[-1] < self.prompt:
            return _after_prompt(self.after, sequence, path, self.prompt)
        state = self.after[sequence : sequence + 1]
        for row in path:
            if row >= self.prompt:
                taken = {name: each[sequence : sequence + 1, row] for name, each in self.rows.items()}
                _, state = self.recurrence.step(state, {**self.given, **taken})
        return state[0]


def _after_prompt(after: Tensor, sequence: int, path: Sequence[int], prompt: int) -> Tensor:
    if path[-1] != prompt - 1:
        raise ValueError(f"of {prompt} rows of a prompt, {path[-1] + 1} cannot be kept: they are kept whole")
    return after[sequence]


def _columns(rows: Sequence[Rows], width: int, size: int, device: torch.device) -> Tensor | None:
    """The columns that the convolution of each row sees, [B, size, R]; None if each sees those before it."""
    if all(row.parents is None or is_chain(row.parents) for row in rows):
        return None
    seen = []
    for row in rows:
        paths: list[list[int]] = []
        for node, parent in enumerate(row.tree):
            above = paths[parent] if parent >= 0 else list(range(size - 1))
            paths.append([*above, size - 1 + node][-size:])
        paths += [list(range(size))] * (width - len(paths))
        seen.append(paths)
    return torch.tensor(seen, device=device).transpose(1, 2)


def _taps(seen: Tensor, size: int, columns: Tensor | None) -> list[Tensor]:
    """The inputs of a convolution's weights, each [B, channels, R], from ``seen`` [B, channels, size - 1 + R]."""
    if columns is None:
        width = seen.shape[-1] - size + 1
        return [seen[..., tap : tap + width] for tap in range(size)]
    shape = *seen.shape[:2], columns.shape[2]
    return [seen.gather(2, columns[:, tap, None].expand(shape)) for tap in range(size)]


def _convolved(
    taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """A convolution of each channel by itself, in one order of sums whatever the number of rows."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = taps[0].to(wide) * weight[:, 0, None].to(wide)
    for tap in range(1, len(taps)):
        out = out + taps[tap].to(wide) * weight[:, tap, None].to(wide)
    if bias is not None:
        out = out + bias[:, None].to(wide)
    out = out.to(weight.dtype)
    return (out if activation is None else ACT2FN[activation](out)).to(taps[0].dtype)


def _joined(outputs: Sequence[tuple[Index, Tensor]], shape: tuple[int, int]) -> Tensor:
    """Outputs of rows as one tensor [B, R, ...], where ``shape`` is (B, R); zeros where there is no row."""
    index, first = outputs[0]
    if index == (slice(None), 0) and shape[1] == 1:
        return first[:, None]
    joined = first.new_zeros((*shape, *first.shape[1 if isinstance(index[1], int | Tensor) else 2 :]))
    for index, out in outputs:
        joined[index] = out
    return joined
