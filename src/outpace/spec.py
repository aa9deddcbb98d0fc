"""Spec strings, of drafters and verifiers: a name, then options, as in ``lookahead:window=7,ngram=5``."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from outpace.core import OutpaceError

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}


def load(kind: str, table: Mapping[str, type[T]], spec: str) -> T:
    """What a spec string ``name:option=value,option=value`` describes.

    Args:
        kind: what the table holds, for messages: "drafter".
        table: dataclasses by name; their fields are their options.

    Raises:
        OutpaceError: unknown name or option, or a value that does not fit; the message says what there is.
    """
    name, _, options = spec.strip().partition(":")
    cls = table.get(name)
    if cls is None:
        near = difflib.get_close_matches(name, table, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OutpaceError(f"there is no {kind} {name!r}.{hint} There are: {', '.join(table)}")
    values = parse(name, cls, options)
    missing = [option for option in _needed(cls) if option not in values]
    if missing:
        raise OutpaceError(f"{name} needs {', '.join(missing)}, as in {name}:{missing[0]}=VALUE")
    return cls(**values)


def parse(name: str, cls: type[Any], options: str) -> dict[str, Any]:
    """The values in ``option=value,option=value``, each by the type of its field.

    Raises:
        OutpaceError: unknown option, or a value that does not fit.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        option, equals, text = (part.strip() for part in item.partition("="))
        if option not in known:
            raise OutpaceError(f"{name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        if not equals or not text:
            raise OutpaceError(
                f"{name}: option {option!r} needs a value, as in {option}={known[option].default}"
            )
        values[option] = _value(name, option, text, hints[option])
    return values


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
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
    ]
    if text in choices or str in kinds or Any in kinds:
        return text
    names = [repr(choice) for choice in choices]
    names += [_KINDS.get(kind, str(kind)) for kind in kinds if typing.get_origin(kind) is not Literal]
    raise OutpaceError(f"{name}: {option} must be {' or '.join(names)}, not {text!r}")
