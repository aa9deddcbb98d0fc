"""A drafter's memory across requests: shared by all of an engine, by those of one name, or by none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from outpace.sequence import Sequence

Memory = TypeVar("Memory")

_MOST = 16  # names whose memories an engine keeps: the most recently used


class Memories(Generic[Memory]):
    """The memories of an engine's drafter, by the name that a request gives (``Speculation.memory``).

    Args:
        new: makes an empty memory.
    """

    def __init__(self, new: Callable[[], Memory]) -> None:
        self.new = new
        self.shared = new()
        self._named: OrderedDict[str, Memory] = OrderedDict()

    def of(self, sequence: Sequence) -> Memory:
        """The memory that a sequence reads and writes; of "off", a new one that nothing else sees."""
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
