"""Whether a lexer that always takes the longest match can distinguish the lexemes of a grammar.

A lexeme that may end, and that another one or itself could continue with a character that may also begin
what follows, is read on: the other reading is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core import OutpaceError

_COPIES = 32  # of a part that is repeated; more are taken for any number
_POSITIONS = 2000  # of all lexemes
_END = ((-1, -1),)  # what follows the whole text
Ranges = Sequence[tuple[int, int]]


@dataclass(eq=False)
class Lexeme:
    """A regular expression by the positions of its characters (Glushkov 1961).

    Attributes:
        name: for errors.
        sets: the characters of each position.
        first, last: positions that begin and end a text.
        next: the positions that may follow each.
        empty: it may be empty.
    """

    name: str
    tree: Any
    sets: list[Ranges] = field(default_factory=list)
    next: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.empty, self.first, self.last = self._read(self.tree)

    def _read(self, tree: Any) -> tuple[bool, set[int], set[int]]:
        kind = tree[0] if tree and isinstance(tree[0], str) else "set"
        if kind == "set":
            if len(self.sets) >= _POSITIONS:
                raise OutpaceError(f"a part of the grammar has more than {_POSITIONS} characters")
            self.sets.append(tree)
            self.next.append(set())
            place = len(self.sets) - 1
            return False, {place}, {place}
        if kind == "rep":
            return self._repeated(*tree[1:])
        if kind == "alt":
            either = False, set[int](), set[int]()
            for part in tree[1:]:
                empty, first, last = self._read(part)
                either = either[0] or empty, either[1] | first, either[2] | last
            return either
        whole = True, set[int](), set[int]()
        for part in tree[1:]:
            whole = self._joined(whole, self._read(part))
        return whole

    def _joined(self, one: Any, other: Any) -> tuple[bool, set[int], set[int]]:
        for place in one[2]:
            self.next[place] |= other[1]
        first = one[1] | other[1] if one[0] else one[1]
        return one[0] and other[0], first, other[2] | one[2] if other[0] else other[2]

    def _repeated(self, tree: Any, least: int, most: int | None) -> tuple[bool, set[int], set[int]]:
        endless = most is None or most > _COPIES
        whole = True, set[int](), set[int]()
        for copy in range(min(least, _COPIES) if endless else most or 0):
            one = self._read(tree)
            whole = self._joined(whole, one if copy < least else (True, *one[1:]))
        if endless:
            _, first, last = self._read(tree)
            for place in last:
                self.next[place] |= first
            whole = self._joined(whole, (True, first, last))
        return whole


def check_apart(rules: dict[str, Any], start: str) -> None:
    """Refuse a grammar whose lexemes are not told apart.

    Args:
        rules: by name; each a ``Lexeme``, a rule's name, or ``("seq" | "alt", ...)`` or ``("rep", part, may
            be empty, may follow itself)``.

    Raises:
        OutpaceError: two are not.
    """
    follows = _follows(rules, start)
    if sum(len(lexeme.sets) for lexeme in follows) > _POSITIONS:
        raise OutpaceError(f"the grammar has more than {_POSITIONS} characters; make it shorter")
    for lexeme, after in follows.items():
        for other in follows:
            if after and _read_on(lexeme, other, after):
                raise OutpaceError(
                    "the grammar cannot be used: where it is recursive, the end of a part must be clear from "
                    "the next character, but one part may go on with what may begin the part behind it; "
                    "write it without recursion, or with a character between the two"
                )


def _read_on(lexeme: Lexeme, other: Lexeme, after: list[tuple[int, int]]) -> bool:
    """True if a text of a lexeme, and a character of those after it, begin a text of another lexeme."""
    left = [(a, b) for a in lexeme.first for b in other.first]
    seen = set[tuple[int, int]]()
    while left:
        pair = left.pop()
        if pair in seen or not _meet(lexeme.sets[pair[0]], other.sets[pair[1]]):
            continue
        seen.add(pair)
        a, b = pair
        if a in lexeme.last and any(_meet(other.sets[place], after) for place in other.next[b]):
            return True
        left += [(c, d) for c in lexeme.next[a] for d in other.next[b]]
    return False


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


def _follows(rules: dict[str, Any], start: str) -> dict[Lexeme, list[tuple[int, int]]]:
    """What may follow each lexeme: the usual sets of first and following characters, by iteration."""
    known: dict[str, Any] = {name: (False, frozenset()) for name in rules}  # may be empty, first characters
    after = {name: frozenset[tuple[int, int]]() for name in rules}
    found: dict[Lexeme, frozenset[tuple[int, int]]] = {}

    def begin(tree: Any) -> tuple[bool, frozenset[tuple[int, int]]]:
        if isinstance(tree, Lexeme):
            return tree.empty, frozenset(r for place in tree.first for r in tree.sets[place])
        if isinstance(tree, str):
            return known[tree]  # type: ignore[no-any-return]
        if tree[0] == "rep":
            empty, first = begin(tree[1])
            return empty or tree[2], first
        parts = [begin(part) for part in tree[1:]]
        if tree[0] == "alt":
            return any(empty for empty, _ in parts), frozenset().union(*(first for _, first in parts))
        whole, first = True, frozenset[tuple[int, int]]()
        for empty, own in parts:
            first = first | own if whole else first
            whole = whole and empty
        return whole, first

    def spread(tree: Any, behind: frozenset[tuple[int, int]]) -> None:
        if isinstance(tree, Lexeme):
            found[tree] = found.get(tree, frozenset()) | behind
        elif isinstance(tree, str):
            after[tree] |= behind
        elif tree[0] == "rep":
            spread(tree[1], behind | begin(tree[1])[1] if tree[3] else behind)
        elif tree[0] == "alt":
            for part in tree[1:]:
                spread(part, behind)
        else:
            for part in reversed(tree[1:]):
                spread(part, behind)
                empty, first = begin(part)
                behind = behind | first if empty else first

    before = None
    while before != (known, after):
        before = dict(known), dict(after)
        known.update({name: begin(tree) for name, tree in rules.items()})
        after[start] |= frozenset(_END)
        for name, tree in rules.items():
            spread(tree, after[name])
    return {lexeme: sorted(behind - set(_END)) for lexeme, behind in found.items()}
