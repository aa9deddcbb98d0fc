"""Early exit: the target's first layers and a small adapter draft; the verification continues from there.

SPEED (Hooper et al. 2023) and Kangaroo (Liu et al. 2024). The lower layers run token by token; from their
hidden state an adapter and the target's own norm and head guess the next token. Keys, values and hidden
states of the lower layers are kept, and the upper layers verify the whole chain from them, so the lower
layers run only once per token. A chain ends early if the guess is not confident (Kangaroo's second early
exit).

Differences from the papers: by default drafts are drawn with the target's own noise. Kangaroo's adapter,
attention between two norms, is ``adapter=attention`` in training; the default is a feed-forward layer between
two norms, which has no cache. Without an adapter the target's norm and head read the lower layers' hidden
state directly. SPEED trains decoders with shared layer weights and pipelines several tokens through the
layers; here a stock model runs one token at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise, check_confidence, log_confidence
from outpace.drafters.support.growth import Growth
from outpace.drafters.support.layer_cache import LayerCache, LayerFeed, Slot
from outpace.drafters.support.shapes import shape_of
from outpace.drafters.support.vocabulary import part_of
from outpace.drafters.support.within import Within, place_of
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace_lab.drafters.layers.chains import draft_chains
from outpace_lab.drafters.layers.exit_adapter import Adapter, AdapterConfig
from outpace_lab.targets.split import SplitTarget

_CHUNK = 512  # rows of a text that attention reads at once


@dataclass(frozen=True, kw_only=True)
class ExitShared(Growth):
    """Data that an engine's sequences share: the target in two parts, the adapter, and its cache."""

    target: SplitTarget
    adapter: Adapter | None
    cache: LayerCache | None

    @torch.inference_mode()
    def step(self, states: Seq[ExitState]) -> Tensor:
        """Logits [n, drafted ids] after the last token of each chain."""
        slots = [state.place.slot for state in states]
        hidden = self.target.advance(states[0].place.cache, slots, [state.last for state in states])
        if self.adapter is None:
            return self.target.read_out(hidden)
        if self.cache is None:
            return self.adapter.head(self.adapter.advance(hidden))
        return self.adapter.head(torch.cat(self.attend(states, hidden.split(1))))

    def attend(self, states: Seq[ExitState], rows: Seq[Tensor]) -> list[Tensor]:
        """Feed each sequence's rows [w, hidden size] to the adapter's attention, and return the outputs."""
        assert self.adapter is not None and self.cache is not None
        feeds = []
        for state, own in zip(states, rows, strict=True):
            assert state.slot is not None
            feeds.append(LayerFeed.text(state.slot, self.cache.length(state.slot), len(own)))
        forward = self.cache.begin(feeds)
        out = self.adapter.advance(forward.pad(rows), forward.positions, forward.mask, forward.store(0))
        forward.keep([len(own) for own in rows])
        return forward.rows(out)

    @torch.inference_mode()
    def catch_up(self, states: Seq[ExitState]) -> None:
        """Remove the last draft's rows, and feed the rows committed since."""
        behind = []
        for state in states:
            if state.slot is not None and self.cache is not None:
                self.cache.truncate(state.slot, state.rows)
                behind.append(state)
        while behind := [state for state in behind if state.waiting]:
            rows = [torch.cat(state.waiting) for state in behind]
            for state, own in zip(behind, rows, strict=True):
                state.waiting = [own[_CHUNK:]] if len(own) > _CHUNK else []
                state.rows += min(len(own), _CHUNK)
            self.attend(behind, [own[:_CHUNK] for own in rows])


@dataclass
class ExitState(Within):
    """A sequence, and its slot in the cache of the adapter's attention.

    Attributes:
        rows: number of committed rows in the cache.
        waiting: hidden states [n, size] of committed rows that are not fed yet.
    """

    slot: Slot | None = None
    rows: int = 0
    waiting: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class EarlyExit(Drafter[ExitState]):
    """Drafting with the target's first layers.

    Attributes:
        path: a folder that ``outpace train early_exit`` wrote, or the adapter itself; None uses no adapter.
        layers: number of the target's layers that draft, at least 1 and not all; by default the adapter's
            number, or 2.
        num_speculative_tokens: tokens in the chain, at least 1; by default the adapter's, or 6.
        min_confidence: in [0, 1]: the chain continues only if the best token has at least this probability;
            by default the adapter's, or 0.6.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens.
    """

    path: Any = field(default=None, repr=False)
    layers: int | None = None
    num_speculative_tokens: int | None = None
    min_confidence: float | None = None
    draws: Noise = "coupled"

    when: ClassVar[str] = "for a model whose first layers predict well, as one trained for it"
    paper: ClassVar[str] = (
        "Hooper et al. 2023, SPEED: Speculative Pipelined Execution for Efficient Decoding (arXiv "
        "2310.12072); Liu et al. 2024, Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting "
        "(arXiv 2404.18911)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_least(layers=1, num_speculative_tokens=1)
        self.check_choices("draws")
        if self.min_confidence is not None:
            check_confidence("early_exit", self.min_confidence)

    def attach(self, target: TargetModel) -> SplitTarget:
        return SplitTarget(target, self._depth())

    def _depth(self) -> int:
        """Number of layers that draft, which an adapter determines by its training."""
        if self.path is None:
            return AdapterConfig.layers if self.layers is None else self.layers
        own: int = Adapter.config_of(self.path).layers
        if self.layers not in (None, own):
            raise OutpaceError(
                f"early_exit: the adapter is for {own} layers, not {self.layers}; leave layers out"
            )
        return own

    def prepare(self, target: TargetModel) -> ExitShared:
        if not isinstance(target, SplitTarget):
            raise OutpaceError("early_exit splits the target, so it drafts alone: use it by itself")
        adapter = None if self.path is None else Adapter.of(self.path, target.inner)
        # The values with which an adapter was measured; without one, the same defaults.
        own = AdapterConfig() if adapter is None else adapter.config
        tokens = (
            own.num_speculative_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens
        )
        least = own.min_confidence if self.min_confidence is None else self.min_confidence
        return ExitShared(
            shape=shape_of(tokens, method="early_exit"),
            draws=Draws(self.draws, weigh=least > 0),
            vocabulary=part_of(None if adapter is None else adapter.drafted.part, target.vocabulary),
            least=log_confidence(least),
            by_path=False,
            target=target,
            adapter=adapter,
            cache=None if adapter is None else cache_of(adapter),
        )

    def renew(self, shared: ExitShared, target: TargetModel) -> ExitShared:
        shared.target.forget()
        return replace(shared, cache=None if shared.cache is None else shared.cache.renewed())

    def hidden_layers(self, shared: ExitShared) -> tuple[int, ...]:
        return () if shared.cache is None else (shared.target.depth,)

    def start(self, sequence: Sequence, shared: ExitShared) -> ExitState:
        slot = None if shared.cache is None else shared.cache.open()
        return ExitState(sequence, shared, place_of(sequence, "early_exit"), slot=slot)

    def stop(self, state: ExitState) -> None:
        shared = _shared(state)
        shared.target.forget([state.place.slot])
        if shared.cache is not None and state.slot is not None:
            shared.cache.close(state.slot)

    def read(self, states: Seq[ExitState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, rows in zip(states, hidden, strict=True):
            state.waiting.append(rows[_shared(state).target.depth])

    def propose(self, states: Seq[ExitState]) -> list[Draft]:
        if not states:
            return []
        shared = _shared(states[0])
        shared.target.forget([state.place.slot for state in states])
        shared.catch_up(states)
        return draft_chains(states, shared.step)

    def observe(self, states: Seq[ExitState], steps: Seq[Step]) -> None:
        if states and _shared(states[0]).cache is not None:
            self.read(states, [step.committed for step in steps])


def cache_of(adapter: Adapter) -> LayerCache | None:
    """The cache of an adapter's attention; None if it has none."""
    if adapter.attends is None:
        return None
    weight = adapter.before.weight
    return LayerCache.of(adapter.attends, 1, weight, None)


def _shared(state: ExitState) -> ExitShared:
    shared = state.shared
    assert isinstance(shared, ExitShared)
    return shared
