"""Prefix cache: rows of common prompt prefixes are computed once and copied into each request's slot."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from outpace.cache import Cache, Slot

BLOCK = 32  # rows
_CLIENTS = 8  # that used their blocks last, of which none evicts those of another that has fewer
_Key = tuple[Any, tuple[Hashable, ...]]


@dataclass
class _Block:
    """Rows of a text.

    Attributes:
        number: identifies it in the keys of the blocks that follow.
        rows: as ``Cache.read_rows`` returned them.
        bytes: of what is held here.
        owner: the client whose request they were computed for.
        state: the slot's state after them, if it has one and its rows have ended here.
    """

    number: int
    rows: Any
    bytes: int
    owner: str = ""
    state: Any = None


class Entry(NamedTuple):
    """A block, as it is stored outside of a cache.

    Attributes:
        number: identifies it.
        before: the preceding block's number, or a tuple of the salt alone.
        tokens: the keys of its rows.
        rows: as ``Cache.read_rows`` returned them.
    """

    number: int
    before: Any
    tokens: tuple[Hashable, ...]
    rows: Any


class PrefixCache:
    """Blocks of 32 rows, keyed by the preceding block and the 32 tokens.

    A key contains the tokens themselves, so hashes of texts cannot collide; for a row of an image it has a
    digest of what the model is given there, too (``TargetModel.row_keys``). The least recently used blocks
    are evicted first, and the last block of a text before its earlier ones, since a block is useless without
    those. One client cannot evict the blocks of all others: of the 8 clients that used theirs last, the one
    that has most gives way.

    Where slots have a state beside their rows, a text can only be taken up to a block with a state: that is
    where a chunk of a prompt has ended. A state may need far more memory than its block's rows.

    Args:
        limit: maximum size of all blocks in bytes; also an attribute.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes: Counter[str] = Counter()  # by owner
        # (preceding block, or the salt if none; tokens) -> block; the least recently used first.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._owned: OrderedDict[str, OrderedDict[_Key, None]] = OrderedDict()  # the same by owner
        self._made = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self._owned.clear()
        self._bytes.clear()

    def entries(self) -> Iterator[Entry]:
        """All blocks, the least recently used first."""
        for (before, tokens), block in self._blocks.items():
            yield Entry(block.number, before, tokens, block.rows)

    def restore(self, entries: Iterable[Entry], size: int) -> None:
        """Take the blocks of another cache of the same model in place of those here.

        Args:
            size: bytes of a block.
        """
        self.clear()
        for entry in entries:
            self._add((entry.before, entry.tokens), _Block(entry.number, entry.rows, size))
            self._made = max(self._made, entry.number)
        self._evict()

    def fill(self, cache: Cache, slot: Slot, tokens: Seq[Hashable], salt: str | None = None) -> int:
        """Write the longest cached prefix of a text into an empty slot.

        Returns:
            The number of rows written, less than the number of tokens.
        """
        found = self._found(tokens[:-1], salt)
        while cache.state_bytes and found and found[-1][1].state is None:
            found.pop()
        for _, block in found:
            cache.write_rows(slot, block.rows)
        if cache.state_bytes and found:
            cache.write_state(slot, found[-1][1].state)
        self._touch([key for key, _ in found])
        return BLOCK * len(found)

    def keep(
        self, cache: Cache, slot: Slot, tokens: Seq[Hashable], salt: str | None = None, owner: str = ""
    ) -> None:
        """Cache a slot's committed rows, which were computed from these tokens, for a client."""
        length = min(cache.length(slot), len(tokens))
        if cache.state_bytes and (length % BLOCK or length != cache.length(slot)):
            return
        found = self._found(tokens[:length], salt)
        size = cache.copied_bytes(BLOCK)
        keys = [key for key, _ in found]
        before: Any = found[-1][1].number if found else (salt,)
        for key in _keys(tokens[:length])[len(found) :]:
            if (len(keys) + 1) * size > self.limit:
                break
            self._made += 1
            rows = cache.read_rows(slot, BLOCK * len(keys), BLOCK * (len(keys) + 1))
            self._add((before, key), _Block(self._made, rows, size, owner))
            keys.append((before, key))
            before = self._made
        if cache.state_bytes and keys and BLOCK * len(keys) == length:
            last = self._blocks[keys[-1]]
            if last.state is None:
                last.state = cache.read_state(slot)
                last.bytes += cache.state_bytes
                self._bytes[last.owner] += cache.state_bytes
        self._touch(keys)
        self._evict()

    def _evict(self) -> None:
        while self._bytes.total() > self.limit:
            owner = next(iter(self._owned))
            if len(self._owned) <= _CLIENTS:
                owner = max(self._owned, key=self._bytes.__getitem__)
            key, _ = self._owned[owner].popitem(last=False)
            self._bytes[owner] -= self._blocks.pop(key).bytes
            if not self._owned[owner]:
                del self._owned[owner], self._bytes[owner]

    def _found(self, tokens: Seq[Hashable], salt: str | None) -> list[tuple[_Key, _Block]]:
        """The cached blocks that a text begins with, by their keys."""
        found = []
        before: Any = (salt,)
        for tokens_of_block in _keys(tokens):
            key = before, tokens_of_block
            if (block := self._blocks.get(key)) is None:
                break
            found.append((key, block))
            before = block.number
        return found

    def _add(self, key: _Key, block: _Block) -> None:
        self._blocks[key] = block
        self._owned.setdefault(block.owner, OrderedDict())[key] = None
        self._bytes[block.owner] += block.bytes

    def _touch(self, keys: Seq[_Key]) -> None:
        """Mark blocks as used, a text's first block as the most recent, so that it is evicted last."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
            owner = self._blocks[key].owner
            self._owned[owner].move_to_end(key)
            self._owned.move_to_end(owner)


def _keys(tokens: Seq[Hashable]) -> list[tuple[Hashable, ...]]:
    """The tokens of each full block."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [tuple(tokens[end - BLOCK : end]) for end in ends]
