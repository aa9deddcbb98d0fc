"""Spec strings, of drafters and verifiers: a name, then options, as in ``lookahead:window=7,ngram=5``.

They nest, for a drafter that is made of others::

    spec    = name [":" item {"," item}]
    item    = option "=" value | group {"+" group}      without a name, groups are the first option's
    value   = text | group {"+" group}                  groups, where the option takes drafters
    group   = "(" spec ")"

as in ``combined:(lookahead:window=5,ngram=4)+(prompt_lookup),max_nodes=40``. A text may hold commas within
parentheses; parentheses must be balanced in it.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from outpace.core import OutpaceError

T = TypeVar("T")

_NUMBERS = tuple[int, ...]
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "none",
    _NUMBERS: "whole numbers, as in 2+4+5",
}


def load(kind: str, table: Mapping[str, type[T]], spec: str) -> T:
    """What a spec string ``name:option=value,option=value`` describes.

    Args:
        kind: what the table holds, for messages: "drafter".
        table: dataclasses by name; their fields are their options. A field whose type is one of these, or a
            base of theirs, takes a spec in parentheses; a ``tuple`` of them several.

    Raises:
        OutpaceError: unknown name or option, a value that does not fit, or parentheses that do not match; the
            message says what there is.
    """
    if not _balanced(spec):
        raise OutpaceError(f"the parentheses do not match in {spec.strip()!r}")
    return _Loader(kind, table).load(spec)


@dataclass(frozen=True)
class _Loader(Generic[T]):
    """Reads specs whose parentheses match."""

    kind: str
    table: Mapping[str, type[T]]

    def load(self, spec: str) -> T:
        name, _, options = (part.strip() for part in spec.partition(":"))
        cls = self.table.get(name)
        if cls is None:
            near = difflib.get_close_matches(name, self.table, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OutpaceError(f"there is no {self.kind} {name!r}.{hint} There are: {', '.join(self.table)}")
        values = self._values(name, cls, options)
        missing = [option for option in _needed(cls) if option not in values]
        if missing:
            example = self._example(_hints(cls)[missing[0]])
            raise OutpaceError(f"{name} needs {', '.join(missing)}, as in {name}:{missing[0]}={example}")
        return cls(**values)

    def _values(self, name: str, cls: type[T], options: str) -> dict[str, Any]:
        """The values in ``option=value,option=value``, each by the type of its field."""
        hints = _hints(cls)
        values: dict[str, Any] = {}
        for item in filter(None, _split(options, ",")):
            option, text = self._item(name, item, hints)
            if option not in hints:
                raise OutpaceError(f"{name} has no option {option!r}; it has: {', '.join(hints) or 'none'}")
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
        groups = "+".join(f"({part})" for part in _split(item, "+"))
        raise OutpaceError(f"{name}: a {self.kind} goes in parentheses, as in {name}:{groups}, not {item!r}")

    def _nested(self, name: str, option: str, text: str, hint: Any) -> Any:
        """What the groups in ``(spec)+(spec)`` describe: one, or a tuple where the field holds several."""
        if text.lower() == "none" and type(None) in typing.get_args(hint):
            return None
        groups = _split(text, "+")
        for group in groups:
            if not (group.startswith("(") and group.endswith(")") and _balanced(group[1:-1])):
                raise OutpaceError(
                    f"{name}: {option} takes each {self.kind} in parentheses, as in "
                    f"{option}={self._example(hint)}, not {text!r}"
                )
            if not group[1:-1].strip():
                raise OutpaceError(
                    f"{name}: there is nothing in a pair of parentheses of {option}; name a {self.kind}"
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
        """The class that a field's specs describe; None for a field of plain values."""
        for kind in (hint, *typing.get_args(hint)):
            cls = typing.get_origin(kind) or kind
            if (
                isinstance(cls, type)
                and cls is not object
                and any(issubclass(c, cls) for c in self.table.values())
            ):
                return cls
        return None

    def _example(self, hint: Any) -> str:
        if self._holds(hint) is None:
            return "VALUE"
        group = f"({self.kind.upper()})"
        return f"{group}+{group}" if _several(hint) else group


def _several(hint: Any) -> bool:
    """Whether a field holds a tuple."""
    return typing.get_origin(hint) is tuple


def _split(text: str, separator: str) -> list[str]:
    """The parts of a text, stripped, between the separators that are in no parentheses."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def _balanced(text: str) -> bool:
    """Whether each parenthesis that opens is closed, and none closes that was not opened."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0


def _hints(cls: type[Any]) -> dict[str, Any]:
    """The options of a class, with their types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _needed(cls: type[Any]) -> list[str]:
    """Options without a default."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _value(name: str, option: str, text: str, hint: Any) -> Any:
    """An option's value from text, by the field's type."""
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
