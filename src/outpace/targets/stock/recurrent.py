"""Stock models whose layers keep a recurrent state: Mamba, gated delta rules, short convolutions, hybrids.

A draft's rejected rows cannot be taken out of a state. So states are not written into while a draft is
verified: each row of the tree starts from its parent's state, and the state after the last accepted row
becomes the sequence's (``inputs/state_rows.py``, ``cache/states.py``). Nothing is undone or replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outpace.cache import KVCache, Slot, StateCache, StateWindow, Window
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.config import family
from outpace.targets.inputs.forward import CacheAdapter, device_of, rows_of
from outpace.targets.inputs.refusals import refuse_by_config
from outpace.targets.inputs.state_rows import StateAdapter
from outpace.targets.inputs.states import with_states
from outpace.targets.stock.causal import CausalTarget

_SHARE = 16  # of the free memory, a 16th may hold the states of a tree's nodes
_BUDGET = 1 << 30  # and this many bytes where it is not known
_PREFIXES = 32  # rows of a block of a prefix cache, which shares states after whole blocks


class RecurrentTarget(CausalTarget):
    """A decoder-only model of which some layers keep a recurrent state, as a target of trees.

    Its steps run on a copy of its modules, with the same weights, in which convolutions and recurrences are
    computed by functions of outpace's, each row from its parent's state. Where a family computes prompts in
    chunks, rows of prompts are computed so too, and have other bits than rows of steps.

    The arguments are those of ``CausalTarget``.

    Raises:
        UnsupportedModel: named by family, with the reason. OutpaceError: ``static`` or ``stock``.
    """

    _keeps_states = True
    _never_fixed = "its states are not of fixed shapes"
    _never_flat = "its states are those of windows"
    _never_trees = "the kernel is tested for layers without states only"
    not_rounded = "it keeps a recurrent state, of which no rows of a draft can be dropped"

    def __init__(self, model: Any, **options: Any) -> None:
        for name, why in (
            ("static", "its states are not of fixed shapes"),
            ("stock", "its recurrences are computed here, for trees"),
        ):
            if options.get(name) is True:
                raise OutpaceError(f"{family(model)} keeps a recurrent state: {why}; leave {name} out")
        refuse_by_config(model, states=True)
        free = free_bytes(device_of(model.get_input_embeddings()))
        self._budget = _BUDGET if free is None else free // _SHARE
        super().__init__(model, **options)

    def _prepared(self, model: Any) -> Any:
        return super()._prepared(with_states(model))

    @property
    def prompts_differ(self) -> bool:  # type: ignore[override]
        return self._modules.grid > 0

    @property
    def prompt_step(self) -> int:  # type: ignore[override]
        return math.lcm(self._modules.grid or 1, _PREFIXES)

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        return sum(shape.bytes for shape in self._modules.states.values())

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> StateCache:
        modules = self._modules
        return StateCache(modules.shapes, list(modules.states.values()), slots, length, capacity)

    def _windows(self, cache: KVCache, batch: Batch) -> Sequence[Window]:
        if batch.fed.any():
            raise OutpaceError("recurrent layers take a tree in one forward, not in several")
        alone = [[slot] for slot in batch.slots if self._prompt_rows(batch, slot)]
        others = [slot for slot in batch.slots if not self._prompt_rows(batch, slot)]
        return cache.begin(batch.width_by_slot, self._modules.row_step, [others, *alone])

    def _prompt_rows(self, batch: Batch, slot: Slot) -> int:
        """The number of a slot's first rows that are computed in chunks."""
        return int(batch.prompts[batch.slots.index(slot)]) if self.prompts_differ else 0

    def _adapter(self, window: Window, batch: Batch) -> CacheAdapter:
        assert isinstance(window, StateWindow)
        modules = self._modules
        fed = [slot for slot, width in zip(window.slots, window.widths, strict=True) if slot and width]
        return StateAdapter(
            window,
            modules.cache_layers,
            rows_of(window, batch.rows),
            {key: index for index, key in enumerate(modules.states)},
            self._prompt_rows(batch, fed[0]) if len(fed) == 1 else 0,
            self._budget,
        )

    # -- what a state does not allow ---------------------------------------------------------------------

    def some_layers(self, layers: Sequence[int], bare: bool = False) -> CausalTarget:
        raise self._refused("some of its layers cannot run on the states of all")

    def over_window(self, sinks: int, recent: int) -> CausalTarget:
        raise self._refused("it has all of the text in its states, not a window of it")

    def _need_weights(self) -> None:
        raise self._refused("it cannot be trained, or read without a cache")

    def _refused(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{family(self.model)} keeps a recurrent state, so {why}; use a drafter that reads tokens"
        )
