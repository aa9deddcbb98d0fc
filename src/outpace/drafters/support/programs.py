"""Growth of trees by a draft model as one graph: its forwards, and the draws between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import FixedRows, FixedWindow, Slot
from outpace.cache.lanes import power_of_two
from outpace.drafters.support.draws import Noise
from outpace.drafters.support.forest import Forest, Grown
from outpace.drafters.support.growth import GrowthShared, GrowthState
from outpace.drafters.support.plans import GrowthPlan, Kind, grows_on_device, pack, plan_of, unpack
from outpace.drafters.support.runner import Track
from outpace.targets.gpu.fixed import FixedStep
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.device_rows import read_numbers, row_numbers
from outpace.targets.inputs.forward import rows_of
from outpace.targets.rows import Rows

# Independent draws are seldom asked for, and not of trees.
_USUAL: dict[Noise, tuple[Kind, ...]] = {
    "coupled": ("best", "shared"),
    "greedy": ("best", "warped"),
    "independent": ("best",),
}


class ModelGrowth:
    """A ``Program`` of a draft model: it reads the ends of texts, whose rows stay, and grows trees there.

    Args:
        tracks: of the texts.
        feeds: the tokens of each that have no rows yet, the root included.
        states: of the same texts; none if nothing but the capture is wanted.

    Attributes:
        parts: what grew, window after window.
        order: the texts in that order, as indices.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        shared: GrowthShared,
        tracks: Seq[Track],
        feeds: Seq[Seq[int]],
        states: Seq[GrowthState],
    ) -> None:
        self._plan, self._shared, self._states = plan, shared, states
        self._tracks, self._fed = tracks, [Rows(tokens) for tokens in feeds]
        self._width = power_of_two(shared.runner.late)  # of all feeds, so that there are few graphs
        self.parts: list[Grown] = []
        self.order: list[int] = []

    @property
    def _feeds(self) -> dict[Slot, Rows]:
        """By slots, which are others once the cache was too small."""
        return {track.slot: row for track, row in zip(self._tracks, self._fed, strict=True)}

    @property
    def widths(self) -> dict[Slot, int]:
        return {slot: len(row.tokens) + self._plan.rows for slot, row in self._feeds.items()}

    @property
    def kept(self) -> dict[Slot, int]:
        return {slot: len(row.tokens) for slot, row in self._feeds.items()}

    @property
    def key(self) -> GrowthPlan:
        return self._plan

    @property
    def forward(self) -> Callable[[Tensor, FixedRows, FixedStep], Made]:
        return partial(_forward, self._plan, self._shared, self._width)

    def numbers(self, window: FixedWindow) -> NDArray[np.int64]:
        rows = rows_of(window, self._feeds)
        states = [state for state in self._states if state.track.slot in window.slots]
        places = [window.slots.index(state.track.slot) for state in states]
        bases = [window.offsets[place] + len(rows[place].tokens) for place in places]
        fed = row_numbers(rows, window.offsets, self._width, self._width)
        return np.hstack([fed, pack(self._plan, states, places, bases, window.stop)])

    def take(self, window: FixedWindow, made: Made) -> None:
        own = {place: t.slot for place, t in enumerate(self._tracks) if t.slot in window.slots}
        self.order += own
        self.parts.append(Grown.of(made, [window.slots.index(slot) for slot in own.values()]))


def _forward(
    plan: GrowthPlan, shared: GrowthShared, width: int, numbers: Tensor, rows: FixedRows, step: FixedStep
) -> Made:
    """Read the ends of texts, in ``width`` rows each, and grow trees after them."""
    end, runner = 3 + 2 * width, shared.runner
    text = read_numbers(numbers[:, :end], width)
    written = rows.at(torch.where(text.trees.real, text.rows, rows.scratch))
    every = torch.arange(len(numbers), device=numbers.device)
    last = (text.trees.real.sum(dim=1) - 1).clamp(min=0)
    logits = step(written, text.tokens, text.trees)[every, last][:, None]
    ids = shared.vocabulary.drafted(runner.part(logits[:, 0]))[1]
    forest = Forest(plan, unpack(plan, numbers[:, end:]), ids)
    while True:
        forest.grow(runner.part(logits.flatten(0, 1)).unflatten(0, logits.shape[:2]))
        if forest.ended:
            return forest.made
        at, trees = forest.rows(rows.scratch)
        logits = step(rows.at(at), forest.tokens, trees)


def grow_by_model(plan: GrowthPlan, members: Seq[GrowthState]) -> Grown | None:
    """Grow the trees of sequences that share a plan; None if that takes single forwards."""
    shared = members[0].shared
    context = math.inf if shared.model.context is None else shared.model.context
    fits = all(len(state.text) + len(plan.layers) - 1 <= context for state in members)
    widest = max(power_of_two(shared.runner.late), *(layer.front for layer in plan.layers))
    if not (fits and shared.model.plays(len(members), widest)):
        return None
    tracks = [state.track for state in members]
    feeds = [state.text[state.track.stem :] for state in members]
    growth = ModelGrowth(plan, shared, tracks, feeds, members)
    if not shared.runner.play(tracks, feeds, growth):
        return None
    return Grown.joined(growth.parts, np.argsort(growth.order).tolist())


def warm(shared: GrowthShared, slots: int) -> None:
    """Capture what usual drafts of up to ``slots`` texts run, greedy and sampled; there must be none yet."""
    runner = shared.runner
    if not (runner.model.plays(1) and grows_on_device(shared)):
        runner.warm(slots)
        return
    tracks = [runner.open() for _ in range(slots)]
    for kind in _USUAL[shared.draws.noise]:
        plan = plan_of(kind, shared, shared.shape, shared.shape.depth, len(shared.model.eos_token_ids))
        for some in (tracks[: 1 << power] for power in range(slots.bit_length())):
            roots = [[0]] * len(some)
            runner.play(some, roots, ModelGrowth(plan, shared, some, roots, ()))
    for track in tracks:
        runner.close(track)
