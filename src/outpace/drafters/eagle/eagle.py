"""EAGLE (Li et al. 2024; EAGLE-2, 2024; EAGLE-3, 2025): a layer that continues the target's hidden states.

Differences from the papers: drafts are drawn with the target's own noise by default, as with a draft model;
the tree is EAGLE-2's with ``expand``, otherwise a chain; no noise is added to features in training. After
each step the rows of a draft are removed from the drafter's cache, accepted or not, since the target's
features replace the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from outpace.core import Draft
from outpace.drafters.base import Drafter
from outpace.drafters.eagle.eagle_module import EagleModule
from outpace.drafters.support.draws import Draws, Noise, check_confidence, check_grown, log_confidence
from outpace.drafters.support.growth import Growth, grow
from outpace.drafters.support.layer_cache import Feed, LayerCache, Slot
from outpace.drafters.support.shapes import Growing, Shape, shape_of
from outpace.drafters.support.vocabulary import part_of
from outpace.embedded import nano_drafter_path
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import ancestor_mask

_CHUNK = 512  # rows of a prompt in one forward


@dataclass(frozen=True, kw_only=True)
class EagleShared(Growth):
    """Data that an engine's sequences share."""

    module: EagleModule
    cache: LayerCache


@dataclass
class EagleState:
    """A sequence's rows in the drafter's cache, and this step's tree.

    Attributes:
        waiting: layer -> the target's states at committed places whose rows are not fed yet.
        rows: number of committed rows in the cache, one per place except the root's.
        outputs: outputs of the last committed row and of each row of the tree, [1 + fed, hidden size].
        parents: parent of each of the tree's rows, as a row of the tree.
    """

    sequence: Sequence
    shared: EagleShared
    slot: Slot
    waiting: list[Mapping[int, Tensor]] = field(default_factory=list)
    rows: int = 0
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    parents: list[int] = field(default_factory=list)
    tree: Growing = field(init=False)


@dataclass(frozen=True)
class Eagle(Drafter[EagleState]):
    """EAGLE-1 or EAGLE-3, depending on the folder.

    Attributes:
        path: folder of a trained drafter: one of outpace, or a published EAGLE-3 in the layout of speculators
            or EAGLE, or a published EAGLE-1, or the name of one on the hub; or the module itself. None is the
            EAGLE-3 for the embedded model.
        num_speculative_tokens: tokens on a path of the draft, at least 1; by default the number it was
            trained for, or 5 if that is unknown.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens.
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

    when: ClassVar[str] = "with an EAGLE drafter of your model, published or trained"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Li et al. 2024, EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv "
        "2401.15077); Li et al. 2024, EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees "
        "(arXiv 2406.16858); Li et al. 2025, EAGLE-3: Scaling up Inference Acceleration of Large Language "
        "Models via Training-Time Test (arXiv 2503.01840)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = self._shape(1 if self.num_speculative_tokens is None else self.num_speculative_tokens)
        self.check_choices("draws")
        check_confidence("eagle", self.min_confidence)
        check_grown("eagle", shape.weighs, self.draws)

    def _shape(self, depth: int) -> Shape:
        return shape_of(depth, expand=self.expand, max_nodes=self.max_nodes, method="eagle")

    @property
    def trees(self) -> bool:
        return self.expand is not None

    def prepare(self, target: TargetModel) -> EagleShared:
        module = EagleModule.of(nano_drafter_path("eagle") if self.path is None else self.path, target)
        depth = self.num_speculative_tokens
        shape = self._shape(module.config.tokens if depth is None else depth)
        weight = next(module.parameters())
        weigh = shape.weighs or self.min_confidence > 0
        return EagleShared(
            shape=shape,
            draws=Draws(self.draws, weigh=weigh, independent=not shape.weighs),
            least=log_confidence(self.min_confidence),
            vocabulary=part_of(module.drafted, target.vocabulary),
            module=module,
            cache=LayerCache(module.config, module.config.depth, weight.dtype, weight.device),
        )

    def renew(self, shared: EagleShared, target: TargetModel) -> EagleShared:
        return replace(shared, cache=shared.cache.renewed())

    def hidden_layers(self, shared: EagleShared) -> tuple[int, ...]:
        return shared.module.hidden_layers

    def start(self, sequence: Sequence, shared: EagleShared) -> EagleState:
        return EagleState(sequence, shared, shared.cache.open())

    def stop(self, state: EagleState) -> None:
        state.shared.cache.close(state.slot)

    def read(self, states: Seq[EagleState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, own in zip(states, hidden, strict=True):
            state.waiting.append(own)

    def observe(self, states: Seq[EagleState], steps: Seq[Step]) -> None:
        self.read(states, [step.committed for step in steps])

    @torch.inference_mode()
    def propose(self, states: Seq[EagleState]) -> list[Draft]:
        for state in states:
            state.tree = state.shared.begin(state.sequence)
            if not state.waiting and not len(state.outputs):
                state.tree.layers = 0  # no state of the target is available yet
        active = [state for state in states if state.tree.layers > 0]
        _catch_up([state for state in active if state.waiting])
        while active:
            fronts = torch.cat([_front(state) for state in active])
            grow(active, active[0].shared.module.drafted_logits(fronts))
            active = [state for state in active if state.tree.front]
            if active:
                _feed_fronts(active)
        return [_finish(state) for state in states]


def _front(state: EagleState) -> Tensor:
    """Outputs of the rows of a tree's front, [n, hidden size]."""
    return state.outputs[[1 + state.tree.fed[node] for node in state.tree.front]]


def _catch_up(behind: Seq[EagleState]) -> None:
    """Feed the rows of places that were committed since the last draft.

    Row r reads the feature of place r and the token of place r + 1: ``width`` rows from ``rows`` on read
    tokens ``rows`` + 1 to ``rows`` + ``width``.
    """
    for state in behind:
        layers = state.waiting[0]
        whole = {layer: torch.cat([part[layer] for part in state.waiting]) for layer in layers}
        state.waiting = [whole]
    while behind:
        feeds, tokens, features = [], [], []
        for state in behind:
            hidden = state.waiting[0]
            now = {layer: rows[:_CHUNK] for layer, rows in hidden.items()}
            later = {layer: rows[_CHUNK:] for layer, rows in hidden.items()}
            width = len(next(iter(now.values())))
            state.waiting = [later] if len(next(iter(later.values()))) else []
            text = state.sequence.tokens[state.rows + 1 : state.rows + 1 + width]
            feeds.append(Feed.text(state.slot, state.rows, width))
            tokens.append(text)
            features.append(state.shared.module.features(now))
            state.rows += width
        for state, rows in zip(behind, _forward(behind, feeds, tokens, features), strict=True):
            state.outputs = rows[-1:]
        behind = [state for state in behind if state.waiting]


def _feed_fronts(active: Seq[EagleState]) -> None:
    """Feed the front of each tree: its tokens, and the outputs of their parents' rows.

    ``outputs[0]`` is the last committed row's, ``outputs[1 + row]`` that of a row of the tree.
    """
    feeds, tokens, features = [], [], []
    for state in active:
        tree, before = state.tree, len(state.parents)
        above = [tree.fed[tree.parents[node]] for node in tree.front]
        for row, node in enumerate(tree.front, before):
            tree.fed[node] = row
        state.parents += above
        sees = ancestor_mask(state.parents)[before:]
        feeds.append(Feed(state.slot, [state.rows - 1 + tree.depth] * len(above), np.asarray(sees)))
        tokens.append([tree.tokens[node] for node in tree.front])
        features.append(state.outputs[[1 + row for row in above]])
    for state, rows in zip(active, _forward(active, feeds, tokens, features), strict=True):
        state.outputs = torch.cat([state.outputs, rows])


def _forward(
    active: Seq[EagleState], feeds: Seq[Feed], tokens: Seq[Seq[int]], features: Seq[Tensor]
) -> list[Tensor]:
    """Run one forward for all sequences and return the outputs of each one's rows, [w, hidden size]."""
    module, cache = active[0].shared.module, active[0].shared.cache
    forward = cache.begin(feeds)
    ids = forward.pad([torch.tensor(own, device=forward.positions.device) for own in tokens])
    states = module.advance(ids, forward.pad(features), forward.positions, forward.mask, forward.store)
    forward.keep([len(own) for own in tokens])
    return forward.rows(states)


def _finish(state: EagleState) -> Draft:
    """Return the draft and remove its rows from the cache."""
    state.shared.cache.truncate(state.slot, state.rows)
    state.parents = []
    state.outputs = state.outputs[:1]
    return state.tree.finish()
