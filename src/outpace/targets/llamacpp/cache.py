"""Rows of many texts in llama.cpp's unified cache: each path of a draft is a separate sequence.

A cell of that cache may belong to many sequences, and a row attends to the cells of its first sequence at
positions up to its own. So each leaf of a draft uses a *lane*, a sequence number: it contains the text's
cells and those of the nodes on the path to the leaf. A node above several leaves is one row in all their
lanes, at position committed rows + depth. Rejected rows are removed from their lanes, which frees the cells;
accepted ones are shared with the text's own lane.

The order of cells. llama.cpp sums attention in the order of the cells, which determines the rounding. To keep
a text's rows in the order of their positions, as in plain decoding, no cell below one in use is ever free: of
the rows of a forward, those after the first rejected one are copied down, and the rows of a text that has
ended stay in place, in a separate sequence, until cells run short and all texts are rewritten. (A drafter's
tree that is kept whole and cut back later leaves gaps; that changes only the rounding of drafts, and no
token.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.cache import Cache, CacheFull, Slot
from outpace.cache.base import first_room, next_slot
from outpace.core import OutpaceError
from outpace.targets.batch import Batch
from outpace.targets.llamacpp.library import LlamaContext
from outpace.targets.llamacpp.texts import FedRows, Text, TextLane, common_prefix, is_path
from outpace.targets.rows import Rows
from outpace.tree import depths, is_chain, path_to

_ENDED = 1  # the sequence of the rows of texts that have ended


class LlamaCache(Cache):
    """Rows in a context of llama.cpp, which is replaced by a larger one when more cells are needed.

    Args:
        make: called with a number of cells; returns a context with at least that many.
        slots: number of slots to make room for.
        length: rows per slot to make room for.
        row_bytes: bytes per row.
        capacity: maximum total number of reserved rows; None for no limit.

    Raises:
        OutpaceError: the capacity is less than ``slots * length``, or memory is too small for these rows.
    """

    copies_rows = True

    def __init__(
        self,
        make: Callable[[int], LlamaContext],
        slots: int,
        length: int,
        row_bytes: int,
        capacity: int | None = None,
    ) -> None:
        places, self._length = first_room(slots, length, capacity)
        self.capacity = capacity
        self.context = make(places * self._length)
        self._make, self._row_bytes = make, row_bytes
        # Half of the sequences are for texts, which leaves about as many for the leaves of drafts.
        self.max_slots = self.context.sequences // 2
        self._free = list(range(self.context.sequences - 1, _ENDED, -1))
        self._ended = 0  # cells of texts that have ended
        self._texts: dict[Slot, Text] = {}
        self._order: list[Slot] = []  # order of the slots in the last forward

    # -- memory ------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return sum(text.need for text in self._texts.values())

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def bytes(self) -> int:
        return self.context.cells * self._row_bytes

    def cost(self, rows: int) -> int:
        return rows

    def _make_room(self, more: int) -> None:
        """Reserve this many more rows."""
        rows = self.reserved + more
        if self.capacity is not None and rows > self.capacity:
            raise CacheFull(
                f"{more} rows do not fit: {self.reserved} of {self.capacity} are reserved; wait for others "
                "to end, or make the cache with more capacity"
            )
        if rows <= self.context.cells:
            return
        try:
            larger = self._make(max(rows, min(2 * self.context.cells, self.capacity or 2 * rows)))
        except OutpaceError as error:
            raise CacheFull(str(error)) from error
        larger.take_over(self.context)
        self.context = larger

    def _make_cells(self, rows: int) -> None:
        """Free the cells of ended texts if this many rows do not fit after them."""
        if not self._ended:
            return
        used = sum(text.stem + len(text.tree) for text in self._texts.values())
        if used + self._ended + rows <= self.context.cells:
            return
        self._ended = 0
        if any(text.tree for text in self._texts.values()):
            self.context.remove(_ENDED, 0)
            return
        texts = list(self._texts.values())
        copies = [self.context.read(text.lanes[0].number, 0, text.stem) for text in texts]
        self.context.clear()
        for text, data in zip(texts, copies, strict=True):
            for lane in text.lanes:
                lane.rows = 0
            self._append(text, data, 0, text.stem)

    def _append(self, text: Text, data: NDArray[np.uint8], start: int, stop: int) -> None:
        """Commit copied rows ``start`` .. ``stop - 1``, after the text's others."""
        if start < stop:
            self.context.write(data, text.lanes[0].number, start, stop)
        text.stem = text.lanes[0].rows = stop

    # -- slots -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._texts)

    def _text(self, slot: Slot) -> Text:
        if slot not in self._texts:
            raise ValueError("this slot is not in use")
        return self._texts[slot]

    def allocate(self, rows: int = 0) -> Slot:
        if self.max_slots is not None and len(self) >= self.max_slots:
            raise CacheFull(f"llama.cpp's cache holds {self.max_slots} texts here; wait for others to end")
        need = rows or self._length
        self._make_room(need)
        slot = next_slot(self._texts)
        self._texts[slot] = Text(need, [self._lane()])
        return slot

    def free(self, slot: Slot) -> None:
        text = self._text(slot)
        for lane in text.lanes:
            self.context.share(lane.number, _ENDED, 0, lane.rows + len(lane.path))
            self._give_back(lane)
        self._ended += text.stem + len(text.tree)
        del self._texts[slot]
        if not self._texts:
            self.context.clear()
            self._ended = 0

    def length(self, slot: Slot) -> int:
        return self._text(slot).length

    def room(self, slot: Slot) -> int:
        return self._text(slot).need

    def reserve(self, slot: Slot, rows: int) -> None:
        text = self._text(slot)
        if rows > text.need:
            self._make_room(rows - text.need)
            text.need = rows

    # -- lanes -------------------------------------------------------------------------------------------

    def _lane(self, busy: Collection[TextLane] = ()) -> TextLane:
        """A free lane, or one that a text keeps for later drafts and that is not ``busy``."""
        if not self._free:
            spare = [
                (text, lane)
                for text in self._texts.values()
                for lane in text.lanes[1:]
                if not lane.path and lane not in busy
            ]
            if not spare:
                raise OutpaceError(
                    f"a draft of too many branches: llama.cpp keeps {self.context.sequences - 1} at once, of "
                    "all texts together; draft fewer branches, or decode fewer prompts together"
                )
            text, lane = max(spare, key=lambda pair: len(pair[0].lanes))
            text.lanes.remove(lane)
            self._give_back(lane)
        return TextLane(self._free.pop())

    def _give_back(self, lane: TextLane) -> None:
        self.context.remove(lane.number, 0)
        self._free.append(lane.number)

    def _cut(self, lane: TextLane, rows: int, path: Sequence[int] = ()) -> None:
        """Reduce a lane to ``rows`` rows of the stem and the first nodes of its path, ``path``."""
        keep = rows + len(path)
        if keep < lane.rows + len(lane.path):
            self.context.remove(lane.number, keep)
        lane.rows, lane.path = min(lane.rows, rows), list(path)

    # -- the forward -------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> list[FedRows]:
        """Open a forward; returns the places of each slot's rows.

        Raises:
            CacheFull: there is no room for them. OutpaceError: more branches than llama.cpp supports.
        """
        for slot, width in zip(batch.slots, batch.widths.tolist(), strict=True):
            self.reserve(slot, self._text(slot).length + width)
        self._make_cells(len(batch.tokens))
        self._order = list(batch.slots)
        return [self._rows_of(self._text(slot), row) for slot, row in batch.rows.items()]

    def _rows_of(self, text: Text, row: Rows) -> FedRows:
        count = len(row.tokens)
        self._hang(text, row.fed)
        parents = list(row.tree)
        before = len(text.tree)
        if is_chain(parents) and not before:
            text.tree, text.fed = parents, count
            main = text.lanes[0]
            main.path = list(range(count))
            return FedRows(list(range(text.stem, text.stem + count)), [[main.number]] * count)
        inner = set(parents)
        paths = [path_to(parents, node) for node in range(len(parents)) if node not in inner]
        text.tree, text.fed = parents, count
        members: list[list[int]] = [[] for _ in parents]
        for lane, path in self._assigned(text, paths, before):
            for node in path:
                members[node].append(lane.number)
        return FedRows([text.stem + depth for depth in depths(parents)[before:]], members[before:])

    def _hang(self, text: Text, fed: Sequence[int]) -> None:
        """Make the text's last rows, with these parents, the tree that a forward continues."""
        if text.tree:
            step = len(text.tree) - len(fed)  # first rows of the tree, a chain that joins the stem
            if step < 0 or not is_chain(text.tree[:step]) or any(p < step - 1 for p in text.tree[step:]):
                raise ValueError("rows must follow a chain, or continue the tree that was kept")
            self._raise_stem(text, step)
            if text.tree != list(fed):
                raise ValueError("rows continue another tree than the one that was kept")
        elif fed:
            if not is_chain(fed):
                raise ValueError("rows continue another tree than the one that was kept")
            text.stem -= len(fed)
            text.tree = list(fed)
            for lane in text.lanes[1:]:
                self._cut(lane, min(lane.rows, text.stem))
            text.lanes[0].rows, text.lanes[0].path = text.stem, list(range(len(fed)))

    def _raise_stem(self, text: Text, step: int) -> None:
        text.stem += step
        text.tree = [parent - step for parent in text.tree[step:]]
        for lane in text.lanes:
            if lane.path:
                lane.rows, lane.path = text.stem, [node - step for node in lane.path[step:]]

    def _assigned(self, text: Text, paths: list[list[int]], before: int) -> list[tuple[TextLane, list[int]]]:
        """A lane for each path of a tree, containing the text and the path's nodes before ``before``."""
        left, found = list(paths), []
        for lane in text.lanes:  # a lane with a path continues it
            if lane.path or lane is text.lanes[0]:
                path = next(path for path in left if path[: len(lane.path)] == lane.path)
                left.remove(path)
                found.append((lane, path))
        spare = [lane for lane in text.lanes[1:] if not lane.path]
        for path in left:
            if spare:
                lane = spare.pop(0)
            else:
                lane = self._lane([lane for lane, _ in found])
                text.lanes.append(lane)
            found.append((lane, path))
        for lane, path in found:
            self.context.share(text.lanes[0].number, lane.number, lane.rows, text.stem)
            lane.rows = text.stem
            there = [node for node in path if node < before]
            if len(lane.path) < len(there):
                source = next(other for other, _ in found if other.path[: len(there)] == there)
                start = text.stem + len(lane.path)
                self.context.share(source.number, lane.number, start, text.stem + len(there))
                lane.path = there
        for lane, path in found:
            lane.path = path
        return found

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        for slot, path in paths.items():
            count = self._text(slot).fed
            if len(path) and not 0 <= min(path) <= max(path) < count:
                raise ValueError(f"{slot} fed {count} rows, so it cannot keep {list(path)}")
        opened = {slot: text for slot, text in self._texts.items() if text.fed}
        if all(len(text.tree) == len(paths.get(slot, ())) == 1 for slot, text in opened.items()):
            for text in opened.values():  # the rows of plain steps stay in place
                text.stem += 1
                text.lanes[0].rows, text.lanes[0].path = text.stem, []
                text.tree, text.fed = [], 0
            return
        if all(len(text.tree) == text.fed for text in opened.values()) and self._commit(opened, paths):
            return
        for slot, text in opened.items():
            held, kept = len(text.tree) - text.fed, list(paths.get(slot, ()))
            nodes = [*range(held), *(held + row for row in kept)]
            if is_path(text.tree, nodes):
                self._settle(text, nodes)
            elif len(kept) == text.fed:
                text.fed = 0
            elif not kept:
                self._shed(text)
            else:
                raise ValueError(f"the rows kept are neither a path nor all of those fed: {kept}")

    def _commit(self, opened: Mapping[Slot, Text], paths: Mapping[Slot, Sequence[int]]) -> bool:
        """Commit a path of each text, without gaps between cells; return False if not all are paths."""
        kept = {slot: list(paths.get(slot, ())) for slot in self._order if slot in opened}
        if not all(is_path(opened[slot].tree, path) for slot, path in kept.items()):
            return False
        gap, moved = False, []
        for slot, path in kept.items():
            text = opened[slot]
            stay = 0 if gap else common_prefix(path, range(text.fed))
            gap = gap or stay < text.fed
            if stay < len(path):
                start, stop = text.stem + stay, text.stem + len(path)
                winner = next(lane for lane in text.lanes if lane.path[: len(path)] == path)
                moved.append((text, self.context.read(winner.number, start, stop), start, stop))
            kept[slot] = path[:stay]
        for slot, path in kept.items():
            self._settle(opened[slot], path)
        for text, data, start, stop in moved:
            self._append(text, data, start, stop)
        return True

    def abandon(self) -> None:
        """Close a failed forward; none of its rows stays."""
        for text in self._texts.values():
            if text.fed:
                self._shed(text)

    def _shed(self, text: Text) -> None:
        """Remove the rows of the open forward from a tree that was kept."""
        held = len(text.tree) - text.fed
        for lane in text.lanes:
            self.context.remove(lane.number, text.stem + sum(node < held for node in lane.path))
            lane.path = [node for node in lane.path if node < held]
        text.tree, text.fed = text.tree[:held], 0
        if is_path(text.tree, range(held)):
            self._settle(text, list(range(held)))

    def _settle(self, text: Text, path: list[int]) -> None:
        """Commit a path of the text's tree, and remove the rest."""
        main = text.lanes[0]
        winner = next(lane for lane in text.lanes if lane.path[: len(path)] == path)
        shared = common_prefix(main.path, path)
        self._cut(main, text.stem, path[:shared])
        self.context.share(winner.number, main.number, text.stem + shared, text.stem + len(path))
        for lane in text.lanes[1:]:
            common = common_prefix(lane.path, path)
            # A lane keeps its accepted rows, since the next draft may branch again.
            self._cut(lane, min(lane.rows, text.stem), path[:common])
            lane.rows, lane.path = lane.rows + common, []
        text.stem += len(path)
        main.rows, main.path = text.stem, []
        text.tree, text.fed = [], 0

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        text = self._text(slot)
        most = text.length
        if not 0 <= length <= most or any(not 0 <= row < most - length for row in path):
            raise ValueError(f"cannot keep {length} rows and {list(path)} after them of {most} rows")
        rows = [*range(length), *(length + row for row in path)]
        kept = rows[min(length, text.stem) :]
        if text.tree:
            nodes = [row - text.stem for row in kept]
            if (length < text.stem and path) or not is_path(text.tree, nodes):
                raise ValueError(f"rows do not move in llama.cpp's cache, so it cannot keep {list(path)}")
            self._settle(text, nodes)
        elif rows != list(range(len(rows))):
            raise ValueError(f"rows do not move in llama.cpp's cache, so it cannot keep {list(path)}")
        text.stem = min(text.stem, len(rows))
        for lane in text.lanes:
            self._cut(lane, min(lane.rows, text.stem))

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        if ahead:
            raise OutpaceError("llama.cpp's cache has no rows of single layers; use another drafter")
        lengths = {slot: text.length for slot, text in self._texts.items()}
        try:
            yield
        finally:
            for slot, length in lengths.items():
                self.truncate(slot, length)

    # -- copies ------------------------------------------------------------------------------------------

    def read_rows(self, slot: Slot, start: int, stop: int) -> tuple[int, int, NDArray[np.uint8]]:
        """The range of positions, and the rows in llama.cpp's format."""
        text = self._text(slot)
        if not 0 <= start <= stop <= text.stem:
            raise ValueError(f"rows {start} to {stop} of {text.stem}")
        return start, stop, self.context.read(text.lanes[0].number, start, stop)

    def write_rows(self, slot: Slot, block: Any) -> None:
        text = self._text(slot)
        start, stop, data = block
        if text.tree or start != text.stem:
            raise OutpaceError(f"rows {start} to {stop} do not follow the {text.length} rows there")
        self.reserve(slot, stop)
        self._make_cells(stop - start)
        self._append(text, data, start, stop)
