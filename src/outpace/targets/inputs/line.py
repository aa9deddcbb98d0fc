"""Forwards without padding: the rows of all sequences in one line, padded only in the attention.

In a batch of uneven drafts most rows of a padded forward are padding, and on a CPU each costs about as much
as a real one. In a line the model's layers compute the real rows alone, as one sequence; its attention gets
them back where they were, [B, width], so that it is unchanged. The windows of a forward (of
several lanes of the cache, or of a prompt's rows beside drafts) adjoin in the line, so the weights are read
once, and each window is padded for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outpace.cache import Slot, Window
from outpace.core import UnsupportedModel
from outpace.targets.inputs.masks import Mask
from outpace.targets.inputs.shared import Shared

_WORTH = 0.8  # a line of one window must have at most this share of the rows of the padded forward
WINDOW_COST = 48  # rows of padding that cost as much as the attention of a further window


def apart(widths: Mapping[Slot, int]) -> list[Slot]:
    """Choose the slots that get a window of their own, because they feed many more rows than the others."""
    slots = sorted(widths, key=lambda slot: widths[slot], reverse=True)
    wide = [widths[slot] for slot in slots]
    costs = [
        sum(wide[:count]) + WINDOW_COST * count + wide[count] * (len(wide) - count)
        for count in range(len(wide))
    ]
    return slots[: costs.index(min(costs))]


class Line:
    """The rows of a forward's windows in a line, in their order, with padding at the end.

    Attributes:
        slots: the slots that feed rows, in the order of these.
        size: number of rows, a multiple of ``multiple``.
        width, columns: those of the windows at most.
    """

    def __init__(self, windows: Sequence[Window], multiple: int) -> None:
        self.windows = windows
        fed = [pair for window in windows for pair in zip(window.slots, window.widths, strict=True)]
        self.slots = [slot for slot, width in fed if slot is not None and width]
        self.width = max(window.width for window in windows)
        self.columns = max(window.columns for window in windows)
        ends = [0, *itertools.accumulate(sum(window.widths) for window in windows)]
        self._spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self._cells = [_cells_of(window) for window in windows]
        self.size = -(-ends[-1] // multiple) * multiple

    @property
    def pays(self) -> bool:
        """True if the padded forwards would compute clearly more rows, or read the weights more often."""
        padded = sum(window.width * len(window.widths) for window in self.windows)
        return len(self.windows) > 1 or (self.size <= _WORTH * padded and self.windows[0].span is None)

    def inputs(self, padded: Sequence[Tensor]) -> Tensor:
        """Put the windows' inputs, each [n, B, width], in a line: [n, 1, size]."""
        rows = [
            inputs.flatten(1) if cells is None else inputs.flatten(1)[:, cells]
            for inputs, cells in zip(padded, self._cells, strict=True)
        ]
        line = torch.cat(rows, dim=1)
        return nn.functional.pad(line, (0, self.size - line.shape[1]))[:, None]

    def mask(self, masks: Sequence[Mask], shared: Shared) -> Mask:
        """A tensor in place of each kind of mask, whose value in ``shared`` says where the rows belong."""
        if isinstance(masks[0], dict):
            return {
                kind: self._token([cast(dict[str, Any], mask)[kind] for mask in masks], shared)
                for kind in masks[0]
            }
        return self._token(masks, shared)

    def _token(self, masks: Sequence[Any], shared: Shared) -> Tensor:
        token = torch.empty((1, 1, 1, 1), dtype=torch.bool)
        windows = zip(self.windows, self._spans, self._cells, masks, strict=True)
        shared.put(token, [WindowRows(*rows) for rows in windows])
        return token

    def append(self, layer: int, keys: Tensor, values: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [1, heads, N, size]; see ``Window.append``.

        Returns:
            The first window's views; the value of its keys in ``shared`` are those of the others.
        """
        views = []
        for window, span, cells in zip(self.windows, self._spans, self._cells, strict=True):
            if cells is not None:
                window.in_line(cells)
            views.append(window.append(layer, keys[:, :, span], values[:, :, span]))
        shared.put(views[0][0], views[1:])
        return views[0]


class WindowRows(NamedTuple):
    """A window's rows in a line.

    Attributes:
        span: their range in the line.
        cells: where they are in the padded forward, as indices into [B * width]; None if they are all of it.
    """

    window: Window
    span: slice
    cells: Tensor | None
    mask: Tensor | None


def windows_in(mask: Tensor, shared: Shared) -> list[WindowRows]:
    """The windows of a line, of which ``Line.mask`` made this mask.

    Raises:
        UnsupportedModel: it did not, since the model makes another.
    """
    windows: list[WindowRows] | None = shared.get(mask)
    if windows is None:
        raise UnsupportedModel("the model makes a mask of its own, which says nothing of rows in a line")
    return windows


def _cells_of(window: Window) -> Tensor | None:
    if window.widths == [window.width]:
        return None
    rows = [sequence * window.width + row for sequence, fed in enumerate(window.widths) for row in range(fed)]
    return torch.tensor(rows)
