"""Formats of calls whose arguments are written between marks, not as one JSON value."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from outpace.serve.calls import (
    Call,
    CallFormat,
    Mark,
    Schema,
    Signature,
    closed,
    literal,
    split_by_marks,
)

_SCALARS = {"integer": "/-?(0|[1-9][0-9]{0,17})/", "boolean": '("true" | "false")', "null": '"null"'}
_NUMBER = "/-?(0|[1-9][0-9]{0,17})([.][0-9]{1,17})?/"
_DSML = "｜DSML｜"
_DEEP = 32  # objects and lists within one another


def _properties(function: Signature) -> dict[str, Any]:
    found = function.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def _resolved(schema: Any, root: Schema) -> Any:
    """A schema in place of a reference to one of the root's definitions."""
    for _ in range(_DEEP):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        place: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            place = place.get(name) if isinstance(place, dict) else None
        schema = place
    return None


def _is_text(schema: Any) -> bool:
    """True if the values of a schema are texts alone."""
    if not isinstance(schema, dict):
        return False
    if "enum" in schema:
        return isinstance(schema["enum"], list) and all(isinstance(one, str) for one in schema["enum"])
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)


def _texts(schema: Schema) -> list[str]:
    """The texts that a schema allows; empty for any."""
    return list(schema["enum"]) if "enum" in schema else [schema["const"]] if "const" in schema else []


Pair = tuple[str, str, bool]  # a key, a value, and whether the value says that it is a text
Around = Callable[[str, bool], tuple[str, str]]  # what is around the value of a key, which is a text or not


class Pairs(CallFormat):
    """Calls of pairs of a key and a value: a text as it is, all else as JSON."""

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        found = []
        for one in self._calls(text):
            name, pairs = self._pairs(one)
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError("a call has no name")
            function = functions.get(name)
            known = {} if function is None else _properties(function)
            root = {} if function is None else function.parameters
            arguments = {
                key: value if text_ else _value(value, _resolved(known.get(key), root))
                for key, value, text_ in pairs
            }
            found.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        return found

    def rule(self, function: Signature, mark: Mark) -> tuple[str, str]:
        needed = function.parameters.get("required")
        names = set(needed) if isinstance(needed, list) else set()
        before, between, after = self._around(function.name)
        terms, rules = split_by_marks(before, self.marks, mark), list[str]()
        for number, (key, schema) in enumerate(_properties(function).items()):
            own = _resolved(schema, function.parameters)
            head, tail = between(key, _is_text(own))
            ended = split_by_marks(tail, self.marks, mark)
            value, more = _term(f"@v{number}", own, ended, function)
            rules.append(more)
            pair = " ".join([*split_by_marks(head, self.marks, mark), value])
            terms.append(pair if key in names else f"({pair})?")
        return " ".join([*terms, *split_by_marks(after, self.marks, mark)]), "\n".join(filter(None, rules))

    def _calls(self, text: str) -> list[str]:
        """The calls between the marks."""
        return [text]

    @abstractmethod
    def _pairs(self, text: str) -> tuple[str, list[Pair]]:
        """A call's name, and its pairs."""

    @abstractmethod
    def _around(self, name: str) -> tuple[str, Around, str]:
        """The text before the pairs, what is around a value, and the end."""


def _value(text: str, schema: Any) -> Any:
    if _is_text(schema):
        return text
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def _term(name: str, schema: Any, tail: list[str], function: Signature) -> tuple[str, str]:
    """The term of a value and of what follows it, and the rules that it needs.

    Args:
        tail: what follows, as terms; those that are tokens are no literals.
    """
    after = " ".join(tail)
    if not _is_text(schema):
        root = {
            key: function.parameters[key] for key in ("$defs", "definitions") if key in function.parameters
        }
        whole = closed({**root, **(schema if isinstance(schema, dict) else {})})
        spacing = {"x-guidance": {"whitespace_flexible": False}}
        return f"{name} {after}", f"{name}: %json {json.dumps(whole | spacing)}"
    texts = _texts(schema)
    if texts:
        return f"({' | '.join(map(literal, texts))}) {after}", ""
    if len(tail) > 1 and tail[1].startswith("<["):  # a token ends the text, and what stands before it
        before = re.escape(json.loads(tail[0])).replace("/", "\\/")
        return f"{name} {' '.join(tail[1:])}", f"{name}: /(?s:.*){before}/"
    whole_tail = "".join(map(json.loads, tail))
    return name, f"{name}[suffix={literal(whole_tail)}]: /(?s:.*)/"


@dataclass(frozen=True)
class Glm(Pairs):
    """``<tool_call>name`` and pairs of ``<arg_key>`` and ``<arg_value>``, as GLM 4.5 and later write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    def _around(self, name: str) -> tuple[str, Around, str]:
        def between(key: str, text: bool) -> tuple[str, str]:
            return f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"

        return f"{self.begin}{name}\n", between, self.end

    def _pairs(self, text: str) -> tuple[str, list[Pair]]:
        name, *rest = text.split("<arg_key>")
        pairs = []
        for one in rest:
            key, marked, value = one.partition("</arg_key>")
            inner = value.partition("<arg_value>")[2].partition("</arg_value>")
            if not marked or not inner[1]:
                raise ValueError("an argument has no value")
            pairs.append((key.strip(), inner[0], False))
        return name.strip(), pairs


@dataclass(frozen=True)
class Coder(Pairs):
    """``<tool_call><function=name><parameter=key>``, as Qwen3-Coder and Qwen3.5 write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    def _around(self, name: str) -> tuple[str, Around, str]:
        def between(key: str, text: bool) -> tuple[str, str]:
            return f"<parameter={key}>\n", "\n</parameter>\n"

        return f"{self.begin}\n<function={name}>\n", between, f"</function>\n{self.end}"

    def _pairs(self, text: str) -> tuple[str, list[Pair]]:
        name, marked, rest = text.strip().removeprefix("<function=").partition(">")
        if not marked or "</function>" not in rest:
            raise ValueError("a call has no function")
        pairs = []
        for one in rest.split("<parameter=")[1:]:
            key, _, value = one.partition(">")
            value, ended, _ = value.partition("</parameter>")
            if not ended:
                raise ValueError("an argument has no end")
            pairs.append((key, value.removeprefix("\n").removesuffix("\n"), False))
        return name, pairs


@dataclass(frozen=True)
class Dsml(Pairs):
    """``<｜DSML｜invoke name="...">`` whose parameters say whether they are texts: DeepSeek V3.2's."""

    begin: str = f"<{_DSML}function_calls>"
    end: str = f"</{_DSML}function_calls>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (_DSML,)

    def _around(self, name: str) -> tuple[str, Around, str]:
        def between(key: str, text: bool) -> tuple[str, str]:
            kind = "true" if text else "false"
            return f'<{_DSML}parameter name="{key}" string="{kind}">', f"</{_DSML}parameter>\n"

        return f'{self.begin}\n<{_DSML}invoke name="{name}">\n', between, f"</{_DSML}invoke>\n{self.end}"

    def _calls(self, text: str) -> list[str]:
        before, *calls = text.split(f'<{_DSML}invoke name="')
        if before.strip() or not calls:
            raise ValueError("there is no call")
        return calls

    def _pairs(self, text: str) -> tuple[str, list[Pair]]:
        name, marked, rest = text.partition('">')
        if not marked or f"</{_DSML}invoke>" not in rest:
            raise ValueError("a call has no end")
        pairs = []
        for one in rest.split(f'<{_DSML}parameter name="')[1:]:
            key, _, given = one.partition('" string="')
            kind, _, value = given.partition('">')
            value, ended, _ = value.partition(f"</{_DSML}parameter>")
            if not ended:
                raise ValueError("an argument has no end")
            pairs.append((key, value, kind == "true"))
        return name, pairs


@dataclass(frozen=True)
class Gemma(CallFormat):
    """``call:name{key:value}`` between marks, with marks around texts, as FunctionGemma and Gemma 4 do."""

    begin: str = "<start_function_call>"
    end: str = "<end_function_call>"
    quote: str = "<escape>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[Call]:
        head = re.match(r"\s*call:([^{]+)", text)
        if head is None:
            raise ValueError("a call has no name")
        value, rest = self._value(text[head.end() :], 0)
        if rest.strip() or not isinstance(value, dict):
            raise ValueError("a call has an object of arguments")
        return [Call(head[1].strip(), json.dumps(value, ensure_ascii=False))]

    def _value(self, text: str, depth: int) -> tuple[Any, str]:
        """The value that a text begins with, and the rest of the text."""
        if depth > _DEEP:
            raise ValueError("a call is nested too deeply")
        if text.startswith(self.quote):
            inner, marked, rest = text[len(self.quote) :].partition(self.quote)
            if not marked:
                raise ValueError("a text has no end")
            return inner, rest
        if text[:1] in ("{", "["):
            return self._several(text, depth)
        word = re.match(r"[^,}\]]*", text)
        assert word is not None
        return _value(word[0].strip(), None), text[word.end() :]

    def _several(self, text: str, depth: int) -> tuple[Any, str]:
        close = {"{": "}", "[": "]"}[text[0]]
        found: list[Any] = []
        text = text[1:].lstrip()
        while not text.startswith(close):
            key = ""
            if close == "}":
                key, marked, text = text.partition(":")
                if not marked:
                    raise ValueError("an argument has no value")
            value, text = self._value(text.lstrip(), depth + 1)
            found.append((key.strip().strip('"'), value) if close == "}" else value)
            text = text.lstrip()
            if not text.startswith((",", close)):
                raise ValueError("a call has no end")
            text = text.removeprefix(",").lstrip()
        return (dict(found) if close == "}" else found), text[1:]

    def rule(self, function: Signature, mark: Mark) -> tuple[str, str]:
        rules: list[str] = []
        body = self._term(function.parameters, function.parameters, mark, rules, 0)
        head, tail = mark(self.begin), mark(self.end)
        return f"{head} {literal(f'call:{function.name}')} {body} {tail}", "\n".join(rules)

    def _text(self, mark: Mark, rules: list[str]) -> str:
        """The term of any text: up to its mark, which is a token of its own or text."""
        name = f"@t{len(rules)}"
        quote = mark(self.quote)
        if quote.startswith("<"):
            rules.append(f"{name}: /(?s:.*)/")
            return f"{quote} {name} {quote}"
        rules.append(f"{name}[suffix={quote}]: /(?s:.*)/")
        return f"{quote} {name}"

    def _term(self, schema: Any, root: Schema, mark: Mark, rules: list[str], depth: int) -> str:
        schema = _resolved(schema, root)
        schema = schema if isinstance(schema, dict) and depth < _DEEP else {}
        if _is_text(schema):
            texts, quote = _texts(schema), mark(self.quote)
            if not texts:
                return self._text(mark, rules)
            return f"{quote} ({' | '.join(map(literal, texts))}) {quote}"
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return "(" + " | ".join(literal(json.dumps(one)) for one in values) + ")"
        kind = schema.get("type", "object" if "properties" in schema or depth == 0 else None)
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind == "number":
            return _NUMBER
        if kind == "array":
            one = self._term(schema.get("items"), root, mark, rules, depth + 1)
            return f'"[" ({one} ("," {one})*)? "]"'
        if kind == "object":
            return self._object(schema, root, mark, rules, depth)
        return f"({self._text(mark, rules)} | {_NUMBER} | {_SCALARS['boolean']})"

    def _object(self, schema: Schema, root: Schema, mark: Mark, rules: list[str], depth: int) -> str:
        """The term of an object: the keys of its schema, in order, those that are needed always."""
        properties = schema.get("properties")
        pairs = properties if isinstance(properties, dict) else {}
        needed = schema.get("required")
        names = set(needed) if isinstance(needed, list) else set()
        terms = {
            key: f"{literal(f'{key}:')} {self._term(value, root, mark, rules, depth + 1)}"
            for key, value in pairs.items()
        }
        return _object_term(terms, names, rules)


def _object_term(terms: dict[str, str], needed: set[str], rules: list[str]) -> str:
    """The term of an object with these keys, of which each may come once, in order."""
    later, first = '"}"', '"}"'
    for key in reversed(terms):
        one = terms[key]
        begun, opened = f"@o{len(rules)}", f"@o{len(rules)}f"
        rules.append(f'{begun}: "," {one} {later}' + ("" if key in needed else f" | {later}"))
        rules.append(f"{opened}: {one} {later}" + ("" if key in needed else f" | {first}"))
        later, first = begun, opened
    return f'"{{" {first}'
