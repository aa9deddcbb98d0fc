"""Calls of pairs between marks, whose values are texts without quotes: what their formats share."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from outpace.grammars.effects import effective, moved, refers
from outpace.serve.calls import CallFormat, Mark, closed, literal, split_by_marks
from outpace.serve.errors import Refused
from outpace.serve.json_calls import Schema, Signature, WrittenCall, from_value, values_of, written
from outpace.serve.values import is_text, properties, resolved, texts_of, typed

_LONGEST = 2**23  # characters of the schemas of a function's values


class Pairs(CallFormat):
    """Calls of pairs of a key and a value: a text as it is, all else as JSON.

    Attributes:
        opens, closes: what is before a key, and after a value.
        after: what ends the pairs of a call, before its mark; "" for nothing.
    """

    opens: str
    closes: str
    after: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.closes)

    def may_begin(self, text: str) -> bool:
        return super().may_begin(text) or text.lstrip().startswith("{")

    def end_of(self, text: str, final: bool = False) -> int | None:
        """As of other formats; a mark within a value, of which more follows, ends nothing."""
        decides = re.compile("|".join(map(re.escape, (self.closes, self.begin))))
        for found in re.finditer(re.escape(self.end), text):
            before = text[: found.start()].rstrip()
            inside = before.rfind(self.opens) > before.rfind(self.closes)
            if not inside:
                return found.start()
            following = decides.search(text, found.end())
            if following is None:
                return found.start() if final else None
            if following[0] == self.begin:
                return found.start()
        return None

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        found, left = list[WrittenCall](), text.strip()
        if left.startswith("{"):  # as a prompt's example of another format may have it
            return [from_value(one) for one in values_of(left)]
        while left or not found:
            name, left = self._name(left)
            function = functions.get(name)
            root = {} if function is None else function.parameters
            known, arguments = properties(root), dict[str, Any]()
            if not left.startswith(self.opens) and left.removeprefix(self.after) and function is None:
                raise ValueError("a call has no arguments")
            while left.startswith(self.opens):
                key, told, left = self._key(left[len(self.opens) :], known)
                value, left = self._value(left, known.keys() - arguments.keys())
                arguments[key] = value if told else typed(value, known.get(key), root)
            left = left.removeprefix(self.after).lstrip()
            found.append(WrittenCall(name, written(arguments)))
        return found

    def _key(self, text: str, known: Mapping[str, Any]) -> tuple[str, bool, str]:
        """A key, whether its value is said to be a text, and what follows."""
        for told in (False, True):
            head = self._heads(told)
            for key in sorted(known, key=len, reverse=True):
                if text.startswith(key + head.rstrip()):
                    return key, told and self._tells, text[len(key + head.rstrip()) :]
        return self._other_key(text)

    def _value(self, text: str, others: set[str]) -> tuple[str, str]:
        """A value, and what follows it; its end may be missing before another known key, or at the end."""
        blank, close = r"\s*", re.escape(self.closes)
        ends = [re.escape(mark) for mark in (self.opens, self.after, self.inner) if mark] + [r"\Z"]
        shut = re.search(f"{close}(?={blank}(?:{'|'.join(ends)}))", text)
        heads = {self._heads(told).rstrip() for told in (False, True)}
        nexts = [re.escape(self.opens + key + head) for key in others for head in heads]
        if self.after:
            nexts.append(re.escape(self.after) + blank + r"\Z")
        early = re.search(f"(?:{'|'.join(nexts)})", text) if nexts else None
        if early is not None and (shut is None or early.start() < shut.start()):
            value, left = text[: early.start()].rstrip("\n"), text[early.start() :]
        elif shut is not None:
            value, left = text[: shut.start()], text[shut.end() :]
        else:
            value, left = text, ""
        return self._trimmed(value), left.lstrip()

    def opening(self, name: str) -> str:
        return self._around(name)[0]

    def rule(self, function: Signature, mark: Mark, own: str) -> tuple[str, str]:
        needed = function.parameters.get("required")
        names = set(needed) if isinstance(needed, list) else set()
        before, after = self._around(function.name)
        terms, rules = split_by_marks(before, self.marks, mark), list[str]()
        opens, document = split_by_marks(self.opens, self.marks, mark), _documents(function)
        for number, (key, schema) in enumerate(properties(function.parameters).items()):
            schema = resolved(schema, function.parameters)
            if effective(schema) is False and key not in names:
                continue
            head = split_by_marks(self._heads(is_text(schema)), self.marks, mark)
            ended = split_by_marks(self._tail, self.marks, mark)
            value, more = _term(f"{own}v{number}", schema, partial(document, key, schema), ended)
            rules.append(more)
            pair = " ".join([*opens, literal(key), *head, value])
            terms.append(pair if key in names else f"({pair})?")
        return " ".join([*terms, *split_by_marks(after, self.marks, mark)]), "\n".join(filter(None, rules))

    _tells = False  # whether heads say which values are texts

    @property
    def _tail(self) -> str:
        """What is written after a value."""
        return f"{self.closes}\n"

    def _trimmed(self, value: str) -> str:
        """A value without what is written around each."""
        return value

    @abstractmethod
    def _name(self, text: str) -> tuple[str, str]:
        """The name of the call that a text begins with, and what follows."""

    @abstractmethod
    def _heads(self, text: bool) -> str:
        """What is between a key and its value, which is a text or not."""

    def _other_key(self, text: str) -> tuple[str, bool, str]:
        """As ``_key``, of a key that the function does not have."""
        head = self._heads(False).rstrip()
        key, marked, left = text.partition(head)
        if not marked:
            raise ValueError("an argument has no value")
        return key.strip(), False, left

    @abstractmethod
    def _around(self, name: str) -> tuple[str, str]:
        """The text before the pairs, and the end."""


def _documents(function: Signature) -> Callable[[str, Any], Schema]:
    """What makes the schema of a property a document, in which references mean what they mean in its own."""
    root = effective(function.parameters)
    root = root if isinstance(root, dict) else {}
    inner = refers(root, ("#/$defs/", "#/definitions/"))
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if inner:
        shared = {"$defs": {"root": moved(root, "#/$defs/root")}}
    if len(json.dumps(shared)) * len(properties(root)) > _LONGEST:
        raise Refused(400, f"a call of {function.name!r} cannot be forced: too long a schema", "tools")

    def document(key: str, schema: Any) -> Schema:
        if inner:
            place = quote(key.replace("~", "~0").replace("/", "~1"), safe="~")
            return shared | {"$ref": f"#/$defs/root/properties/{place}"}
        own = {"enum": []} if (own := effective(schema)) is False else own
        return {**shared, **(own if isinstance(own, dict) else {})}

    return document


def _term(name: str, schema: Any, document: Callable[[], Schema], tail: list[str]) -> tuple[str, str]:
    """The term of a value and of what follows it, and the rules that it needs."""
    after = " ".join(tail)
    if not is_text(schema):
        spacing = {"x-guidance": {"whitespace_flexible": False}}
        return f"{name} {after}", f"{name}: %json {json.dumps(closed(document()) | spacing)}"
    texts = texts_of(schema)
    if texts:
        return f"({' | '.join(map(literal, texts))}) {after}", ""
    if len(tail) > 1 and tail[1].startswith("<["):  # a token ends the text, and what stands before it
        before = re.escape(json.loads(tail[0])).replace("/", "\\/")
        return f"{name} {' '.join(tail[1:])}", f"{name}: /(?s:.*){before}/"
    whole_tail = "".join(map(json.loads, tail))
    return name, f"{name}[suffix={literal(whole_tail)}]: /(?s:.*)/"


def matched(pattern: str, text: str) -> tuple[str, str]:
    """The first group of a pattern at a text's beginning, and what follows the match.

    Raises:
        ValueError: it does not begin so.
    """
    found = re.match(pattern, text)
    if found is None:
        raise ValueError("a call has no name")
    return found[1], text[found.end() :].lstrip()
