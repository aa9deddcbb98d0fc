"""Names and options of outpace's own methods, read from their source: importing them imports torch.

A mistake in a spec string is so found at once. What the source does not show is checked when the class makes
the object: bounds of values, and classes of other packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "Any": Any}


class Outline:
    """Base of the outlines, which have their class's options and nothing else."""


class Outlines:
    """The outlines of a package's classes.

    Args:
        folder: the package's.
        base: name of the classes' base class, which stands for one of them in annotations of options.
        mark: the attribute that a class sets itself, unless it is a base of others.
    """

    def __init__(self, folder: Path, base: str, mark: str) -> None:
        self._base, self._mark = base, mark
        self._classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self._classes[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._aliases[node.targets[0].id] = node.value

    @cached_property
    def table(self) -> dict[str, type[Outline]]:
        """The outlines by name."""
        found = {}
        for node in self._classes.values():
            if _set(node).get(self._mark) is not None:
                name = self._name(node)
                # An option that a base has too keeps its place there.
                options = {one[0]: one for one in self._options(node)}.values()
                found[name] = make_dataclass(node.name, options, bases=(Outline,), frozen=True, kw_only=True)
        return dict(sorted(found.items()))

    @staticmethod
    def _name(node: ast.ClassDef) -> str:
        given = _set(node).get("name")
        if isinstance(given, ast.Constant):
            return str(given.value)
        return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()  # as ``Drafter`` names it

    def _options(self, node: ast.ClassDef) -> Iterator[tuple[str, Any, Any]]:
        """The options of a class and of its bases: name, type, and a field with its default."""
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and name.id in self._classes:
                yield from self._options(self._classes[name.id])
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                if "ClassVar" in ast.unparse(one.annotation):
                    continue
                made = one.value
                if isinstance(made, ast.Call):  # field(...)
                    given = {word.arg: word.value for word in made.keywords}
                    made = given.get("default", given.get("default_factory"))
                default: dict[str, Any] = {} if made is None else {"default": _value(made)}
                yield one.target.id, self._type(one.annotation), field(**default)

    def _type(self, node: ast.expr) -> Any:
        """The type of an annotation, as far as a spec's text can be checked against it; otherwise Any."""
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name):
            if node.id == self._base:
                return Outline
            alias = self._aliases.get(node.id)
            return _PLAIN.get(node.id, Any) if alias is None else self._type(alias)
        if isinstance(node, ast.BinOp):
            parts = [self._type(node.left), self._type(node.right)]
            return Any if Any in parts else reduce(or_, parts)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id == "Literal":
                return Literal[tuple(_value(one) for one in inner)]
            if node.value.id == self._base:
                return Outline
            if node.value.id == "tuple":
                parts = [... if _value(one) is ... else self._type(one) for one in inner]
                return Any if Any in parts else tuple[tuple(parts)]  # type: ignore[misc]
        return Any


def _set(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The attributes that a class's body sets, with their values."""
    return {
        one.target.id: one.value
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    } | {
        target.id: one.value
        for one in node.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }


def _value(node: ast.expr) -> Any:
    """The value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
