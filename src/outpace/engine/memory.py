"""An engine's memory: the cache within a limit, and the rows of prefixes that requests share."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from outpace._version import __version__
from outpace.cache import Cache, KVCache, Slot
from outpace.core import OutpaceError
from outpace.engine import prefix_file
from outpace.engine.guards import whole_number
from outpace.engine.prefix import BLOCK, PrefixCache
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.targets.hardware import free_bytes

_UNKNOWN = 2**28  # bytes of a prefix cache that is a share of an unknown amount of free memory


class Memory:
    """An engine's cache, and its prefix cache.

    Args:
        target: whose rows they hold.
        limit: maximum memory of the cache, see ``capacity_of``.
        slots, length: initial slots of the cache, and rows per slot.
        prefix_cache: bytes for the rows of shared prompt prefixes, or, below 1, a share of the free memory;
            None disables them.

    Attributes:
        room: slots and length that the cache was made with.

    Raises:
        OutpaceError: an argument is invalid, or the target's cache does not copy rows.
    """

    cache: Cache
    room: tuple[int, int]

    def __init__(
        self, target: TargetModel, limit: Any, slots: int, length: int, prefix_cache: float | None
    ) -> None:
        self._target = target
        self._limit = limit
        self.renew(slots, length)
        self._revision: int | None = None  # of the weights that rows in the prefix cache were computed with
        self._began: WeakKeyDictionary[Slot, int] = WeakKeyDictionary()  # and rows from a slot's first on
        self.prefixes: PrefixCache | None = None
        if prefix_cache is not None:
            self.prefixes = PrefixCache(_size_of(prefix_cache, target.device))
            if not self.cache.copies_rows:
                raise OutpaceError(f"the cache of {target.name} does not copy rows; leave prefix_cache out")

    def renew(self, slots: int, length: int) -> None:
        """Replace the cache by a new one, within the limit.

        The old one is freed first, so an engine whose call to this failed has none until the next.
        """
        vars(self).pop("cache", None)
        self.cache = self._target.new_cache(slots, length)
        capacity = None if self.cache.static else capacity_of(self._limit, self.cache, self._target.device)
        if capacity is not None:
            needed = self.cache.reserved
            del self.cache
            self.cache = self._target.new_cache(slots, length, max(capacity, needed))
        self.room = (slots, length)

    @property
    def use(self) -> float | None:
        """Reserved share of the capacity; None if it has no limit."""
        return self.cache.reserved / self.cache.capacity if self.cache.capacity else None

    def fill(self, slot: Slot, sequence: Sequence) -> None:
        """Write what the prefix cache has of a sequence's rows into its empty slot.

        Raises:
            OutpaceError: the target no longer fits its model.
        """
        keys = self._keys(sequence)
        if self.prefixes is not None and keys is not None:
            # Here, since the first forward of a slot with rows in it does not look for changes.
            revision = self._target.revision()
            if revision != self._revision:
                self.prefixes.clear()
                self._revision = revision
            self._began[slot] = revision
            shared = keys[: self._shared(sequence) + 1]
            sequence.stats.cached_tokens += self.prefixes.fill(self.cache, slot, shared, sequence.salt)

    def keep(self, slot: Slot, sequence: Sequence) -> None:
        """Store a sequence's rows in the prefix cache, unless weights have changed since its first."""
        if self.prefixes is not None and self._began.get(slot) == self._revision:
            keys = self._keys(sequence)
            assert keys is not None  # since fill() has found some
            shared = keys[: self._shared(sequence)]
            self.prefixes.keep(self.cache, slot, shared, sequence.salt, sequence.client)

    def _keys(self, sequence: Sequence) -> Seq[Hashable] | None:
        """The keys of a sequence's rows; None if they are not shared."""
        return self._target.row_keys(sequence.tokens, sequence.source) if self.prefixes is not None else None

    def save(self, folder: Path) -> None:
        """Write the prefix cache to a file in a folder.

        Raises:
            OutpaceError: there is none, its rows are not tensors alone, or the file cannot be written.
        """
        prefix_file.write(folder, self.stored().entries(), self._about())

    def restore(self, folder: Path) -> None:
        """Fill the prefix cache from a file in a folder, if there is one.

        Raises:
            OutpaceError: as ``save``, or the file is of another model, version or machine.
        """
        prefixes = self.stored()
        found = prefix_file.read(folder, self._about(), self._target, self.cache)
        prefixes.restore(found, self.cache.copied_bytes(BLOCK))
        self._revision = self._target.revision()

    def stored(self) -> PrefixCache:
        """The prefix cache, if it can be stored.

        Raises:
            OutpaceError: it cannot.
        """
        if self.prefixes is None:
            raise OutpaceError("there is no prefix cache to store; make one, or leave the store out")
        if self.cache.state_bytes or not isinstance(self.cache, KVCache):
            raise OutpaceError(f"the prefix cache of {self._target.name} is not stored; leave the store out")
        return self.prefixes

    def _about(self) -> dict[str, str]:
        """What rows depend on, besides what a comparison shows."""
        versions = f"{__version__} with torch {torch.__version__}"
        kind = f"{self._target.dtype} {self._target.quantised or ''}".strip()
        return {"model": self._target.name, "type of weights": kind, "version": versions}

    def _shared(self, sequence: Sequence) -> int:
        """The number of a sequence's first rows that may be shared: rows of steps may have other bits."""
        rows = sequence.prompt_length if self._target.prompts_differ else len(sequence.tokens)
        return rows - 1


def _size_of(prefix_cache: Any, device: torch.device) -> int:
    """The size in bytes of a prefix cache, of which a share of the free memory may be given."""
    if isinstance(prefix_cache, float) and 0 < prefix_cache < 1:
        free = free_bytes(device)
        return _UNKNOWN if free is None else max(1, int(prefix_cache * free))
    return whole_number("prefix_cache", prefix_cache, 1)


def capacity_of(memory: Any, cache: Cache, device: torch.device) -> int | None:
    """Number of rows that a cache may reserve; None for no limit.

    Args:
        memory: bytes; below 1, a share of the free memory; None for no limit.

    Raises:
        OutpaceError: the value is invalid.
    """
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
        raise OutpaceError(
            f"memory must be a number of bytes, a share of the free memory (below 1), or None; not {memory!r}"
        )
    free = free_bytes(device) if memory < 1 else 1
    if free is None or not cache.row_bytes:
        return None
    return int(memory * free) // cache.row_bytes
