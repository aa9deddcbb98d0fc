"""A drafter's memory across requests: shared by all of an engine, by those of one name, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from outpace.sequence import Sequence

Memory = TypeVar("Memory")

_MOST = 16  # maximum number of named memories per engine; the least recently used is dropped


class Memories(Generic[Memory]):
    """The memories of an engine's drafter, by the request's ``Speculation.memory``.

    Args:
        new: returns an empty memory.
    """

    def __init__(self, new: Callable[[], Memory]) -> None:
        self.new = new
        self.shared = new()
        self._named: OrderedDict[str, Memory] = OrderedDict()

    def memory_of(self, sequence: Sequence) -> Memory:
        """The memory that a sequence reads and writes; for "off", a new one that is not shared."""
        name = sequence.params.drafts.memory
        if name is None:
            return self.shared
        if name == "off":
            return self.new()
        memory = self._named.pop(name, None)
        self._named[name] = memory = self.new() if memory is None else memory
        if len(self._named) > _MOST:
            self._named.popitem(last=False)
        return memory
