"""Names and options of methods as tables, which are read without importing torch.

``methods.json`` in a package has those of its drafters, verifiers and observers; ``tools/reference.py``
writes it from their classes, and a test compares the two. A mistake in a spec string is so found at once;
what a table does not have, such as bounds of values, is checked when the class makes the object.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from outpace.spec import hints_of

FILE = "methods.json"
Entries = Mapping[str, Mapping[str, Any]]  # by name
_PLAIN = (int, float, bool, str, Path)


class Outline:
    """Base of the outlines, dataclasses with the options of a class of this name in specs."""

    called: ClassVar[str]
    types: ClassVar[Mapping[str, str]]


Drafter = Outline  # as the types of options in a table name it


def described(name: str, cls: type[Any]) -> dict[str, Any]:
    """The entry of a class, with its options as JSON values."""
    docs = [inspect.cleandoc(vars(base).get("__doc__") or "") for base in reversed(cls.__mro__)]
    about = {option: text for doc in docs for option, text in attributes(doc).items()}
    hints = hints_of(cls)
    return {
        "name": name,
        "summary": (inspect.getdoc(cls) or "").split("\n")[0],
        "when": vars(cls).get("when", ""),  # what a base is for, another class need not be
        "needs": getattr(cls, "needs", ""),
        "paper": getattr(cls, "paper", ""),
        "options": [
            {
                "name": one.name,
                "type": _spelled(hints[one.name]),
                "default": _default(one),
                "required": one.default is MISSING and one.default_factory is MISSING,
                "description": about.get(one.name, ""),
            }
            for one in fields(cls)
            if one.init
        ],
    }


@lru_cache
def entries(kind: str, package: str = "outpace") -> Entries:
    """A package's drafters, verifiers or observers by name; none if it has no table."""
    found = find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, FILE)).is_file():
            return {one["name"]: one for one in json.loads(path.read_text("utf-8")).get(kind, ())}
    return {}


def entry_of(kind: str, point: EntryPoint) -> Mapping[str, Any] | None:
    """The entry of another package's class; None if its table has none."""
    return entries(kind, point.module.partition(".")[0]).get(point.name)


@lru_cache
def outlines(kind: str) -> Mapping[str, type[Outline]]:
    """The outlines of outpace's own drafters or verifiers, by name."""
    return {name: outline(entry) for name, entry in entries(kind).items()}


def outline(entry: Mapping[str, Any]) -> type[Outline]:
    """The outline of an entry."""
    options = [
        (one["name"], one["type"], field() if one["required"] else field(default=_fixed(one["default"])))
        for one in entry["options"]
    ]
    told = {name: text for name, text, _ in options}
    namespace = {"called": entry["name"], "types": told, "__module__": __name__}  # whose names types have
    return make_dataclass(
        str(entry["name"]), options, bases=(Outline,), namespace=namespace, frozen=True, kw_only=True
    )


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _spelled(hint: Any) -> str:
    """A type as far as the text of a spec can be checked against it; otherwise Any."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if hint in _PLAIN:
        return str(hint.__name__)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if origin in (typing.Union, types.UnionType):
        parts = [_spelled(one) for one in inner]
        return "Any" if "Any" in parts else " | ".join(parts)
    if origin is tuple:
        parts = ["..." if one is ... else _spelled(one) for one in inner]
        return "Any" if "Any" in parts else f"tuple[{', '.join(parts)}]"
    names = [base.__name__ for base in getattr(origin or hint, "__mro__", ())]
    return "Drafter" if "Drafter" in names else "Any"


def _default(one: Field[Any]) -> Any:
    """A default as a JSON value, otherwise its repr; None if there is none."""
    if one.default is not MISSING:
        value = one.default
    elif one.default_factory is not MISSING:
        value = one.default_factory()
    else:
        return None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def attributes(doc: str) -> dict[str, str]:
    """The "Attributes:" section of a docstring: name -> description on one line."""
    section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2].strip()
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found
