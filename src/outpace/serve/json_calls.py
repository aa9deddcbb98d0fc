"""Calls as JSON objects in texts: with marks around them, or without any."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

Schema = dict[str, Any]
PYTHON_TAG = "<|python_tag|>"
DEEP = 32  # objects and lists within one another
_STRING = r'"(?:[^"\\]|\\.)*"?'
_CALL_KEYS = {"name", "arguments", "parameters", "function", "type", "id"}
_FIRST = re.compile(r'\{\s*(?:"(?P<key>\w*)(?P<named>"\s*(?::\s*(?:"(?P<value>[\w.-]*)(?P<ended>")?)?)?)?)?')
_FENCE = re.compile(r"```\w*[^\S\n]*\n")


@dataclass(frozen=True)
class WrittenCall:
    """A call that a model wrote: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Signature:
    """A function that may be called, and the schema of its arguments, a JSON object."""

    name: str
    parameters: Schema


def outside(text: str, mark: str) -> Iterator[int]:
    """The places of a mark that are not within JSON strings."""
    if mark in text:
        for found in re.finditer(f"{_STRING}|{re.escape(mark)}", text, re.DOTALL):
            if found[0] == mark:
                yield found.start()


def split_outside(text: str, mark: str) -> list[str]:
    """A text's parts between the marks that are not within JSON strings."""
    ends = [*outside(text, mark), len(text)]
    starts = [0, *(place + len(mark) for place in ends)]
    return [text[start:end] for start, end in zip(starts, ends, strict=False)]


def may_be_unmarked(text: str, functions: Mapping[str, Signature]) -> bool:
    """False for the beginning of an answer that is not calls without their marks, however it goes on."""
    said = text.lstrip()
    if PYTHON_TAG.startswith(said):
        return True
    said = said.removeprefix(PYTHON_TAG).lstrip()
    if said.startswith("`"):
        line, ended, said = said.partition("\n")
        if not ended or not re.fullmatch(r"```\w*[^\S\n]*", line):
            return not ended and re.fullmatch(r"`{1,2}|```\w{0,16}[^\S\n]{0,8}", line) is not None
    said = said.lstrip(" \t\r\n[")
    head = _FIRST.match(said)
    if head is None or head["key"] is None:
        return not said or (head is not None and head.end() == len(said))
    if head["named"] is None:
        return head.end() == len(said) and any(key.startswith(head["key"]) for key in _CALL_KEYS)
    if head["key"] not in ("name", "type"):
        return head["key"] in _CALL_KEYS
    known = functions.keys() if head["key"] == "name" else {"function"}
    if head["ended"]:
        return head["value"] in known
    return head.end() == len(said) and any(one.startswith(head["value"] or "") for one in known)


def unmarked(text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
    """The calls that an answer without marks is as a whole: JSON of offered functions, fenced or not.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    values = list(values_of(text.strip().removeprefix(PYTHON_TAG)))
    found = [from_value(one) for one in values]
    known = all(one.keys() <= _CALL_KEYS for one in values)
    if not found or not known or not all(one.name in functions for one in found):
        raise ValueError("other JSON")
    return found


def values_of(text: str) -> Iterator[Any]:
    """The JSON values of a text, between which there are blanks or semicolons; of lists, their elements.

    The text may stand in a fence of Markdown. As small models write them, the last value may lack braces at
    its end or have some more, or be written as Python's.
    """
    text = text.strip()
    if (fence := _FENCE.match(text)) is not None:
        text = text[fence.end() :].removesuffix("```").strip()
    if not text:
        raise ValueError("a call is empty")
    while text:
        try:
            value, end = _DECODER.raw_decode(text)
        except ValueError:
            value, end = _mended(text), len(text)
        if isinstance(value, list):
            yield from value
        else:
            yield value
        text = text[end:].lstrip(" \n\r\t;")
        text = text if text.strip("} \n") else ""


def _mended(text: str) -> Any:
    """The value of a text that lacks braces at its end, or has one too many, or is one of Python's."""
    if not {'"', "'"} & {*text}:  # an object that has only begun
        raise ValueError("nothing is said")
    for whole in (f"{text}}}", f"{text}}}}}", text.removesuffix("}")):
        with suppress(ValueError):
            return _DECODER.decode(whole)
    return from_python(text)


def from_python(text: str) -> Any:
    """The value of a literal of Python, if JSON has it too.

    Raises:
        ValueError: it is something else.
    """
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error
    if not _is_json(value):
        raise ValueError("not JSON")
    return value


def _is_json(value: Any, depth: int = 0) -> bool:
    if depth > DEEP:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one, depth + 1) for key, one in value.items())
    if isinstance(value, list):
        return all(_is_json(one, depth + 1) for one in value)
    return value is None or isinstance(value, str | bool | int | float)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number, strict=False)


def object_of(text: str) -> Any:
    """The JSON value of a text, which may be as in ``values_of``; of an empty one, no arguments."""
    if not (text := text.strip()):
        return {}
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return _mended(text)


def from_value(value: Any) -> WrittenCall:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = value.get("name", inner)
    arguments = value.get("arguments", value.get("parameters"))
    return call_of(name, object_of(arguments) if isinstance(arguments, str) else arguments)


def call_of(name: Any, arguments: Any) -> WrittenCall:
    """A call of a function; without arguments it has an empty object of them.

    Raises:
        ValueError: there is no name, or no object of arguments.
    """
    arguments = {} if arguments is None else arguments
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("a call has a name, and an object of arguments")
    return WrittenCall(name, written(arguments))


def written(value: Any) -> str:
    """A value as JSON that can be sent: halves of characters stay escaped.

    Raises:
        ValueError: a number is infinite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
