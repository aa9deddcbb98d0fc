"""Drafting with a module that continues the target's hidden states, as EAGLE and prediction layers do.

Row r reads the target's state of place r and the token of place r + 1, and predicts the token of place r + 2.
In a draft the target's states are not known yet: a node's row reads what its parent's row gave instead. After
each step the rows of a draft are removed from the module's cache, accepted or not, since the target's states
replace the module's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from outpace.cache import FixedRows
from outpace.core import Draft
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise, check_confidence, check_grown, log_confidence
from outpace.drafters.support.forest import Forest, Grown, GrowthInputs, grow_on_device
from outpace.drafters.support.growth import Growth, grow
from outpace.drafters.support.layer_cache import Forward, LayerCache, LayerFeed, Slot
from outpace.drafters.support.plans import GrowthPlan, pack, unpack
from outpace.drafters.support.shapes import Growing, TreeShape, shape_of
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import FixedInputs, width_of
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.device_rows import dense, read_numbers
from outpace.targets.inputs.forward import rows_of
from outpace.targets.rows import HiddenStates, Rows
from outpace.transfer import gather, upload
from outpace.tree import ancestor_mask

_CHUNK = 512  # rows of a prompt in one forward

S = TypeVar("S", bound="Continuing")


@dataclass(frozen=True, kw_only=True)
class Continuing(Growth):
    """Data that an engine's sequences share: a module that continues the target's states, and its cache.

    A row's *output* is what the rows of its children read, and what the next token's logits are computed
    from: [...], of the module's choice.
    """

    cache: LayerCache

    @property
    @abstractmethod
    def layers_read(self) -> tuple[int, ...]:
        """The target's layers that it reads, numbered as in ``Output.hidden``."""

    @abstractmethod
    def committed(self, hidden: Mapping[int, Tensor], before: Tensor) -> Tensor:
        """What w rows of committed places read, [w, ...], in the form of outputs.

        Args:
            hidden: layer -> the target's states, [w, size].
            before: the output of the row before them, [1, ...]; [0] if they are the first ones.
        """

    @abstractmethod
    def run(self, forward: Forward, tokens: Tensor, read: Tensor, depth: int) -> Tensor:
        """The outputs of a forward's rows, [S, width, ...].

        Args:
            tokens: the token after each row's place, [S, width].
            read: what the rows read, [S, width, ...].
            depth: of the rows in the draft: 0 for rows of committed places, 1 for children of the root.
        """

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [n, vocabulary] of the token after rows of these outputs, [n, ...]."""


@dataclass
class ContinuedState:
    """A sequence's rows in the module's cache, and this step's tree.

    Attributes:
        waiting: layer -> the target's states at committed places whose rows are not fed yet.
        rows: number of committed rows in the cache, one per place except the root's.
        outputs: outputs of the last committed row and of each row of the tree, [1 + fed, ...].
        parents: parent of each of the tree's rows, as a row of the tree.
    """

    sequence: Sequence
    shared: Continuing
    slot: Slot
    waiting: list[Mapping[int, Tensor]] = field(default_factory=list)
    rows: int = 0
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    parents: list[int] = field(default_factory=list)
    tree: Growing = field(init=False)


@dataclass(frozen=True)
class ContinuingDrafter(Drafter[ContinuedState]):
    """Base class of drafters with such a module, whose ``prepare`` returns a ``Continuing``.

    Attributes:
        path: the module's folder, or the module itself.
        num_speculative_tokens: tokens on a path of the draft, at least 1.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": the most probable tokens.
        expand: grow EAGLE-2's tree: N nodes of each layer get N children each, and the ``max_nodes`` best
            nodes are kept. Under a verifier that needs independent draws the children are the most probable
            tokens.
        max_nodes: nodes in the tree, with ``expand``.
        min_confidence: in [0, 1]: a path is continued only if its probability is at least this.
    """

    path: Any = field(default=None, repr=False)
    num_speculative_tokens: int | None = None
    draws: Noise = "coupled"
    expand: int | None = None
    max_nodes: int | None = None
    min_confidence: float = 0.0

    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = self._shape(1)
        self.check_choices("draws")
        check_confidence(self.name, self.min_confidence)
        check_grown(self.name, shape.weighs, self.draws)

    def _shape(self, depth: int) -> TreeShape:
        """The shape of its trees."""
        given = self.num_speculative_tokens
        depth = depth if given is None else given
        return shape_of(depth, expand=self.expand, max_nodes=self.max_nodes, method=self.name)

    @property
    def trees(self) -> bool:
        return self.expand is not None

    def growth(self, depth: int) -> dict[str, Any]:
        """The fields of ``Growth`` by these options, but for the vocabulary; see ``_shape``."""
        shape = self._shape(depth)
        weigh = shape.weighs or self.min_confidence > 0
        return {
            "shape": shape,
            "draws": Draws(self.draws, weigh=weigh, independent=not shape.weighs),
            "least": log_confidence(self.min_confidence),
        }

    def renew(self, shared: S, target: TargetModel) -> S:
        return replace(shared, cache=shared.cache.renewed())

    def warm(self, shared: Continuing, slots: int) -> None:
        shared.cache.warm(slots)

    def hidden_layers(self, shared: Continuing) -> tuple[int, ...]:
        return shared.layers_read

    def start(self, sequence: Sequence, shared: Continuing) -> ContinuedState:
        return ContinuedState(sequence, shared, shared.cache.open())

    def stop(self, state: ContinuedState) -> None:
        state.shared.cache.close(state.slot)

    def read(self, states: Seq[ContinuedState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, own in zip(states, hidden, strict=True):
            state.waiting.append(own)

    def observe(self, states: Seq[ContinuedState], steps: Seq[Step]) -> None:
        self.read(states, [step.committed for step in steps])

    @torch.inference_mode()
    def propose(self, states: Seq[ContinuedState]) -> list[Draft]:
        for state in states:
            state.tree = state.shared.begin(state.sequence)
            if not state.waiting and not len(state.outputs):
                state.tree.layers = 0  # no state of the target is available yet
        active = [state for state in states if state.tree.layers > 0]
        _catch_up([state for state in active if state.waiting])
        shapes = active[0].shared.cache.shapes if active else None
        if shapes is not None:
            active = grow_on_device(active, _run_growth, shapes.captures)
        while active:
            fronts = torch.cat([_front(state) for state in active])
            grow(active, active[0].shared.logits(fronts))
            active = [state for state in active if state.tree.front]
            if active:
                _feed_fronts(active)
        return [_finish(state) for state in states]


def _run_growth(plan: GrowthPlan, members: Seq[ContinuedState]) -> Grown:
    """Grow the trees of sequences that share a plan, by a forward of fixed shapes."""
    shared, outputs = members[0].shared, torch.cat([state.outputs for state in members])
    cache, rows = shared.cache, max(plan.rows, 1)
    assert cache.shapes is not None
    with cache.fixed({state.slot: rows for state in members}, kept=False) as window:
        places = [window.slots.index(state.slot) for state in members]
        numbers = pack(plan, members, places, [state.rows for state in members], window.stop)
        made = cache.shapes.replay(
            window.lane.memory,
            (plan, window.stop, window.columns, shared.revision()),
            lambda: GrowthInputs(numbers, outputs, FixedRows(window, outputs.device)),
            lambda inputs: inputs.fill(numbers, places, outputs),
            lambda inputs: _growth(shared, plan, inputs),
        )
    return Grown.of(made, places)


def _growth(shared: Continuing, plan: GrowthPlan, inputs: GrowthInputs) -> Made:
    """Grow trees from the data in the inputs, without any data from the host."""
    numbers = unpack(plan, inputs.numbers)
    outputs, columns = inputs.given[:, None], inputs.rows
    assert columns is not None
    forest = Forest(plan, numbers, shared.vocabulary.drafted(outputs)[1])
    while True:
        forest.grow(shared.logits(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2]))
        if forest.ended:
            return forest.made
        written, trees = forest.rows(columns.scratch)
        mask, _ = dense(trees, columns.columns, None)
        above = forest.above.view(*forest.above.shape, *[1] * (outputs.dim() - 2)).expand(
            -1, -1, *outputs.shape[2:]
        )
        read = outputs.gather(1, above)
        forward = Forward(columns.at(written), trees.positions, mask, trees.real.sum(dim=1))
        outputs = shared.run(forward, forest.tokens, read, forest.depth)


def _front(state: ContinuedState) -> Tensor:
    """Outputs of the rows of a tree's front, [n, ...]."""
    return gather(state.outputs, [1 + state.tree.fed[node] for node in state.tree.front])


def _catch_up(behind: Seq[ContinuedState]) -> None:
    """Feed the rows of places that were committed since the last draft.

    Row r reads the feature of place r and the token of place r + 1: ``width`` rows from ``rows`` on read
    tokens ``rows`` + 1 to ``rows`` + ``width``.
    """
    for state in behind:
        if len(state.waiting) > 1:
            layers = state.waiting[0]
            state.waiting = [{layer: torch.cat([part[layer] for part in state.waiting]) for layer in layers}]
    while behind:
        feeds, tokens, features = [], [], []
        for state in behind:
            hidden = state.waiting[0]
            now = {layer: rows[:_CHUNK] for layer, rows in hidden.items()}
            later = {layer: rows[_CHUNK:] for layer, rows in hidden.items()}
            width = len(next(iter(now.values())))
            state.waiting = [later] if len(next(iter(later.values()))) else []
            text = state.sequence.tokens[state.rows + 1 : state.rows + 1 + width]
            feeds.append(LayerFeed.text(state.slot, state.rows, width))
            tokens.append(text)
            features.append(state.shared.committed(now, state.outputs))
            state.rows += width
        outputs = _catch_up_fixed(behind, tokens, features)
        if outputs is None:
            outputs = [rows[-1:] for rows in _forward(behind, feeds, tokens, features, 0)]
        for state, own in zip(behind, outputs, strict=True):
            state.outputs = own
        behind = [state for state in behind if state.waiting]


def _catch_up_fixed(
    behind: Seq[ContinuedState], tokens: Seq[Seq[int]], features: Seq[Tensor]
) -> Seq[Tensor] | None:
    """The outputs of each text's last row, [1, ...], by a forward of fixed shapes; None if none is used."""
    shared, widths = behind[0].shared, [len(own) for own in tokens]
    cache, like = shared.cache, features[0]
    if cache.shapes is None or not width_of(len(behind), max(widths)):
        return None
    slots = [state.slot for state in behind]
    with cache.fixed(dict(zip(slots, widths, strict=True)), kept=True) as window:
        fed = {slot: Rows(own) for slot, own in zip(slots, tokens, strict=True)}
        made = cache.shapes.run(
            partial(_continued, shared, like.shape[1:]),
            window,
            rows_of(window, fed),
            HiddenStates(like[0].numel(), like.dtype, like.device),
            (shared.revision(),),
            {slot: own.flatten(1) for slot, own in zip(slots, features, strict=True)},
        )
    places = [window.slots.index(slot) for slot in slots]
    ends = [place * window.width + width - 1 for place, width in zip(places, widths, strict=True)]
    last: Seq[Tensor] = made.logits.flatten(0, 1)[upload(ends, like.device)].split(1)
    return last


def _continued(shared: Continuing, shape: Seq[int], inputs: FixedInputs, key: tuple[int, ...]) -> Made:
    """The outputs of rows of committed places from the data in the inputs, [S, width, ...]."""
    at, rows = read_numbers(inputs.numbers, inputs.width), inputs.rows
    assert inputs.states is not None
    mask, _ = dense(at.trees, rows.columns, None)
    real = at.trees.real
    written = rows.at(torch.where(real, at.rows, rows.scratch))
    forward = Forward(written, at.trees.positions, mask, real.sum(dim=1))
    return Made(shared.run(forward, at.tokens, inputs.states.unflatten(2, shape), 0), {})


def _feed_fronts(active: Seq[ContinuedState]) -> None:
    """Feed the front of each tree: its tokens, and the outputs of their parents' rows.

    ``outputs[0]`` is the last committed row's, ``outputs[1 + row]`` that of a row of the tree.
    """
    feeds, tokens, features, depth = [], [], [], active[0].tree.depth  # that of all
    for state in active:
        tree, before = state.tree, len(state.parents)
        above = [tree.fed[tree.parents[node]] for node in tree.front]
        for row, node in enumerate(tree.front, before):
            tree.fed[node] = row
        state.parents += above
        sees = ancestor_mask(state.parents)[before:]
        feeds.append(LayerFeed(state.slot, [state.rows - 1 + tree.depth] * len(above), np.asarray(sees)))
        tokens.append([tree.tokens[node] for node in tree.front])
        features.append(gather(state.outputs, [1 + row for row in above]))
    for state, rows in zip(active, _forward(active, feeds, tokens, features, depth), strict=True):
        state.outputs = torch.cat([state.outputs, rows])


def _forward(
    active: Seq[ContinuedState], feeds: Seq[LayerFeed], tokens: Seq[Seq[int]], read: Seq[Tensor], depth: int
) -> list[Tensor]:
    """Run one forward for all sequences and return the outputs of each one's rows, [w, ...]."""
    shared = active[0].shared
    forward = shared.cache.begin(feeds)
    ids = forward.pad([upload(own, forward.positions.device) for own in tokens])
    outputs = shared.run(forward, ids, forward.pad(read), depth)
    forward.keep([len(own) for own in tokens])
    return forward.rows(outputs)


def _finish(state: ContinuedState) -> Draft:
    """Return the draft and remove its rows from the cache."""
    state.shared.cache.truncate(state.slot, state.rows)
    state.parents = []
    state.outputs = state.outputs[:1]
    return state.tree.finish()
