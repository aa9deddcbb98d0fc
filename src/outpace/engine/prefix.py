"""Prefix cache: rows of common prompt prefixes are computed once and copied into each request's slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

from outpace.cache import Cache, Slot

BLOCK = 32  # rows


class PrefixCache:
    """Blocks of 32 rows, keyed by the preceding block and the 32 tokens.

    A key contains the tokens themselves, so hashes cannot collide. The least recently used blocks are evicted
    first, and the last block of a text before its earlier ones, since a block is useless without those.

    Args:
        limit: maximum size of all blocks in bytes.
        row_bytes: bytes per row.
    """

    def __init__(self, limit: int, row_bytes: int) -> None:
        self._most = limit // max(BLOCK * row_bytes, 1)
        # (preceding block, or the salt if none; tokens) -> (number, rows); the least recently used first.
        self._blocks: OrderedDict[tuple[Any, tuple[int, ...]], tuple[int, Any]] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()

    def fill(self, cache: Cache, slot: Slot, tokens: Seq[int], salt: str | None = None) -> int:
        """Write the longest cached prefix of a text into an empty slot.

        Returns:
            The number of rows written, less than the number of tokens.
        """
        keys = []
        before: Any = (salt,)
        for key in _keys(tokens[:-1]):
            found = self._blocks.get((before, key))
            if found is None:
                break
            keys.append((before, key))
            before, block = found
            cache.write_rows(slot, block)
        self._touch(keys)
        return BLOCK * len(keys)

    def keep(self, cache: Cache, slot: Slot, tokens: Seq[int], salt: str | None = None) -> None:
        """Cache a slot's committed rows, which were computed from these tokens."""
        keys = []
        before: Any = (salt,)
        for place, key in enumerate(_keys(tokens[: cache.length(slot)])):
            found = self._blocks.get((before, key))
            if found is None:
                if place >= self._most:
                    break
                self._made += 1
                found = self._made, cache.read_rows(slot, BLOCK * place, BLOCK * (place + 1))
                self._blocks[before, key] = found
            keys.append((before, key))
            before = found[0]
        self._touch(keys)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _touch(self, keys: Seq[tuple[Any, tuple[int, ...]]]) -> None:
        """Mark blocks as used, a text's first block as the most recent, so that it is evicted last."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _keys(tokens: Seq[int]) -> list[tuple[int, ...]]:
    """The tokens of each full block."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [tuple(tokens[end - BLOCK : end]) for end in ends]
