"""The cache protocol: committed rows of many sequences, rolled back by ``keep``.

``Cache`` is the interface for an engine and its drafters: slots, and the number of committed rows of each.
The location and format of the rows are private to a target and its cache.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from outpace.core import OutpaceError


class CacheFull(OutpaceError):
    """A cache has no room for a slot, or for more rows of one; its state is unchanged."""


class Slot:
    """A sequence's rows in a cache.

    Attributes:
        number: constant while the slot is in use, even if its rows move inside the cache.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Slot({self.number})"


class Cache(ABC):
    """Committed rows of many sequences.

    A target's forward adds rows after a slot's committed ones; ``keep`` closes the forward and commits some.

    Attributes:
        static: the cache does not grow.
        fixed: forwards over it may have fixed shapes.
        copies_rows: True if ``read_rows`` and ``write_rows`` are supported.
        state_bytes: bytes of what a slot has beside its rows, for ``read_state`` and ``write_state``; 0 if
            nothing. Where there is a state, committed rows cannot be dropped (``truncate``).
        max_slots: maximum number of slots in use; None for no limit.
        max_length: maximum number of rows per slot; None for no limit.
        capacity: maximum total number of reserved rows; None for no limit.
    """

    static: bool = False
    fixed: bool = False
    copies_rows: bool = False
    state_bytes: int = 0
    max_slots: int | None = None
    max_length: int | None = None
    capacity: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of slots in use."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Number of rows reserved now."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes per row."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes allocated now."""

    @abstractmethod
    def cost(self, rows: int) -> int:
        """Maximum number of rows reserved for a slot with room for ``rows`` rows that shares none of them.

        ``allocate(rows)`` succeeds while ``capacity - reserved`` is at least this.
        """

    @abstractmethod
    def allocate(self, rows: int = 0) -> Slot:
        """Take an empty slot into use, with room for at least ``rows`` rows (0: the cache's initial length).

        Raises:
            CacheFull: no slot is left, or too few rows.
        """

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Release a slot.

        Raises:
            ValueError: it is not in use.
        """

    @abstractmethod
    def length(self, slot: Slot) -> int:
        """Number of committed rows."""

    @abstractmethod
    def room(self, slot: Slot) -> int:
        """Number of rows that a slot has room for without moving, including committed ones."""

    @abstractmethod
    def reserve(self, slot: Slot, rows: int) -> None:
        """Make room for at least ``rows`` rows, including committed ones.

        Raises:
            CacheFull: too few rows are left.
        """

    @abstractmethod
    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        """Close the forward: commit each slot's path among the rows that it fed (0 .. width - 1).

        Paths are in ascending order; their first row is normally 0, the root. A slot without a path keeps
        none of the rows it fed.
        """

    @abstractmethod
    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        """Drop a slot's rows from ``length`` on, except those of a path, which move to ``length`` and after.

        Args:
            path: rows to keep, counted from row ``length``, in ascending order.

        Raises:
            ValueError: the slot has fewer rows.
        """

    @abstractmethod
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> AbstractContextManager[None]:
        """Context in which committed rows are temporary: on exit they are dropped, as for making a draft.

        No slot may be allocated or freed inside it. Dropped rows are zeroed, unless ``ahead`` is given.

        Args:
            ahead: slot -> number of rows already written after its committed ones, which count as committed
                from the start. On exit, dropped rows are then left until they are overwritten.
        """

    def read_rows(self, slot: Slot, start: int, stop: int) -> Any:
        """Copy a slot's committed rows ``start`` .. ``stop - 1``, for ``write_rows``.

        Raises:
            OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")

    def write_rows(self, slot: Slot, block: Any) -> None:
        """Append rows copied by ``read_rows``, as committed ones.

        Raises:
            CacheFull: too few rows are left. OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")

    def copied_bytes(self, rows: int) -> int:
        """Bytes of a copy of this number of rows (``read_rows``)."""
        return rows * self.row_bytes

    def read_state(self, slot: Slot) -> Any:
        """Copy a slot's state after its committed rows, for ``write_state``.

        Raises:
            OutpaceError: slots have no state (``state_bytes`` is 0).
        """
        raise OutpaceError(f"the slots of a {type(self).__name__} have no state")

    def write_state(self, slot: Slot, state: Any) -> None:
        """Replace a slot's state by one that ``read_state`` copied after the same rows.

        Raises:
            OutpaceError: slots have no state (``state_bytes`` is 0).
        """
        raise OutpaceError(f"the slots of a {type(self).__name__} have no state")


def first_room(
    slots: int, length: int, capacity: int | None, rows_of: Callable[[int, int], int] = operator.mul
) -> tuple[int, int]:
    """Slots and rows per slot that a cache begins with, each at least 1.

    Args:
        rows_of: number of rows that these reserve.

    Raises:
        OutpaceError: they exceed the capacity.
    """
    first = max(slots, 1), max(length, 1)
    if capacity is not None and rows_of(*first) > capacity:
        raise OutpaceError(
            f"{slots} slots of {length} rows are more than the capacity of {capacity} rows; make "
            "the cache with fewer slots, less length or more capacity"
        )
    return first


def next_slot(used: Iterable[Slot]) -> Slot:
    """A slot with the lowest number that none of these has."""
    numbers = {slot.number for slot in used}
    return Slot(next(number for number in itertools.count() if number not in numbers))


class Place(NamedTuple):
    """Location of a sequence's rows: a cache and a slot in it."""

    cache: Cache
    slot: Slot

    @property
    def rows(self) -> int:
        """Number of committed rows."""
        return self.cache.length(self.slot)
