"""Bases of targets and caches that wrap another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.targets.base import TargetModel
from outpace.targets.rows import HiddenStates


class WrappedTarget(TargetModel):
    """A target that runs an inner one; it shares no hidden states.

    Attributes:
        inner: the inner target.
    """

    inner: TargetModel

    def wrap(self, inner: TargetModel) -> None:
        """Set ``inner`` and describe this target as that one; what differs is set afterwards."""
        self.inner = inner
        self.vocabulary, self.context = inner.vocabulary, inner.context
        self.eos_token_ids, self.start = inner.eos_token_ids, inner.start
        self.max_leaves, self.why_chains_only = inner.max_leaves, inner.why_chains_only
        self.plan, self.quantised, self.stock = inner.plan, inner.quantised, inner.stock
        self.prompts_differ = inner.prompts_differ

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def file_type(self) -> str:
        return self.inner.file_type

    @property
    def layers(self) -> int:
        return self.inner.layers

    def revision(self) -> int:
        return self.inner.revision()

    def replaced(self) -> str | None:
        return self.inner.replaced()


class AroundTarget(WrappedTarget):
    """A target whose layers, hidden states, embeddings and head are those of an inner target."""

    def wrap(self, inner: TargetModel) -> None:
        super().wrap(inner)
        self.model = inner.model  # for drafters that load or build one like it

    @property
    def hidden(self) -> HiddenStates:
        return self.inner.hidden

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def head(self, states: Tensor) -> Tensor:
        return self.inner.head(states)

    def shapes_beside(self) -> Any:
        return self.inner.shapes_beside()


class WrappedCache(Cache):
    """A cache that stores its rows in an inner one.

    Attributes:
        inner: the inner cache.
    """

    def __init__(self, inner: Cache) -> None:
        self.inner = inner
        self.copies_rows, self.state_bytes = inner.copies_rows, inner.state_bytes
        self.max_slots, self.max_length, self.capacity = inner.max_slots, inner.max_length, inner.capacity

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def reserved(self) -> int:
        return self.inner.reserved

    @property
    def row_bytes(self) -> int:
        return self.inner.row_bytes

    @property
    def bytes(self) -> int:
        return self.inner.bytes

    def cost(self, rows: int) -> int:
        return self.inner.cost(rows)

    def allocate(self, rows: int = 0) -> Slot:
        return self.inner.allocate(rows)

    def free(self, slot: Slot) -> None:
        self.inner.free(slot)

    def length(self, slot: Slot) -> int:
        return self.inner.length(slot)

    def room(self, slot: Slot) -> int:
        return self.inner.room(slot)

    def reserve(self, slot: Slot, rows: int) -> None:
        self.inner.reserve(slot, rows)

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        self.inner.keep(paths)

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        self.inner.truncate(slot, length, path)

    def read_rows(self, slot: Slot, start: int, stop: int) -> Any:
        return self.inner.read_rows(slot, start, stop)

    def write_rows(self, slot: Slot, block: Any) -> None:
        self.inner.write_rows(slot, block)

    def copied_bytes(self, rows: int) -> int:
        return self.inner.copied_bytes(rows)

    def read_state(self, slot: Slot) -> Any:
        return self.inner.read_state(slot)

    def write_state(self, slot: Slot, state: Any) -> None:
        self.inner.write_state(slot, state)
