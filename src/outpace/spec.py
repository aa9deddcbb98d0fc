"""Spec strings of drafters and verifiers: a name, then options, as in ``lookahead:window=7,ngram=5``.

They nest, for drafters that combine others::

    spec    = name [":" item {"," item}]
    item    = option "=" value | group {"+" group}      without a name, groups are the first option's
    value   = text | group {"+" group}                  groups, where the option takes drafters
    group   = "(" spec ")"

as in ``combined:(lookahead:window=5,ngram=4)+(prompt_lookup),max_nodes=40``. A text may contain commas inside
parentheses; its parentheses must be balanced. A spec may be JSON, for shells that dislike parentheses::

    {"method": "combined", "parts": [{"method": "lookahead", "window": 5}, "prompt_lookup"], "max_nodes": 40}

A name is a key of a table, an entry point that an installed package registers, or the path of a class:
``my_package.my_module:Mine:window=3``. Classes of other packages are imported when a spec names them.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypeVar

from outpace.core import OutpaceError, near
from outpace.plugins import checked_class, installed, load_class, why_absent
from outpace.spec_text import balanced, plain, split

T = TypeVar("T")
Foreign = Callable[[EntryPoint], type[T] | None]

_NUMBERS = tuple[int, ...]
_NONE: Mapping[str, EntryPoint] = types.MappingProxyType({})  # classes of other packages are not allowed
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "none",
    _NUMBERS: "whole numbers, as in 2+4+5",
}


def check_least(owner: str, options: object, **least: float) -> None:
    """Check options against lower bounds; None passes.

    Args:
        owner: name of the method that has them, for the message.

    Raises:
        OutpaceError: an option is below its bound; the message names both.
    """
    _check_bounds(owner, options, least, "least", operator.lt)


def check_most(owner: str, options: object, **most: int) -> None:
    """Check options against upper bounds, beyond which a step would take minutes; None passes.

    Args:
        owner: name of the method that has them, for the message.

    Raises:
        OutpaceError: an option is above its bound; the message names both.
    """
    _check_bounds(owner, options, most, "most", operator.gt)


def _check_bounds(
    owner: str,
    options: object,
    bounds: Mapping[str, float],
    word: str,
    beyond: Callable[[float, float], bool],
) -> None:
    for option, bound in bounds.items():
        value = getattr(options, option)
        if value is not None and beyond(value, bound):
            shown = value if value < 10**15 else "a number of more than 15 digits"
            raise OutpaceError(f"{owner}: {option} must be at {word} {bound}, not {shown}")


def check_choices(owner: str, options: object, *names: str) -> None:
    """Check options whose types are ``Literal``; a spec string's are checked when it is read.

    Raises:
        OutpaceError: an option has another value; the message names the choices.
    """
    hints = typing.get_type_hints(type(options))
    for option in names:
        value, choices = getattr(options, option), typing.get_args(hints[option])
        if value not in choices:
            wanted = " or ".join(map(repr, choices))
            raise OutpaceError(f"{owner}: {option} must be {wanted}, not {value!r}")


def load(kind: str, table: Mapping[str, type[T]], spec: str, base: type[T] | None = None) -> T:
    """The object that a spec string ``name:option=value,option=value``, or the same as JSON, describes.

    Args:
        kind: "drafter" or "verifier", for messages.
        table: dataclasses by name; their fields are their options. A field whose type is one of these classes
            or a base class of one takes a spec in parentheses; a ``tuple`` field takes several.
        base: the common base class, if classes of other packages are allowed: by path, or by the name of an
            entry point in the group ``outpace.{kind}s``.

    Raises:
        OutpaceError: unknown name or option, invalid value, unbalanced parentheses, or a class of another
            package that cannot be imported; the message names the remedy.
    """
    if not isinstance(spec, str):
        raise OutpaceError(
            f"a {kind} must be an instance or a spec string, as in {next(iter(table))!r}; not {spec!r}"
        )
    spec = plain(spec)
    if not balanced(spec):
        raise OutpaceError(f"the parentheses do not match in {spec.strip()!r}")
    return _Loader(kind, table, base).load(spec)


def check(kind: str, table: Mapping[str, type[T]], spec: str, foreign: Foreign[T]) -> T | None:
    """Check a spec string without importing what it names.

    Args:
        kind: as for ``load``.
        table: outlines of the classes by name (``outpace.catalogue``).
        foreign: finds the outline of another package's class; None if it cannot.

    Returns:
        What the spec describes, of outlines; None if a class has none: nothing is then checked.

    Raises:
        OutpaceError: as ``load``, for a mistake that the outlines show.
    """
    spec = plain(spec)
    if not balanced(spec):
        raise OutpaceError(f"the parentheses do not match in {spec.strip()!r}")
    with suppress(_Foreign):
        return _Checker(kind, table, None, foreign).load(spec)
    return None


class _Foreign(Exception):
    """A spec names a class of another package that has no outline."""


def named(kind: str, table: Mapping[str, type[T]], name: str, base: type[T] | None = None) -> type[T]:
    """The class that a name selects, as ``load`` does.

    Raises:
        OutpaceError: there is none; or options follow the name.
    """
    _, cls, options = _Loader(kind, table, base).named(name)
    if options:
        raise OutpaceError(f"give a name without options, not {name!r}")
    return cls


@dataclass(frozen=True)
class _Loader(Generic[T]):
    """Parser of specs with balanced parentheses."""

    kind: str
    table: Mapping[str, type[T]]
    base: type[T] | None

    def load(self, spec: str) -> T:
        name, cls, options = self.named(spec)
        try:
            values = self._values(name, cls, options)
            missing = [option for option in _needed(cls) if option not in values]
            if missing:
                example = self._example(hints_of(cls)[missing[0]])
                raise OutpaceError(f"{name} needs {', '.join(missing)}, as in {name}:{missing[0]}={example}")
            return cls(**values)
        except (NameError, TypeError, ValueError) as error:
            if isinstance(error, OutpaceError) or cls in self.table.values():
                raise
            raise OutpaceError(f"{name}: {error}") from error  # a class of another package

    def named(self, spec: str) -> tuple[str, type[T], str]:
        """The name in a spec, its class, and the text of its options."""
        name, _, options = (part.strip() for part in spec.partition(":"))
        if name in self.table:
            return name, self.table[name], options
        others = self._others()
        if name in others or (others is not _NONE and _is_module(name, options)):
            return self._foreign(name, options, others)
        if advice := why_absent(self.kind, name):
            raise OutpaceError(advice)
        names = [*self.table, *others]
        known = ", ".join(names) or "none"
        raise OutpaceError(f"there is no {self.kind} {name!r}.{near(name, names)} There are: {known}")

    def _others(self) -> Mapping[str, EntryPoint]:
        """The entry points of other packages."""
        return _NONE if self.base is None else installed(f"{self.kind}s")

    def _foreign(self, name: str, options: str, others: Mapping[str, EntryPoint]) -> tuple[str, type[T], str]:
        """The name, the class and the options of a class of another package."""
        assert self.base is not None
        if name in others:
            return name, load_class(self.kind, others[name], self.base), options
        attribute, _, options = (part.strip() for part in options.partition(":"))
        return f"{name}:{attribute}", self._of_path(name, attribute, self.base), options

    def _of_path(self, module: str, attribute: str, base: type[T]) -> type[T]:
        if not attribute.isidentifier():
            raise OutpaceError(f"{module!r} is a module; name a {self.kind} in it, as in {module}:ClassName")
        path = f"{module}:{attribute}"
        try:
            return checked_class(self.kind, path, lambda: getattr(import_module(module), attribute), base)
        except OutpaceError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
                raise OutpaceError(
                    f"there is no module {cause.name!r} for the {self.kind} {path}; install its package, or "
                    "add its folder to PYTHONPATH"
                ) from None
            raise

    def _values(self, name: str, cls: type[T], options: str) -> dict[str, Any]:
        """The values in ``option=value,option=value``, each parsed by the type of its field."""
        hints = hints_of(cls)
        values: dict[str, Any] = {}
        for item in filter(None, split(options, ",")):
            option, text = self._item(name, item, hints)
            if option not in hints:
                raise OutpaceError(
                    f"{name} has no option {option!r}; it has: {', '.join(hints) or 'none'}."
                    f"{near(option, hints)}".rstrip(".")
                )
            if option in values:
                raise OutpaceError(f"{name}: option {option!r} is given twice")
            if not text:
                default = cls.__dataclass_fields__[option].default  # type: ignore[attr-defined]
                example = self._example(hints[option]) if default is dataclasses.MISSING else default
                raise OutpaceError(f"{name}: option {option!r} needs a value, as in {option}={example}")
            if self._holds(hints[option]) is None:
                values[option] = _value(name, option, text, hints[option])
            else:
                values[option] = self._nested(name, option, text, hints[option])
        return values

    def _item(self, name: str, item: str, hints: Mapping[str, Any]) -> tuple[str, str]:
        """An item's option and value. Groups without a name are the first option's."""
        first = next(iter(hints), None)
        if first is None or self._holds(hints[first]) is None or ("=" in item and not item.startswith("(")):
            option, _, text = (part.strip() for part in item.partition("="))
            return option, text
        if item.startswith("("):
            return first, item
        if item in hints:
            return item, ""
        groups = "+".join(f"({part})" for part in split(item, "+"))
        raise OutpaceError(f"{name}: a {self.kind} goes in parentheses, as in {name}:{groups}, not {item!r}")

    def _nested(self, name: str, option: str, text: str, hint: Any) -> Any:
        """Drafters of the groups in ``(spec)+(spec)``: one, or a tuple where the field holds several."""
        if text.lower() == "none" and type(None) in typing.get_args(hint):
            return None
        groups = split(text, "+")
        for group in groups:
            if not (group.startswith("(") and group.endswith(")") and balanced(group[1:-1])):
                raise OutpaceError(
                    f"{name}: {option} takes each {self.kind} in parentheses, as in "
                    f"{option}={self._example(hint)}, not {text!r}"
                )
            if not group[1:-1].strip():
                raise OutpaceError(
                    f"{name}: a pair of parentheses of {option} is empty; name a {self.kind} in it"
                )
        found = [self.load(group[1:-1]) for group in groups]
        wanted = self._holds(hint)
        assert wanted is not None
        for group, part in zip(groups, found, strict=True):
            if not isinstance(part, wanted):
                raise OutpaceError(f"{name}: {option} takes a {wanted.__name__}, and {group} is not one")
        if _several(hint):
            return tuple(found)
        if len(found) > 1:
            raise OutpaceError(f"{name}: {option} takes one {self.kind}, not {len(found)}")
        return found[0]

    def _holds(self, hint: Any) -> type[Any] | None:
        """The class of the objects that a field's specs describe; None for a field of plain values."""
        for kind in (hint, *typing.get_args(hint)):
            cls = typing.get_origin(kind) or kind
            if (
                isinstance(cls, type)
                and cls is not object
                and (
                    any(issubclass(c, cls) for c in self.table.values())
                    or (self.base is not None and issubclass(cls, self.base))
                )
            ):
                return cls
        return None

    def _example(self, hint: Any) -> str:
        if self._holds(hint) is None:
            return "VALUE"
        group = f"({self.kind.upper()})"
        return f"{group}+{group}" if _several(hint) else group


@dataclass(frozen=True)
class _Checker(_Loader[T]):
    """Parser that imports no class of another package."""

    foreign: Foreign[T]

    def _others(self) -> Mapping[str, EntryPoint]:
        return installed(f"{self.kind}s")

    def _foreign(self, name: str, options: str, others: Mapping[str, EntryPoint]) -> tuple[str, type[T], str]:
        cls = self.foreign(others[name]) if name in others else None
        if cls is None:
            raise _Foreign
        return name, cls, options


def _is_module(name: str, options: str) -> bool:
    """True if a name that is not in a table is the module of a path, ``name:ClassName``.

    Without a dot, the module must exist and a class must be named, so that misspelt names get a hint.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    attribute = options.partition(":")[0].strip()
    there = name in sys.modules or "." in name or find_spec(name) is not None
    return there and ("." in name or attribute.isidentifier())


def _several(hint: Any) -> bool:
    """True if a field holds a tuple."""
    return typing.get_origin(hint) is tuple


def hints_of(cls: type[Any]) -> dict[str, Any]:
    """The options of a class, with their types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _needed(cls: type[Any]) -> list[str]:
    """Options without a default."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]


def _value(name: str, option: str, text: str, hint: Any) -> Any:
    """An option's value parsed from text by the field's type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if text.lower() == "none" and (type(None) in kinds or Any in kinds):
        return None
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind == _NUMBERS and str not in kinds:
            try:
                return tuple(int(part) for part in text.split("+"))
            except ValueError:
                continue
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
    ]
    if text in choices or str in kinds or Any in kinds:
        return text
    names = [repr(choice) for choice in choices]
    names += [_KINDS.get(kind, str(kind)) for kind in kinds if typing.get_origin(kind) is not Literal]
    raise OutpaceError(f"{name}: {option} must be {' or '.join(names)}, not {text!r}")
