"""Self-test of a GGUF file: numbers of rows at which a row keeps its bits, and trees against their paths.

llama.cpp's kernels sum in an order that depends on the number of rows that they multiply. The numbers at
which it changes depend on the types of the weights, the build and the processor, so they are measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Slot
from outpace.core import UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.rows import Rows
from outpace.targets.step.agreement import difference

if TYPE_CHECKING:
    from outpace.targets.llamacpp.target import LlamaCppTarget

_TEXT, _PROMPT = 88, 23  # rows of the test's text, and of its prompt
_READ = 8  # rows after the prompt whose logits are compared
_COMPARED = 256  # rows times layers that are compared in a search for widths
_LEAST_TEXT = 12
_STEPS = (2, 4, 8, 16, 32)  # numbers of rows of a step that are tried
_TILES = (2, 4, 8, 16, 32)  # numbers of rows that are tried as multiples for prompts
_CHUNKS = (17, 5, 1)  # rows of the first chunks of a prompt; the rest is the last one
_OTHER = 5  # rows of the texts beside it, per forward

# A tree with branches that interleave, and a path in it. If the token at _CHANGED changes, so do the logits
# at _SEES, and those at _SEE_NOT must not.
_TREE = (-1, 0, 0, 1, 1, 2, 4, 4, 6, 5, 8, 8, 9)
_PATH = (0, 1, 4, 6, 8, 11)
_CHANGED, _SEES, _SEE_NOT = 2, [5, 9, 12], [0, 1, 3, 4, 6, 7, 8, 10, 11]

Bits = NDArray[Any]

_TIMES_SPREAD = 4  # a tree may be off by this multiple of what chains are off by
NEAR_TIE = 1e-4  # upper bound of float32 rounding, relative to the spread of a row's logits


@dataclass(frozen=True)
class Widths:
    """Numbers of rows of a decode in llama.cpp, such that a row has the same bits in all decodes.

    Attributes:
        least: rows of steps are filled up to this number.
        most: maximum number of rows of steps; None for no limit. With a limit, rows of prompts have other
            bits, and decodes of their own.
        prompts: rows of prompts are filled up to a multiple of this.
    """

    least: int = 1
    most: int | None = None
    prompts: int = 1

    def wider(self, other: Widths) -> bool:
        """True if steps take fewer or smaller decodes than at other widths."""
        mine, theirs = ((widths.least, -(widths.most or math.inf)) for widths in (self, other))
        return mine < theirs

    def __str__(self) -> str:
        padded = f"at least {self.least} rows" if self.least > 1 else ""
        split = f"at most {self.most} rows" if self.most is not None else ""
        return ", ".join(filter(None, (padded, split)))


class SelfTest:
    """Texts of a test, and their logits in different shapes of forwards.

    Args:
        target: the target under test; ``widths`` sets its widths.
        turn: number of the text, from 0.

    Raises:
        UnsupportedModel: the context is too short for a test.
    """

    def __init__(self, target: LlamaCppTarget, turn: int = 0) -> None:
        size = min(target.context or _TEXT, _TEXT)
        if size < _LEAST_TEXT:
            raise UnsupportedModel(f"a context of {size} tokens is too short to test drafts in")
        self._target = target
        self._text = token_ids(target.vocabulary, size, turn)
        if target.tokenizer.bos_token_id is not None:
            self._text[0] = target.tokenizer.bos_token_id
        self._prompt = min(_PROMPT, size // 2)
        self._read = min(_READ, size - self._prompt)
        # A difference in a last bit may vanish where layers round their inputs, in a small model in all.
        self._compared = min(max(_COMPARED // target.layers, 2 * _READ), size - self._prompt)

    # -- forwards ----------------------------------------------------------------------------------------

    def _begin(self, chunks: Sequence[int] = (), beside: int = 0) -> tuple[LlamaCache, list[Slot]]:
        """A cache with the prompt in its first slot, in chunks of these sizes and the rest, beside others."""
        cache = self._target.new_cache(1 + beside, 2 * _TEXT)
        slots = [cache.allocate() for _ in range(1 + beside)]
        for part in _parts(self._prompt, chunks):
            feeds = {slots[0]: Rows(self._text[part])}
            feeds |= {slot: Rows(self._text[start : start + _OTHER]) for start, slot in enumerate(slots[1:])}
            self._target.forward(cache, Batch.of(feeds, None))
            cache.keep({slot: range(len(rows.tokens)) for slot, rows in feeds.items()})
        return cache, slots

    def _chains(self, cache: LlamaCache, slots: Sequence[Slot], widths: Sequence[int]) -> Tensor:
        """Logits of the rows after the prompt, in chains of these widths; the rows are removed again."""
        start, found, before = self._prompt, [], [cache.length(slot) for slot in slots]
        for width in widths:
            feeds = {slots[0]: Rows(self._text[start : start + width])}
            feeds |= {slot: Rows(self._text[first : first + 3]) for first, slot in enumerate(slots[1:])}
            output = self._target.forward(cache, Batch.of(feeds))
            found.append(output.logits_of(slots[0]).clone())
            cache.keep({slot: range(len(rows.tokens)) for slot, rows in feeds.items()})
            start += width
        for slot, length in zip(slots, before, strict=True):
            cache.truncate(slot, length)
        return torch.cat(found)[: self._read]

    def _in_tree(self, cache: LlamaCache, slots: Sequence[Slot], changed: bool = False) -> Tensor:
        """Logits of a tree beside another text. Its path is the text's, if its token is not changed."""
        tokens = self._text[: len(_TREE)]
        for node, token in zip(_PATH, self._text[self._prompt :], strict=False):
            tokens[node] = token
        if changed:
            tokens[_CHANGED] = (tokens[_CHANGED] + 1) % self._target.vocabulary
        feeds = {slots[0]: Rows(tokens, _TREE), slots[1]: Rows(self._text[:3])}
        rows = self._target.forward(cache, Batch.of(feeds)).logits_of(slots[0]).clone()
        cache.keep(dict.fromkeys(slots, ()))
        return rows

    @property
    def _room(self) -> int:
        return len(self._text) - self._prompt

    def alone(self) -> Tensor:
        cache, slots = self._begin()
        return self._chains(cache, slots, [1] * self._read)

    # -- what is found -----------------------------------------------------------------------------------

    def widths(self) -> Widths | None:
        """Set and return widths at which rows keep their bits; the plain ones and None if there are none."""
        for least in (1, 2):
            most = self._most(least)
            found = Widths(least, None, least) if most is None else self._filled(Widths(least, most))
            if found is not None:
                self._target.widths = found
                return found
        self._target.widths = Widths()
        return None

    def _most(self, least: int) -> int | None:
        """The number of rows up to which a step's rows have the bits that each has alone; None for any."""
        self._target.widths = Widths(least)
        alone = self._stepped(1)

        def same(rows: int) -> bool:
            return all(map(np.array_equal, alone, self._stepped(rows)))

        most, over = 1, 0
        for rows in _STEPS:
            if rows <= self._compared:
                if not same(rows):
                    over = rows
                    break
                most = rows
        while over - most > 1:
            middle = (most + over) // 2
            most, over = (middle, over) if same(middle) else (most, middle)
        return most if over else None

    def _stepped(self, width: int) -> tuple[Bits, Bits]:
        """Logits, and keys and values, of rows after the prompt in steps of a number of rows."""
        cache = self._target.fine_cache(2 * _TEXT)
        slot = cache.allocate()
        end = self._prompt + self._compared
        found = []
        for start in (0, *range(self._prompt, end, width)):
            rows = Rows(self._text[start : min(start + width, end) if start else self._prompt])
            output = self._target.forward(cache, Batch.of({slot: rows}, 0 if start else None))
            cache.keep({slot: range(len(rows.tokens))})
            if start:
                found.append(output.logits_of(slot).numpy().copy())
        return np.concatenate(found), cache.read_rows(slot, 0, end)[2]

    def _filled(self, widths: Widths) -> Widths | None:
        """Widths at which the rows of a prompt have the same bits in any chunks; None if there are none."""
        most = widths.most or 0
        for tile in _TILES if most > 1 else ():
            if tile > most:
                found = replace(widths, prompts=tile)
                self._target.widths = found
                if np.array_equal(self._rows(()), self._rows(_CHUNKS)):
                    return found
        return None

    def _rows(self, chunks: Sequence[int]) -> Bits:
        """Keys and values of the whole text, fed as a prompt in these chunks and the rest."""
        cache = self._target.fine_cache(2 * _TEXT)
        slot = cache.allocate()
        for part in _parts(len(self._text), chunks):
            self._target.forward(cache, Batch.of({slot: self._text[part]}, None))
            cache.keep({slot: range(part.stop - part.start)})
        return cache.read_rows(slot, 0, len(self._text))[2]

    def spread(self, alone: Tensor) -> float:
        """The largest difference between rows alone and in chains, relative to the spread of their logits."""
        found = []
        cache, slots = self._begin(_CHUNKS[1:])
        # Attention has another order from 64 rows on; with a limit only prompts have as many.
        most = self._target.widths.most
        wide = self._room if most is None else min(3 * most, self._room)
        for widths in ([2, 4, 2], [wide]):
            found.append(self._chains(cache, slots, widths))
        cache, slots = self._begin(_CHUNKS[:1], beside=2)
        cache.free(slots.pop())
        found.append(self._chains(cache, slots, [1, 3, 4]))
        return max(_off(alone[: len(rows)], rows) for rows in found)

    def tree(self, alone: Tensor, spread: float) -> float:
        """The difference between rows alone and as a path of a tree, relative to their spread.

        Raises:
            UnsupportedModel: it is larger than rounding, which chains show.
        """
        cache, slots = self._begin((_CHUNKS[1],), beside=1)
        rows, others = (self._in_tree(cache, slots, changed) for changed in (False, True))
        effect = difference(rows[_SEES], others[_SEES])
        if not torch.equal(rows[_SEE_NOT], others[_SEE_NOT]):
            raise UnsupportedModel(
                "llama.cpp lets rows of a tree see more than their ancestors: a token changes the logits of "
                f"rows that are not below it by {difference(rows[_SEE_NOT], others[_SEE_NOT]):.2g} of their "
                f"spread, and of those below it by {effect:.2g}"
            )
        off = _off(alone[: len(_PATH)], rows[list(_PATH)])
        limit = max(min(_TIMES_SPREAD * spread, effect / 2), NEAR_TIE)
        if not off <= limit:
            raise UnsupportedModel(
                "llama.cpp gives other logits for a tree of tokens than for its paths: they differ by "
                f"{off:.2g} of their spread, those of chains of tokens by {spread:.2g}, so it is not rounding"
            )
        return off


def _off(rows: Tensor, others: Tensor) -> float:
    return 0.0 if torch.equal(rows, others) else difference(rows, others)


def _parts(rows: int, chunks: Sequence[int]) -> list[slice]:
    """Chunks of a number of rows: of these sizes, and the rest."""
    ends = [min(sum(chunks[: number + 1]), rows) for number in range(len(chunks))] + [rows]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]


def token_ids(vocabulary: int, size: int, turn: int) -> list[int]:
    """Token ids that are distinct if the vocabulary allows."""
    start = round(0.618 * vocabulary)
    stride = next(n for n in range(start, start + vocabulary + 1) if math.gcd(n, vocabulary) == 1)
    return [(1 + turn + number * stride) % vocabulary for number in range(size)]
