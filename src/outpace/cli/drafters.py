"""``outpace drafters``: the methods, their options and their papers, read off the classes."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, Field, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outpace.drafters import DRAFTERS
from outpace.drafters.base import Drafter


def catalogue() -> list[dict[str, Any]]:
    """Each drafter with its summary, its paper, and its options as JSON values."""
    return [
        {
            "name": name,
            "summary": (inspect.getdoc(cls) or "").split("\n")[0],
            "paper": getattr(cls, "paper", ""),
            "options": _options(cls),
        }
        for name, cls in DRAFTERS.items()
    ]


def _options(cls: type[Drafter[Any]]) -> list[dict[str, Any]]:
    docs = (inspect.cleandoc(vars(base).get("__doc__") or "") for base in reversed(cls.__mro__))
    about = {name: text for doc in docs for name, text in _attributes(doc).items()}
    return [
        {
            "name": field.name,
            "type": field.type if isinstance(field.type, str) else getattr(field.type, "__name__", ""),
            "default": _default(field),
            "required": field.default is MISSING and field.default_factory is MISSING,
            "description": about.get(field.name, ""),
        }
        for field in fields(cls)
        if field.init
    ]


def _default(field: Field[Any]) -> Any:
    """A default as JSON has it, or else as Python writes it; None where there is none."""
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return None
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _attributes(doc: str) -> dict[str, str]:
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


def table() -> RenderableType:
    """The catalogue for people."""
    blocks: list[RenderableType] = []
    for entry in catalogue():
        blocks.append(Text(entry["name"], style="bold"))
        blocks.append(Padding(Text(entry["summary"]), (0, 0, 0, 2), expand=False))
        blocks.append(Padding(Text(f"Paper: {entry['paper']}", style="dim"), (0, 0, 0, 2), expand=False))
        if entry["options"]:
            blocks.append(Padding(_option_table(entry["options"]), (0, 0, 0, 2), expand=False))
        blocks.append(Text(""))
    blocks.append(
        Text(
            "An option is set after the name, as in --drafter lookahead:window=5,guesses=5. A drafter as an "
            "option goes in parentheses, and several are joined by plus signs, as in "
            "combined:parts=(lookahead:window=5)+(prompt_lookup),max_nodes=40. The name of the first option "
            "may be left out there, as in combined:(lookahead)+(prompt_lookup).",
            style="dim",
        )
    )
    return Group(*blocks)


def _option_table(options: list[dict[str, Any]]) -> Table:
    """A row for each option: how it is written with its default, and what it is."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for option in options:
        default = "" if option["required"] else f" = {_shown(option['default'])}"
        grid.add_row(Text(f"{option['name']}: {_kind(option['type'])}{default}"), Text(option["description"]))
    return grid


def _kind(annotation: str) -> str:
    """A type as people read it: a choice by its values, a drafter as it is written."""
    if "Drafter" in annotation:
        return "(drafter)+(drafter)..." if annotation.startswith("tuple") else "(drafter)"
    choices = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return choices[1].replace("'", "").replace('"', "").replace(", ", "|") if choices else annotation


def _shown(value: Any) -> str:
    """A default the way it is written in a spec string."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
