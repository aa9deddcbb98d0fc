"""GBNF, the grammars of llama.cpp, as llguidance's Lark.

llguidance reads a text lexeme by lexeme, each as long as it can be, where llama.cpp reads it character by
character. A rule that refers to no recursive one is a regular expression, and is one lexeme. Where lexemes
follow one another, in a recursive grammar, they must be told apart by their first characters, or the
grammar is refused: it would allow other texts than it does in llama.cpp. llguidance's own converter does
not look.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outpace.core import OutpaceError
from outpace.grammars.lexemes import Lexeme, check_apart

_TOP = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # which no text has
_REPEATS = 1000  # the most of {m,n}
_DEPTH = 64  # of parentheses
_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "\\": "\\",
    '"': '"',
    "[": "[",
    "]": "]",
    "/": "/",
    "-": "-",
    "^": "^",
}
_HEX = {"x": 2, "u": 4, "U": 8}
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_OR = re.compile(rf"{_LINES.pattern}\|{_LINES.pattern}")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TIMES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Node:
    """A part of a rule.

    Attributes:
        kind: "set" (one character), "ref" (a rule), "seq", "alt", or "rep" (``parts[0]``, repeated).
        chars: those of a set.
        name: that of a rule.
        least, most: of a repetition; None for any number.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    chars: Ranges = ()
    name: str = ""
    least: int = 0
    most: int | None = None


def lark_of(text: str) -> str:
    """The Lark of a grammar in GBNF.

    Raises:
        OutpaceError: it is not GBNF, or allows texts that Lark cannot distinguish.
    """
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise OutpaceError("the grammar has no rule root")
    missing = sorted({ref for node in rules.values() for ref in _refs(node)} - rules.keys())
    if missing:
        raise OutpaceError(f"the grammar has no rule {missing[0]}")
    return _LarkWriter(rules).lark()


class _Reader:
    """A parser of GBNF."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def _wrong(self, what: str) -> OutpaceError:
        line = self._text.count("\n", 0, self._at) + 1
        return OutpaceError(f"the grammar is no GBNF: line {line}: {what}")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at

    def _here(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def rules(self) -> dict[str, Node]:
        found = dict[str, Node]()
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._name()
            if name in found:
                raise self._wrong(f"a second rule {name}")
            self._skip(_LINES)
            if not self._here("::="):
                raise self._wrong("::= is expected")
            self._skip(_LINES)
            found[name] = self._alternatives(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong(f"{self._text[self._at : self._at + 10]!r} is not expected")
            self._skip(_LINES)
        return found

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._wrong("a name is expected")
        self._at = found.end()
        return found[0]

    def _alternatives(self, nested: bool) -> Node:
        parts = [self._sequence(nested)]
        while (found := _OR.match(self._text, self._at)) is not None:
            self._at = found.end()
            parts.append(self._sequence(nested))
        return parts[0] if len(parts) == 1 else Node("alt", tuple(parts))

    def _sequence(self, nested: bool) -> Node:
        parts, space = list[Node](), _LINES if nested else _SPACE
        while True:
            self._skip(space)
            if self._at >= len(self._text) or self._text[self._at] in "|)\r\n":
                break
            one = self._repeated(self._item(), space)
            parts += one.parts if one.kind == "seq" else [one]
        return parts[0] if len(parts) == 1 else Node("seq", tuple(parts))

    def _item(self) -> Node:
        if self._here('"'):
            chars = list[Node]()
            while not self._here('"'):
                code = self._char()
                chars.append(Node("set", chars=((code, code),)))
            # One of a literal is a part of its own, for what repeats it
            return chars[0] if len(chars) == 1 else Node("alt", (Node("seq", tuple(chars)),))
        if self._here("["):
            return Node("set", chars=self._set())
        if self._here("."):
            return Node("set", chars=_without(()))
        if self._here("("):
            self._depth += 1
            if self._depth > _DEPTH:
                raise self._wrong(f"more than {_DEPTH} parentheses in one another")
            self._skip(_LINES)
            found = self._alternatives(nested=True)
            self._skip(_LINES)
            if not self._here(")"):
                raise self._wrong(") is expected")
            self._depth -= 1
            return found if found.kind == "alt" else Node("alt", (found,))
        return Node("ref", name=self._name())

    def _repeated(self, node: Node, space: re.Pattern[str]) -> Node:
        while True:
            self._skip(space)
            if self._here("*"):
                node = Node("rep", (node,))
            elif self._here("+"):
                node = Node("rep", (node,), least=1)
            elif self._here("?"):
                node = Node("rep", (node,), most=1)
            elif (times := _TIMES.match(self._text, self._at)) is not None:
                self._at = times.end()
                least = int(times[1])
                most = least if times[2] is None else int(times[3]) if times[3] else None
                if max(least, most or 0) > _REPEATS or (most is not None and most < least):
                    raise self._wrong(f"{times[0]}: at most {_REPEATS} repetitions, in order, are taken")
                node = Node("rep", (node,), least=least, most=most)
            else:
                return node

    def _set(self) -> Ranges:
        negative, found = self._here("^"), list[tuple[int, int]]()
        while not self._here("]"):
            first = last = self._char()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._char()
            if last < first:
                raise self._wrong("a range of characters is reversed")
            found.append((first, last))
        return _without(tuple(found)) if negative else tuple(found)

    def _char(self) -> int:
        if self._at >= len(self._text) or self._text[self._at] in "\r\n":
            raise self._wrong("a text does not end")
        one = self._text[self._at]
        self._at += 1
        if one != "\\":
            return ord(one)
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX:
            digits = self._text[self._at : self._at + _HEX[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[kind]}}}", digits) or int(digits, 16) > _TOP:
                raise self._wrong(f"\\{kind}{digits} is no character")
            self._at += _HEX[kind]
            return int(digits, 16)
        if kind not in _ESCAPES or not kind:
            raise self._wrong(f"\\{kind} is no escape")
        return ord(_ESCAPES[kind])


def _without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    found, start = list[tuple[int, int]](), 0
    for first, last in sorted((*ranges, _SURROGATES)):
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return (*found, (start, _TOP)) if start <= _TOP else tuple(found)


def _refs(node: Node) -> Iterator[str]:
    if node.kind == "ref":
        yield node.name
    for part in node.parts:
        yield from _refs(part)


class _LarkWriter:
    """A writer of Lark, whose terminals are the regular parts of the rules."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._recursive = _reaching(rules)
        self._names = {name: f"r{number}" for number, name in enumerate(rules)}
        self._terminals = dict[Node, str]()
        self._needed = list[str]()

    def lark(self) -> str:
        if "root" in self._recursive:
            lines = self._lines()
        else:
            lines = ["start: R", f"R: {self._regular(self._rules['root'])}"]
        for name in self._needed:  # which grows
            lines.append(f"{self._names[name].upper()}: {self._regular(self._rules[name])}")
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        """The recursive rules and their lexemes, as long as they can be, or else as short."""
        for longest in (True, False):
            self._terminals.clear()
            bodies = {name: self._split(self._rules[name], longest) for name in self._recursive}
            try:
                check_apart(self._lexical(bodies), "root")
                break
            except OutpaceError:
                if not longest:
                    raise
        return [
            f"start: {self._names['root']}",
            *(f"{self._names[name]}: {self._rule(body)}" for name, body in bodies.items()),
            *(f"{name}: {self._regular(node)}" for node, name in self._terminals.items()),
        ]

    def _is_regular(self, node: Node) -> bool:
        return not any(name in self._recursive for name in _refs(node))

    def _split(self, node: Node, longest: bool) -> Node:
        """A rule's body with lexemes for its regular parts, of which ``longest`` takes runs as one."""
        if self._is_regular(node) and (longest or node.kind != "seq"):
            return self._terminal([node])
        if node.kind == "ref":
            return node
        if node.kind != "seq":
            parts = tuple(self._split(part, longest) for part in node.parts)
            return Node(node.kind, parts, least=node.least, most=node.most)
        found, run = list[Node](), list[Node]()
        for part in node.parts:
            if self._is_regular(part) and longest:
                run.append(part)
                continue
            found += [self._terminal(run)] if run else []
            found.append(self._split(part, longest))
            run = []
        return Node("seq", (*found, *([self._terminal(run)] if run else [])))

    def _terminal(self, run: list[Node]) -> Node:
        node = run[0] if len(run) == 1 else Node("seq", tuple(run))
        return Node("lexeme", (node,), name=self._terminals.setdefault(node, f"T{len(self._terminals)}"))

    def _rule(self, node: Node) -> str:
        if node.kind == "lexeme":
            return node.name
        return self._expression(node, self._rule)

    def _regular(self, node: Node) -> str:
        if node.kind == "ref" and node.name not in self._needed:
            self._needed.append(node.name)
        return self._expression(node, self._regular)

    def _expression(self, node: Node, write: Callable[[Node], str]) -> str:
        if node.kind == "set":
            if not node.chars:
                raise OutpaceError("the grammar has an empty set of characters")
            ranges = "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in node.chars)
            return f"/[{ranges}]/"
        if node.kind == "ref":
            name = self._names[node.name]
            return name if node.name in self._recursive else name.upper()
        if node.kind == "seq":
            return " ".join(map(write, node.parts)) or '""'
        if node.kind == "alt":
            return f"({' | '.join(map(write, node.parts))})"
        most = "" if node.most is None else node.most
        return f"({write(node.parts[0])}){{{node.least},{most}}}"

    def _lexical(self, bodies: dict[str, Node]) -> dict[str, Any]:
        """The rules for ``check_apart``: lexemes, names of rules, and lists of alternatives."""

        def shown(node: Node) -> Any:
            if node.kind == "lexeme":
                return Lexeme(node.name, self._flat(node.parts[0], 0))
            if node.kind == "ref":
                return node.name
            if node.kind == "rep":
                return ("rep", shown(node.parts[0]), node.least == 0, node.most != 1)
            return (node.kind, *map(shown, node.parts))

        return {name: shown(body) for name, body in bodies.items()}

    def _flat(self, node: Node, depth: int) -> Any:
        """A regular part without references."""
        if depth > _DEPTH:
            raise OutpaceError(f"the grammar has more than {_DEPTH} rules in one another")
        if node.kind == "ref":
            return self._flat(self._rules[node.name], depth + 1)
        if node.kind == "set":
            return node.chars
        parts = [self._flat(part, depth) for part in node.parts]
        return ("rep", parts[0], node.least, node.most) if node.kind == "rep" else (node.kind, *parts)


def _reaching(rules: dict[str, Node]) -> set[str]:
    """The rules from which one that contains itself can be reached."""
    refs = {name: set(_refs(node)) for name, node in rules.items()}
    left = dict(refs)
    while ready := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in ready:
            del left[name]
    return set(left)
