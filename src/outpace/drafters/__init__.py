"""The drafters, by name, and their spec strings: ``lookahead:window=7,ngram=5,guesses=7``."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal

from outpace.core import OutpaceError
from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.jacobi import Jacobi
from outpace.drafters.lookahead import Lookahead
from outpace.drafters.none import NoDraft
from outpace.drafters.prompt_lookup import PromptLookup

__all__ = [
    "DRAFTERS",
    "DraftModel",
    "Drafter",
    "Jacobi",
    "Lookahead",
    "NoDraft",
    "PromptLookup",
    "SequenceDrafter",
    "load_drafter",
]

DRAFTERS: dict[str, type[Drafter[Any]]] = {
    "none": NoDraft,
    "draft_model": DraftModel,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "prompt_lookup": PromptLookup,
}


def load_drafter(spec: str) -> Drafter[Any]:
    """A drafter from its spec string: a name, then options as ``name:option=value,option=value``.

    Raises:
        OutpaceError: unknown drafter or option, or a value that does not fit; the message says what there is.
    """
    name, _, options = spec.strip().partition(":")
    cls = DRAFTERS.get(name)
    if cls is None:
        near = difflib.get_close_matches(name, DRAFTERS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OutpaceError(f"there is no drafter {name!r}.{hint} There are: {', '.join(DRAFTERS)}")
    values: dict[str, Any] = {}
    known = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for item in filter(None, options.split(",")):
        option, equals, text = (part.strip() for part in item.partition("="))
        if option not in known:
            raise OutpaceError(f"{name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        if not equals or not text:
            raise OutpaceError(
                f"{name}: option {option!r} needs a value, as in {option}={known[option].default}"
            )
        values[option] = _parse(name, option, text, hints[option])
    needed = [
        field.name
        for field in known.values()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [option for option in needed if option not in values]
    if missing:
        raise OutpaceError(f"{name} needs {', '.join(missing)}, as in {name}:{missing[0]}=VALUE")
    return cls(**values)


def _parse(name: str, option: str, text: str, hint: Any) -> Any:
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


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
