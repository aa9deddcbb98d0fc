"""Formats in which models write calls of functions: how a call begins, how it is read, its grammar.

The format is that of the model's template. Each is one class: those whose arguments are JSON are in this
module, the others in ``marked``.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.grammars.effects import effective
from outpace.serve.json_calls import (
    PYTHON_TAG,
    Signature,
    WrittenCall,
    call_of,
    from_value,
    object_of,
    outside,
    split_outside,
    unmarked,
    values_of,
)

Mark = Callable[[str], str]  # a mark as a term of a grammar: its text, or its token
_FIRM = {"allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "patternProperties"}
# Marks around reasoning: of most families, of Mistral, of Seed-OSS, of Kimi and of Gemma 4
THOUGHT = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>", "<channel|>"),
)
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallFormat(ABC):
    """A format of calls.

    Attributes:
        begin, end: marks around a call; "" if it ends with the answer, or begins it.
        inner: a mark that begins a call whose first mark is missing; "" for none.
        marks: all marks, of which a tokenizer may have some as tokens.
        tail: what follows the arguments of a call that streams them.
    """

    begin: str
    end: str = ""
    inner: str = ""
    tail: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.begin, self.end) if mark)

    @property
    def stops(self) -> tuple[str, ...]:
        """Marks that may decide where a call ends."""
        return (self.end,) if self.end else ()

    def end_of(self, text: str, final: bool = False) -> int | None:
        """Where the mark stands that ends a call; None if it has not come yet.

        Of a format without one, a call ends with its last bracket, once nothing follows the text.

        Args:
            text: what follows the mark that begins the call.
            final: nothing follows the text.
        """
        if self.end:
            return next(iter(outside(text, self.end)), None)
        ends = (place + 1 for one in "]}" for place in outside(text, one))
        fenced = text.lstrip().startswith("`")
        return max(ends, default=None) if final and not fenced else None

    def may_begin(self, text: str) -> bool:
        """False if what follows the mark that begins a call cannot become one, however it goes on."""
        said = text.lstrip()
        return said.startswith(self.inner) or self.inner.startswith(said)

    @abstractmethod
    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        """The calls in a text between the marks.

        Raises:
            ValueError, KeyError, TypeError: it is no call.
        """

    @abstractmethod
    def rule(self, function: Signature, mark: Mark, own: str) -> tuple[str, str]:
        """The body of the grammar's rule for a call of a function, and further rules.

        Args:
            own: what the names of further rules begin with.
        """

    @abstractmethod
    def opening(self, name: str) -> str:
        """What a forced call of a function begins with, up to its arguments."""

    def head(self, name: str) -> str | None:
        """What comes before the arguments of a call as JSON; None if they are written in another way."""
        return None

    def grammar(self, functions: Seq[Signature], mark: Mark) -> str:
        """The grammar, in llguidance's form of Lark, of exactly one call of one of these functions."""
        bodies, rules = [], []
        for number, function in enumerate(functions):
            body, more = self.rule(function, mark, f"r{number}x")
            bodies.append(f"call{number}: {body}")
            rules.append(more)
        start = " | ".join(f"call{number}" for number in range(len(functions)))
        return "\n".join([f"start: {start}", *bodies, *filter(None, rules)])


class JsonCalls(CallFormat):
    """Calls whose arguments are a JSON object between a head with the name and a tail."""

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        parts = split_outside(text, self.begin)
        return [from_value(one) for part in parts if part.strip() for one in values_of(part)]

    def opening(self, name: str) -> str:
        head = self.head(name)
        assert head is not None
        return head

    def rule(self, function: Signature, mark: Mark, own: str) -> tuple[str, str]:
        head, tail = self.opening(function.name), self.tail
        schema = json.dumps((arguments_of(function) or {"enum": []}) | {"x-guidance": _SPACING})
        terms = [*split_by_marks(head, self.marks, mark), own, *split_by_marks(tail, self.marks, mark)]
        return " ".join(terms), f"{own}: %json {schema}"


@dataclass(frozen=True)
class Tagged(JsonCalls):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, as Hermes, Qwen 2.5 and 3 write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    tail: str = "}\n</tool_call>"

    def head(self, name: str) -> str:
        return f'{self.begin}\n{{"name": {json.dumps(name)}, "arguments": '

    def may_begin(self, text: str) -> bool:
        return text.lstrip()[:1] in ("", "{", "[", "`")


@dataclass(frozen=True)
class Bare(JsonCalls):
    """The answer is ``{"name": ..., "parameters": ...}``, after ``<|python_tag|>`` or not, as of Llama 3."""

    key: str = "parameters"
    begin: str = ""
    inner: str = PYTHON_TAG
    tail: str = "}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (PYTHON_TAG,)

    def head(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, {json.dumps(self.key)}: '

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        return unmarked(text, functions)


@dataclass(frozen=True)
class Listed(JsonCalls):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, as Mistral's models before version 11 write it."""

    begin: str = "[TOOL_CALLS]"
    tail: str = "}]"

    def head(self, name: str) -> str:
        return f'{self.begin}[{{"name": {json.dumps(name)}, "arguments": '


@dataclass(frozen=True)
class NamedCalls(JsonCalls):
    """``[TOOL_CALLS]name[ARGS]{...}``, as Mistral's models since version 11 write it."""

    begin: str = "[TOOL_CALLS]"

    @property
    def marks(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def end_of(self, text: str, final: bool = False) -> int | None:
        place = super().end_of(text, final)
        return None if place is not None and text[:place].endswith("[ARGS]") else place

    def head(self, name: str) -> str:
        return f"{self.begin}{name}[ARGS]"

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        found = []
        for one in split_outside(text, self.begin):
            if one.lstrip().startswith("["):  # as older models write it
                found += Listed().read(one, functions)
                continue
            head = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(\[ARGS\])?", one)
            arguments = one[head.end() :] if head is not None else ""
            if head is None or not (head[2] or arguments.startswith("{") or head[1] in functions):
                raise ValueError("a call has no arguments")
            found.append(call_of(head[1], object_of(arguments)))
        return found


@dataclass(frozen=True)
class DeepSeek(JsonCalls):
    """DeepSeek's calls; ``fenced``, as V3 and R1 write them, with a type and a fence around the JSON."""

    fenced: bool = False
    begin: str = "<｜tool▁calls▁begin｜>"
    end: str = "<｜tool▁calls▁end｜>"
    inner: str = "<｜tool▁call▁begin｜>"
    tail: str = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.inner, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", self.end)

    def head(self, name: str) -> str:
        start = f"{self.begin}{self.inner}"
        return (
            f"{start}function<｜tool▁sep｜>{name}\n```json\n"
            if self.fenced
            else f"{start}{name}<｜tool▁sep｜>"
        )

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        found = []
        for one in filter(str.strip, split_outside(text, self.inner)):
            name, marked, after = split_outside(one, "<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
            if not marked and name.strip() not in functions:
                raise ValueError("a call has no name")
            fenced = re.match(r"\s*([\w.-]+)\s*(?:```json|\Z)", after) if "function" in name else None
            if fenced is not None:
                name, after = fenced[1], after[fenced.end() :].rstrip().removesuffix("```")
            found.append(call_of(name.strip(), object_of(after)))
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


def arguments_of(function: Signature) -> Any:
    """The schema of a function's arguments in a forced call; False if it allows none."""
    return closed(effective({"type": "object"} | function.parameters))


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
