"""Names and options of methods, read from their source: importing them imports torch.

A mistake in a spec string is so found at once. What the source does not show is checked when the class makes
the object, such as bounds of values.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import cached_property, reduce
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from typing import Any, ClassVar, Literal

_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "Any": Any}


class Outline:
    """Base of the outlines, which have their class's options.

    Attributes:
        called: the class's name in specs.
        docs: the docstrings of its bases and its own.
        types: the annotations of its options, as they are written.
    """

    called: ClassVar[str]
    docs: ClassVar[tuple[str, ...]]
    types: ClassVar[Mapping[str, str]]


class Outlines:
    """The outlines of classes in source files.

    Args:
        files: those that are read.
        base: name of the classes' base class, which stands for one of them in annotations of options.
        mark: the attribute that a class sets itself, unless it is a base of others.
    """

    def __init__(self, files: Iterable[Path], base: str, mark: str = "") -> None:
        self._base, self._mark = base, mark
        self._classes: dict[str, ast.ClassDef] = {}
        self._aliases: dict[str, ast.expr] = {}
        for path in files:
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self._classes[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._aliases[node.targets[0].id] = node.value

    @cached_property
    def table(self) -> dict[str, type[Outline]]:
        """The outlines by name."""
        marked = [node for node in self._classes.values() if _set(node).get(self._mark) is not None]
        return dict(sorted((self._name(node), self.of(node.name)) for node in marked))

    def of(self, name: str) -> type[Outline]:
        """The outline of the class of a name."""
        # An option that a base has too keeps its place there.
        node, nodes = self._classes[name], [*self._lineage(name)]
        options = {one[0]: one for one in self._options(node)}.values()
        texts = {key: _value(value) for one in nodes for key, value in _set(one).items() if value is not None}
        described = {"needs": texts.get("needs") or "", "paper": texts.get("paper") or ""}
        if "when" in _set(node):  # what a base is for, another class need not be
            described["when"] = texts["when"]
        namespace = described | {
            "called": self._name(node),
            "__doc__": ast.get_docstring(node),
            "docs": tuple(doc for one in nodes if (doc := ast.get_docstring(one))),
            "types": {key: text for one in nodes for key, text in _annotations(one).items()},
        }
        return make_dataclass(name, options, bases=(Outline,), namespace=namespace, frozen=True, kw_only=True)

    def _lineage(self, name: str) -> Iterator[ast.ClassDef]:
        """A class after its bases."""
        if (node := self._classes.get(name)) is not None:
            for base in node.bases:
                inner = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(inner, ast.Name):
                    yield from self._lineage(inner.id)
            yield node

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


def outline_of(module: str, name: str, base: str) -> type[Outline] | None:
    """The outline of a class of another package; None if its source, or a base's, cannot be found.

    Args:
        base: as for ``Outlines``.
    """
    files: dict[Path, None] = {}
    return Outlines(files, base).of(name) if _gathered(module, name, files) else None


def _gathered(module: str, name: str, files: dict[Path, None]) -> bool:
    """Add the files of a class and of its bases, which its module imports; False if one is not found."""
    if (path := _file(module)) is None:
        return False
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        one.asname or one.name: (node.module or "", one.name)
        for node in ast.walk(tree)  # a package may import for the reader alone
        if isinstance(node, ast.ImportFrom) and not node.level
        for one in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            files[path] = None
            bases = [one.value if isinstance(one, ast.Subscript) else one for one in node.bases]
            return all(isinstance(one, ast.Name) and _gathered(module, one.id, files) for one in bases)
    if name not in imported:
        return False
    owner, name = imported[name]
    return owner.partition(".")[0] in sys.stdlib_module_names or _gathered(owner, name, files)


def _file(module: str) -> Path | None:
    """The source file of a module, without importing its package."""
    top, *below = module.split(".")
    found = find_spec(top)
    if found is None or not below:
        return None if found is None or not found.has_location else Path(found.origin or "")
    for folder in found.submodule_search_locations or ():
        path = Path(folder, *below)
        for file in (path / "__init__.py", path.parent / f"{path.name}.py"):
            if file.is_file():
                return file
    return None


def _annotations(node: ast.ClassDef) -> dict[str, str]:
    """The annotations in a class's body, as they are written."""
    return {
        one.target.id: ast.unparse(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


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
