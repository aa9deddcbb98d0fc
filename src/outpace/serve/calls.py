"""Formats in which models write calls of functions: how a call begins, how it is read, its grammar.

The format is that of the model's template. Each is one class: those whose arguments are JSON are in this
module, the others in ``marked``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic_core import from_json

Schema = dict[str, Any]
Mark = Callable[[str], str]  # a mark as a term of a grammar: its text, or its token
_FIRM = {"allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "patternProperties"}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Call:
    """A call that a model wrote: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Signature:
    """A function that may be called, and the schema of its arguments, a JSON object."""

    name: str
    parameters: Schema


class CallFormat(ABC):
    """A format of calls.

    Attributes:
        begin, end: marks around a call; "" if it ends with the answer, or begins it.
        marks: all marks, of which a tokenizer may have some as special tokens.
        tail: what follows the arguments of a call that streams them.
    """

    begin: str
    end: str = ""
    tail: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.begin, self.end) if mark)

    @abstractmethod
    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        """The calls in a text between the marks.

        Raises:
            ValueError, KeyError, TypeError: it is no call.
        """

    @abstractmethod
    def rule(self, function: Signature, mark: Mark) -> tuple[str, str]:
        """The body of the grammar's rule for a call of a function, and further rules."""

    def head(self, name: str) -> str | None:
        """What comes before the arguments of a call as JSON; None if they are written in another way."""
        return None

    def grammar(self, functions: Seq[Signature], mark: Mark) -> str:
        """The grammar, in llguidance's form of Lark, of exactly one call of one of these functions."""
        bodies, rules = [], []
        for number, function in enumerate(functions):
            body, more = self.rule(function, mark)
            bodies.append(f"call{number}: {body.replace('@', f'r{number}x')}")
            rules.append(more.replace("@", f"r{number}x"))
        start = " | ".join(f"call{number}" for number in range(len(functions)))
        return "\n".join([f"start: {start}", *bodies, *filter(None, rules)])


class JsonCalls(CallFormat):
    """Calls whose arguments are a JSON object between a head with the name and a tail."""

    def rule(self, function: Signature, mark: Mark) -> tuple[str, str]:
        head, tail = self.head(function.name), self.tail
        assert head is not None
        schema = json.dumps({"type": "object"} | closed(function.parameters) | {"x-guidance": _SPACING})
        terms = [*split_by_marks(head, self.marks, mark), "@", *split_by_marks(tail, self.marks, mark)]
        return " ".join(terms), f"@: %json {schema}"


@dataclass(frozen=True)
class Tagged(JsonCalls):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, as Hermes, Qwen 2.5 and 3 write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    tail: str = "}\n</tool_call>"

    def head(self, name: str) -> str:
        return f'{self.begin}\n{{"name": {json.dumps(name)}, "arguments": '

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        return [_from_value(one) for one in _values(text)]


@dataclass(frozen=True)
class Bare(JsonCalls):
    """The answer is ``{"name": ..., "parameters": ...}``, after ``<|python_tag|>`` or not, as of Llama 3."""

    key: str = "parameters"
    begin: str = ""
    tail: str = "}"
    openings: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "{")

    @property
    def marks(self) -> tuple[str, ...]:
        return ("<|python_tag|>",)

    def head(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, {json.dumps(self.key)}: '

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        found = [_from_value(one) for one in _values(text.removeprefix("<|python_tag|>"))]
        if not all(call.name in functions for call in found):
            raise ValueError("other JSON")
        return found


@dataclass(frozen=True)
class Listed(JsonCalls):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, as Mistral's models before version 11 write it."""

    begin: str = "[TOOL_CALLS]"
    tail: str = "}]"

    def head(self, name: str) -> str:
        return f'{self.begin}[{{"name": {json.dumps(name)}, "arguments": '

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        (found,) = _values(text)
        return [_from_value(one) for one in found]


@dataclass(frozen=True)
class Named(JsonCalls):
    """``[TOOL_CALLS]name[ARGS]{...}``, as Mistral's models since version 11 write it."""

    begin: str = "[TOOL_CALLS]"

    @property
    def marks(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def head(self, name: str) -> str:
        return f"{self.begin}{name}[ARGS]"

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        found = []
        for one in text.split(self.begin):
            name, marked, arguments = one.partition("[ARGS]")
            if not marked:
                raise ValueError("a call has no arguments")
            found.append(call_of(name.partition("[CALL_ID]")[0].strip(), object_of(arguments)))
        return found


@dataclass(frozen=True)
class DeepSeek(JsonCalls):
    """DeepSeek's calls; ``fenced``, as V3 and R1 write them, with a type and a fence around the JSON."""

    fenced: bool = False
    begin: str = "<｜tool▁calls▁begin｜>"
    end: str = "<｜tool▁calls▁end｜>"
    tail: str = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    @property
    def marks(self) -> tuple[str, ...]:
        inner = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        return (self.begin, *inner, self.end)

    def head(self, name: str) -> str:
        start = f"{self.begin}<｜tool▁call▁begin｜>"
        return (
            f"{start}function<｜tool▁sep｜>{name}\n```json\n"
            if self.fenced
            else f"{start}{name}<｜tool▁sep｜>"
        )

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        found = []
        for one in text.split("<｜tool▁call▁begin｜>")[1:]:
            before, marked, after = one.partition("<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
            if not marked:
                raise ValueError("a call has no name")
            if "```json" in after:
                before, _, after = after.partition("```json")
                after = after.rpartition("```")[0]
            found.append(call_of(before.strip(), object_of(after)))
        return found


def literal(text: str) -> str:
    """A text as a term of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def split_by_marks(text: str, marks: Seq[str], mark: Mark) -> list[str]:
    """A text as terms of a grammar, of which marks are terms of their own."""
    terms, left = list[str](), text
    while left:
        place, first = min(((left.find(one), one) for one in marks if one in left), default=(len(left), ""))
        if left[:place]:
            terms.append(literal(left[:place]))
        if first:
            terms.append(mark(first))
        left = left[place + len(first) :]
    return terms


def closed(schema: Any) -> Any:
    """A schema whose objects have no other keys than its own, unless it says so.

    Where schemas are combined, what is another key depends on the combination: these stay as they are.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    if isinstance(schema, dict):
        return not _FIRM.isdisjoint(schema) or any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed_within(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def _closed_within(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: _closed(one) for name, one in value.items()}
    if key in ("anyOf", "prefixItems") and isinstance(value, list):
        return [_closed(one) for one in value]
    return _closed(value) if key in ("items", "additionalProperties") else value


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, between which there are blanks or semicolons."""
    decoder, text = json.JSONDecoder(), text.strip()
    if not text:
        raise ValueError("a call is empty")
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip(" \n\t;")


def object_of(text: str) -> Any:
    """The JSON value of a text."""
    return from_json(text.strip(), allow_inf_nan=False)


def _from_value(value: Any) -> Call:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    return call_of(value["name"], object_of(arguments) if isinstance(arguments, str) else arguments)


def call_of(name: Any, arguments: Any) -> Call:
    """A call of a function.

    Raises:
        ValueError: there is no name, or no object of arguments.
    """
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("a call has a name, and an object of arguments")
    return Call(name, json.dumps(arguments, ensure_ascii=False))
