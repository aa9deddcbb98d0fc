"""Formats of calls whose arguments are written between marks, not as one JSON value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.serve.calls import CallFormat, Mark, literal
from outpace.serve.json_calls import DEEP, Schema, Signature, WrittenCall, written
from outpace.serve.pairs import Pairs, matched
from outpace.serve.values import is_text, properties, resolved, texts_of, typed

_SCALARS = {"integer": "/-?(0|[1-9][0-9]{0,17})/", "boolean": '("true" | "false")', "null": '"null"'}
_NUMBER = "/-?(0|[1-9][0-9]{0,17})([.][0-9]{1,17})?/"
_DSML = "｜DSML｜"


@dataclass(frozen=True)
class Glm(Pairs):
    """``<tool_call>name`` and pairs of ``<arg_key>`` and ``<arg_value>``, as GLM 4.5 and later write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    opens: str = "<arg_key>"
    closes: str = "</arg_value>"

    def _around(self, name: str) -> tuple[str, str]:
        return f"{self.begin}{name}\n", self.end

    def _heads(self, text: bool) -> str:
        return "</arg_key>\n<arg_value>"

    def _other_key(self, text: str) -> tuple[str, bool, str]:
        found = re.match(r"(.*?)</arg_key>\s*<arg_value>", text, re.DOTALL)
        if found is None:
            raise ValueError("an argument has no value")
        return found[1].strip(), False, text[found.end() :]

    def may_begin(self, text: str) -> bool:
        named = re.fullmatch(r"\s*[\w.-]*\s*(<.*)?", text, re.DOTALL) is not None
        return named or text.lstrip().startswith("{")

    def _name(self, text: str) -> tuple[str, str]:
        return matched(r"([\w.-]+)\s*(?=<arg_key>|\Z)", text)


@dataclass(frozen=True)
class Coder(Pairs):
    """``<tool_call><function=name><parameter=key>``, as Qwen3-Coder and Qwen3.5 write it."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    inner: str = "<function="
    opens: str = "<parameter="
    closes: str = "</parameter>"
    after: str = "</function>"

    @property
    def _tail(self) -> str:
        return f"\n{self.closes}\n"

    def _around(self, name: str) -> tuple[str, str]:
        return f"{self.begin}\n{self.inner}{name}>\n", f"{self.after}\n{self.end}"

    def _heads(self, text: bool) -> str:
        return ">\n"

    def _trimmed(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n")

    def _name(self, text: str) -> tuple[str, str]:
        return matched(r"<function=([\w.-]+)>", text)


@dataclass(frozen=True)
class Dsml(Pairs):
    """``<｜DSML｜invoke name="...">`` whose parameters say whether they are texts: DeepSeek V3.2's."""

    begin: str = f"<{_DSML}function_calls>"
    end: str = f"</{_DSML}function_calls>"
    inner: str = f"<{_DSML}invoke name="
    opens: str = f'<{_DSML}parameter name="'
    closes: str = f"</{_DSML}parameter>"
    after: str = f"</{_DSML}invoke>"
    _tells = True

    @property
    def marks(self) -> tuple[str, ...]:
        return (_DSML,)

    def _around(self, name: str) -> tuple[str, str]:
        return f'{self.begin}\n{self.inner}"{name}">\n', f"{self.after}\n{self.end}"

    def _heads(self, text: bool) -> str:
        return f'" string="{"true" if text else "false"}">'

    def _other_key(self, text: str) -> tuple[str, bool, str]:
        found = re.match(r'(.*?)"\s*string="(\w*)">', text, re.DOTALL)
        if found is None:
            raise ValueError("an argument has no value")
        return found[1], found[2] == "true", text[found.end() :]

    def _name(self, text: str) -> tuple[str, str]:
        return matched(rf'<{_DSML}invoke name="([\w.-]+)">', text)


class _Rules(list[str]):
    """Rules of a grammar; ``own`` is what their names begin with."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.own = own


@dataclass(frozen=True)
class Gemma(CallFormat):
    """``call:name{key:value}`` between marks, with marks around texts, as FunctionGemma and Gemma 4 do."""

    begin: str = "<start_function_call>"
    end: str = "<end_function_call>"
    quote: str = "<escape>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def end_of(self, text: str, final: bool = False) -> int | None:
        quote, end = re.escape(self.quote), re.escape(self.end)
        marks = re.finditer(f"{quote}.*?(?:{quote}|\\Z)|{end}", text, re.DOTALL)
        return next((found.start() for found in marks if found[0] == self.end), None)

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        head = re.match(r"\s*call:([^{]+)", text)
        if head is None:
            raise ValueError("a call has no name")
        name = head[1].strip()
        root = functions[name].parameters if name in functions else {}
        value, rest = self._value(text[head.end() :] or "{}", root, root, 0)
        if rest.strip() or not isinstance(value, dict):
            raise ValueError("a call has an object of arguments")
        return [WrittenCall(name, written(value))]

    def _value(self, text: str, schema: Any, root: Schema, depth: int) -> tuple[Any, str]:
        """The value that a text begins with, and the rest of the text."""
        if depth > DEEP:
            raise ValueError("a call is nested too deeply")
        if text.startswith(self.quote):
            inner, marked, rest = text[len(self.quote) :].partition(self.quote)
            if not marked:
                raise ValueError("a text has no end")
            return inner, rest
        if text[:1] in ("{", "["):
            return self._several(text, resolved(schema, root), root, depth)
        if text.startswith('"'):
            found, end = json.JSONDecoder(strict=False).raw_decode(text)
            return found, text[end:]
        word = re.match(r"[^,}\]]*", text)
        assert word is not None
        return typed(word[0].strip(), schema, root), text[word.end() :]

    def _several(self, text: str, schema: Any, root: Schema, depth: int) -> tuple[Any, str]:
        close = {"{": "}", "[": "]"}[text[0]]
        own = schema if isinstance(schema, dict) else {}
        found: list[Any] = []
        text = text[1:].lstrip()
        while not text.startswith(close):
            key, inner = "", own.get("items")
            if close == "}":
                key, marked, text = text.partition(":")
                if not marked:
                    raise ValueError("an argument has no value")
                key = key.strip().removeprefix(self.quote).removesuffix(self.quote).strip('"')
                inner = properties(own).get(key)
            value, text = self._value(text.lstrip(), inner, root, depth + 1)
            found.append((key, value) if close == "}" else value)
            text = text.lstrip()
            if not text.startswith((",", close)):
                raise ValueError("a call has no end")
            text = text.removeprefix(",").lstrip()
        return (dict(found) if close == "}" else found), text[1:]

    def opening(self, name: str) -> str:
        return f"{self.begin}call:{name}{{"

    def rule(self, function: Signature, mark: Mark, own: str) -> tuple[str, str]:
        rules = _Rules(own)
        body = self._term(function.parameters, function.parameters, mark, rules, 0)
        head, tail = mark(self.begin), mark(self.end)
        return f"{head} {literal(f'call:{function.name}')} {body} {tail}", "\n".join(rules)

    def _text(self, mark: Mark, rules: _Rules) -> str:
        """The term of any text: up to its mark, which is a token of its own or text."""
        name = f"{rules.own}t{len(rules)}"
        quote = mark(self.quote)
        if quote.startswith("<"):
            rules.append(f"{name}: /(?s:.*)/")
            return f"{quote} {name} {quote}"
        rules.append(f"{name}[suffix={quote}]: /(?s:.*)/")
        return f"{quote} {name}"

    def _term(self, schema: Any, root: Schema, mark: Mark, rules: _Rules, depth: int) -> str:
        schema = resolved(schema, root)
        schema = schema if isinstance(schema, dict) and depth < DEEP else {}
        if is_text(schema):
            texts, quote = texts_of(schema), mark(self.quote)
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

    def _object(self, schema: Schema, root: Schema, mark: Mark, rules: _Rules, depth: int) -> str:
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


def _object_term(terms: dict[str, str], needed: set[str], rules: _Rules) -> str:
    """The term of an object with these keys, of which each may come once, in order."""
    later, first = '"}"', '"}"'
    for key in reversed(terms):
        one = terms[key]
        begun, opened = f"{rules.own}o{len(rules)}", f"{rules.own}o{len(rules)}f"
        rules.append(f'{begun}: "," {one} {later}' + ("" if key in needed else f" | {later}"))
        rules.append(f"{opened}: {one} {later}" + ("" if key in needed else f" | {first}"))
        later, first = begun, opened
    return f'"{{" {first}'
