"""``outpace drafters``: the methods, their options and their papers, read from the classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outpace.catalogue import described, entries, entry_of
from outpace.cli import completing, screen
from outpace.cli import options as o
from outpace.cli.app import app, guarded, show
from outpace.core import OutpaceError
from outpace.names import check_names
from outpace.plugins import installed, package_of

_HOW_TO_WRITE = (
    "An option follows the name, as in --drafter lookahead:window=5,guesses=5. A drafter as an option goes "
    "in parentheses; join several by plus signs, as in "
    "combined:parts=(lookahead:window=5)+(prompt_lookup),max_nodes=40. The name of the first option may be "
    "omitted then, as in combined:(lookahead)+(prompt_lookup). JSON is read too, as in "
    '\'{"method": "lookahead", "window": 5}\'. Name your own drafter by its path, '
    "as in my_package.my_module:MyDrafter:window=5."
)

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Show this one: its options and its paper.",
        show_default=False,
        autocompletion=completing.drafters,
        callback=completing.with_own_modules,
    ),
]


@app.command(epilog="Example: outpace drafters suffix")
@guarded
def drafters(name: Name = None, as_json: o.AsJson = False) -> None:
    """List the drafting methods: when to use which, and what it needs.

    Drafters registered by other installed packages are listed with their package.
    """
    if name is None:
        show(catalogue(), as_json, table)
        return
    check_names(drafter=name)
    show(shown_entry(name), as_json, page)


def shown_entry(name: str) -> dict[str, Any]:
    """The entry of one drafter; by its path, if it is not listed.

    Raises:
        OutpaceError: there is no such drafter.
    """
    found = next((entry for entry in catalogue() if entry["name"] == name), None)
    if found is not None:
        return found
    with screen.busy(f"importing {name} ..."):
        from outpace.drafters import drafter_class

        return _listed("outpace", described(name, drafter_class(name)))


def catalogue() -> list[dict[str, Any]]:
    """Each drafter with its package, its summary, its paper, and its options as JSON values."""
    own = [_listed("outpace", entry) for entry in entries("drafter").values()]
    return own + list(_third_party())


def _listed(package: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": entry["name"], "package": package, **entry, "error": None}


def _third_party() -> Iterator[dict[str, Any]]:
    """The drafters of other packages; unusable ones are listed with their error.

    A class that is in no table is imported.
    """
    for name, point in installed("drafters").items():
        package = package_of(point)
        try:
            if name in entries("drafter"):
                raise OutpaceError(f"outpace has its own drafter {name!r}; select this one as {point.value}")
            yield _listed(package, entry_of("drafter", point) or _imported(name, point))
        except OutpaceError as error:
            empty = {"summary": "", "when": "", "needs": "", "paper": "", "options": []}
            yield {"name": name, "package": package, **empty, "error": str(error)}


def _imported(name: str, point: EntryPoint) -> dict[str, Any]:
    with screen.busy(f"importing {point.value} ..."):
        from outpace.drafters import Drafter
        from outpace.plugins import load_class

        return described(name, load_class("drafter", point, Drafter))


def table(found: list[dict[str, Any]]) -> RenderableType:
    """A line for each drafter: those that need nothing, those that do, and those of other packages."""
    groups: dict[str, list[dict[str, Any]]] = {"For any model": [], "With something more": []}
    for entry in found:
        own = list(groups)[bool(entry["needs"])]
        groups.setdefault(own if entry["package"] == "outpace" else entry["package"], []).append(entry)
    blocks: list[RenderableType] = []
    for title, group in groups.items():
        blocks += [Text(title, style="bold"), _lines(group), Text("")]
    return Group(*blocks, Text("Options and paper of one: outpace drafters NAME", style="dim"))


def _lines(found: list[dict[str, Any]]) -> Table:
    grid = _grid()
    for entry in found:
        about = entry["when"] or entry["summary"].rstrip(".")
        needs = f"; needs {entry['needs']}" if entry["needs"] else ""
        text = Text(entry["error"], style="red") if entry["error"] else Text(about + needs)
        grid.add_row(Text(f"  {entry['name']}", style="bold"), text)
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    return grid


def page(entry: dict[str, Any]) -> RenderableType:
    name = Text(entry["name"], style="bold")
    if entry["package"] != "outpace":
        name.append(f" ({entry['package']})", style="not bold dim")
    if entry["error"]:
        return Group(name, Text(entry["error"], style="red"))
    rows = (("when", entry["when"]), ("needs", entry["needs"]), ("paper", entry["paper"]))
    facts = _grid()
    for title, text in rows:
        if text:
            facts.add_row(Text(title, style="dim"), Text(text))
    blocks: list[RenderableType] = [name, Text(entry["summary"]), facts]
    if entry["options"]:
        blocks += [
            Text("\nOptions", style="bold"),
            Padding(_option_table(entry["options"]), (0, 0, 0, 2), expand=False),
        ]
    return Group(*blocks, Text(f"\n{_HOW_TO_WRITE}", style="dim"))


def _option_table(options: list[dict[str, Any]]) -> Table:
    grid = _grid()
    for option in options:
        default = "" if option["required"] else f" = {shown(option['default'])}"
        grid.add_row(
            Text(f"{option['name']}: {_kind(option['type'])}{default}"),
            Text(option["description"].replace("``", "`")),
        )
    return grid


def _kind(annotation: str) -> str:
    """A type in readable form: a choice as its values, a drafter as its notation."""
    if "Drafter" in annotation:
        return "(drafter)+(drafter)..." if annotation.startswith("tuple") else "(drafter)"
    choices = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return choices[1].replace("'", "").replace('"', "").replace(", ", "|") if choices else annotation


def shown(value: Any) -> str:
    if isinstance(value, list):  # in JSON a tuple is one
        value = tuple(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
