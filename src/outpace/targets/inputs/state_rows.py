"""The rows of a forward through recurrent layers, and the states that they lead to.

The convolution of a row sees the row's own ancestors. The recurrence goes level by level: all nodes of one
depth are computed together, each from its parent's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.cache import NextStates, StateWindow
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.scans import Scan, convolved, taps_of
from outpace.targets.inputs.states import Key, StatesOfLayers
from outpace.targets.rows import Rows
from outpace.transfer import upload
from outpace.tree import is_chain


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
        self.context.states = self
        self._rows, self._indices, self._prompt = rows, indices, prompt
        self._seen_on: dict[tuple[int, torch.device], Tensor | None] = {}
        self._levels: dict[torch.device, Levels] = {}
        nodes = sum(len(row.tokens) for row in rows) - prompt
        self._kept = nodes * window.state_bytes <= budget or nodes <= len(rows)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        index, size = self._indices[self._conv], weight.shape[-1]
        place = size, rows.device
        seen = torch.cat([self.window.states(index), rows], -1)
        self.window.made[index] = ConvolvedRows(seen, size - 1)
        if place not in self._seen_on:
            self._seen_on[place] = _columns(self._rows, self._width, *place)
        return convolved(taps_of(seen, size, self._seen_on[place]), weight, bias, activation)

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        index = self._indices[self._next_scan()]
        rows = {
            name: given[name].movedim(scan.dim, 1) for name in scan.rows if isinstance(given[name], Tensor)
        }
        initial = self.window.states(index)
        outputs: list[tuple[Index, Tensor]] = []
        states = []
        if self._prompt:
            outputs, initial = self._read(scan, original, given, rows, initial)
        parents, levels = initial, self._levels_on(initial.device)
        for level in levels.levels:
            before = parents if level.parents is None else parents[level.parents]
            out, parents = scan.step(
                before, {**given, **{name: each[level.rows] for name, each in rows.items()}}
            )
            outputs.append((level.rows, out))
            states.append(parents)
        made: NextStates = ScannedRows(states, levels.where, self._prompt, initial)
        if not self._kept:
            made = ReplayedRows(scan, given, rows, self._prompt, initial)
        self.window.made[index] = made
        return _joined(outputs, (len(self._rows), self._width)).movedim(1, scan.dim), initial

    def _levels_on(self, device: torch.device) -> Levels:
        if device not in self._levels:
            self._levels[device] = Levels(self._rows, self._prompt, device)
        return self._levels[device]

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
    index: Index = (slice(None), rows[0])
    if not even:
        index = upload(at, device), upload(rows, device)
    same = parents == tuple(range(before))
    return Level(index, None if same else upload(parents, device))


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
        return self.seen[sequence][:, upload(columns, self.seen.device)]


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
    return upload(seen, device).transpose(1, 2)


def _joined(outputs: Sequence[tuple[Index, Tensor]], shape: tuple[int, int]) -> Tensor:
    """Outputs of rows as one tensor [B, R, ...], where ``shape`` is (B, R); zeros where there is no row."""
    index, first = outputs[0]
    if index == (slice(None), 0) and shape[1] == 1:
        return first[:, None]
    joined = first.new_zeros((*shape, *first.shape[1 if isinstance(index[1], int | Tensor) else 2 :]))
    for index, out in outputs:
        joined[index] = out
    return joined
