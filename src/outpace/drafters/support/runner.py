"""Forwards of a draft model over many texts, each in a slot of one cache and followed by a tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.cache import Slot
from outpace.cache.lanes import power_of_two
from outpace.core import OutpaceError
from outpace.learned.head import PartialHead
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.gpu.fixed import Program
from outpace.targets.rows import Rows

_CHUNK = 512  # tokens of a text fed in one forward


class Track:
    """The rows of one text in the draft model's cache.

    Attributes:
        tokens: the token of each row.
        parents: parents of the last rows, if they are a tree of guesses, as rows of the tree; -1 is the row
            before the tree. The rows before the tree are a chain.
    """

    __slots__ = ("parents", "slot", "tokens")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.tokens: list[int] = []
        self.parents: list[int] = []

    @property
    def stem(self) -> int:
        """Number of rows before the tree."""
        return len(self.tokens) - len(self.parents)


class Feed(NamedTuple):
    """Input of one text to a forward: tokens of the text, then nodes of the tree of guesses.

    ``parents`` counts from the tree's first row, fed earlier or now. No text may be fed after a tree.
    """

    text: Seq[int] = ()
    tokens: Seq[int] = ()
    parents: Seq[int] = ()

    def rows(self, fed: Seq[int]) -> Rows:
        if not self.tokens:
            return Rows(self.text)
        if not self.text:
            return Rows(self.tokens, self.parents, fed)
        stem = len(self.text)
        return Rows(
            (*self.text, *self.tokens), (*range(-1, stem - 1), *(stem + parent for parent in self.parents))
        )


class DraftRunner:
    """A draft model and its cache; each text has a track in it.

    Args:
        model: the draft model.
        late: maximum number of tokens by which a text may be ahead of its rows to be fed with its guesses in
            one forward.
        ids: the ids that are drafted, [n], whose logits alone are computed; None for all of them.

    Raises:
        OutpaceError: the model keeps a recurrent state.
    """

    def __init__(self, model: TargetModel, late: int = 2, ids: Tensor | None = None) -> None:
        self.model = model
        self.late = late
        self.cache = model.new_cache()
        if self.cache.state_bytes:
            raise OutpaceError(
                f"{model.name} keeps a recurrent state, from which no rows of a draft can be dropped; use "
                "another draft model"
            )
        self._ids = ids
        self._tracks: list[Track] = []
        # Forwards of fixed shapes return all logits, or run outside these.
        self._head = None if ids is None or self.cache.fixed else PartialHead(model, ids)

    def renewed(self) -> DraftRunner:
        """A runner of the same draft model with a cache of its own, which is empty."""
        return DraftRunner(self.model, self.late, self._ids)

    def warm(self, slots: int) -> None:
        """Prepare forwards for up to this number of texts; there must be none yet."""
        self._make_room(slots, 0)
        self.model.warm(self.cache, slots, ())

    def open(self) -> Track:
        self._make_room(len(self._tracks) + 1, 0)
        self._tracks.append(Track(self.cache.allocate()))
        return self._tracks[-1]

    def close(self, track: Track) -> None:
        self._tracks.remove(track)
        self.cache.free(track.slot)

    def _make_room(self, slots: int, rows: int) -> None:
        """Copy all tracks to a larger cache if this one has too few slots or rows and cannot grow."""
        most, longest = self.cache.max_slots, self.cache.max_length
        if most is None or longest is None or (slots <= most and rows <= longest):
            return
        cache = self.model.new_cache(max(power_of_two(slots), most), max(power_of_two(rows), longest))
        moved = [cache.allocate() for _ in self._tracks]
        for track, slot in zip(self._tracks, moved, strict=True):
            if length := self.cache.length(track.slot):
                cache.write_rows(slot, self.cache.read_rows(track.slot, 0, length))
        for track, slot in zip(self._tracks, moved, strict=True):
            track.slot = slot
        self.cache = cache

    def rewind(self, track: Track, text: Seq[int], unchanged: int = 0) -> None:
        """Cut a track back to the rows that agree with a text, excluding its last token, the next root.

        Rows of a tree stay if they are on the text's path.

        Args:
            text: the text in the draft model's tokens.
            unchanged: number of leading rows known to agree.
        """
        most, stem = len(text) - 1, track.stem
        kept = min(unchanged, stem, most)
        while kept < min(stem, most) and track.tokens[kept] == text[kept]:
            kept += 1
        path = _follow(track.tokens[stem:], track.parents, text[stem:most]) if kept == stem else []
        if kept + len(path) < len(track.tokens):
            self.cache.truncate(track.slot, kept, path)
        track.tokens[kept:] = text[kept : kept + len(path)]
        track.parents = []

    def catch_up(self, tracks: Seq[Track], texts: Seq[Seq[int]]) -> None:
        """Feed each text that is too far ahead of its rows, in chunks, up to its root."""
        while not self.advance(tracks, texts):
            pass

    def advance(self, tracks: Seq[Track], texts: Seq[Seq[int]]) -> bool:
        """Feed a chunk of each text that is too far ahead of its rows; return True if none was."""
        pairs = zip(tracks, texts, strict=True)
        behind = [(track, text) for track, text in pairs if len(text) - track.stem > self.late]
        if behind:
            ends = [min(track.stem + _CHUNK, len(text) - 1) for track, text in behind]
            feeds = [Feed(text[track.stem : end]) for (track, text), end in zip(behind, ends, strict=True)]
            self.feed([track for track, _ in behind], feeds, logits=False)
        return not behind

    @torch.inference_mode()
    def feed(self, tracks: Seq[Track], feeds: Seq[Feed], logits: bool = True) -> Tensor:
        """Run one forward of the draft model over feeds with at least one token each.

        Returns:
            Logits [n, drafted ids], text after text: those after the last fed token of the text, if any, then
            those after each node.
        """
        fed = [feed.rows(track.parents) for track, feed in zip(tracks, feeds, strict=True)]
        longest = max(len(track.tokens) + len(row.tokens) for track, row in zip(tracks, fed, strict=True))
        self._make_room(len(self._tracks), longest)
        rows = {track.slot: row for track, row in zip(tracks, fed, strict=True)}
        part = logits and self._head is not None
        output = self.model.forward(
            self.cache, Batch.of(rows, 0 if logits and not part else None), (-1,) if part else ()
        )
        self.cache.keep({slot: range(len(row.tokens)) for slot, row in rows.items()})
        for track, feed in zip(tracks, feeds, strict=True):
            track.tokens += (*feed.text, *feed.tokens)
            track.parents += feed.parents
        if not logits:
            return torch.empty(0)
        read = []
        for track, feed in zip(tracks, feeds, strict=True):
            first, end = max(len(feed.text) - 1, 0), len(feed.text) + len(feed.tokens)
            if part:
                read.append(output.hidden_of(track.slot, first, end - first)[-1])
            else:
                read.append(output.logits_of(track.slot)[first:])
        found = torch.cat(read)
        if self._head is not None:
            return self._head(found)
        return self.part(found)

    def play(self, tracks: Seq[Track], texts: Seq[Seq[int]], program: Program) -> bool:
        """Run a program over these tracks; see ``TargetModel``.

        Args:
            texts: tokens of each text whose rows it keeps.
        """
        longest = max(self.cache.length(slot) + width for slot, width in program.widths.items())
        self._make_room(len(self._tracks), longest)
        played = self.model.play(self.cache, program)
        for track, text in zip(tracks, texts, strict=True) if played else ():
            track.tokens += text
        return played

    def part(self, logits: Tensor) -> Tensor:
        return logits if self._ids is None else logits[:, self._ids]


def _follow(tokens: Seq[int], parents: Seq[int], text: Seq[int]) -> list[int]:
    """The rows of a tree along the longest prefix of a text that is in it.

    The walk follows all equal siblings at once: they have equal rows, and only one may have children.
    """
    ways: list[dict[int, int]] = [{-1: -1}]  # per depth: a row on the path -> its parent
    for token in text:
        reached = {
            row: parent for row, parent in enumerate(parents) if tokens[row] == token and parent in ways[-1]
        }
        if not reached:
            break
        ways.append(reached)
    path: list[int] = []
    row = next(iter(ways[-1]))
    for way in reversed(ways[1:]):
        path.append(row)
        row = way[row]
    return path[::-1]
