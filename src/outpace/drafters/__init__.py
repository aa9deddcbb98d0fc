"""The drafters by name, and their spec strings, as in ``lookahead:window=7,ngram=5,guesses=7``."""

from __future__ import annotations

from typing import Any

from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.plugins import defined
from outpace.spec import load, named

__all__ = ["DRAFTERS", "Drafter", "SequenceDrafter", "drafter_class", "load_drafter"]

# A drafter is a class with a paper in a module of this package.
_CLASSES: list[type[Drafter[Any]]] = defined(__name__, Drafter, "paper")
DRAFTERS = {cls.name: cls for cls in sorted(_CLASSES, key=lambda cls: cls.name)}


def load_drafter(spec: str) -> Drafter[Any]:
    """A drafter from its spec string: a name, then options, as in ``name:option=value,option=value``.

    An option whose value is a drafter takes a spec string in parentheses; for several, join them by plus
    signs: ``combined:parts=(lookahead:window=5,ngram=4)+(prompt_lookup),max_nodes=40``. The name of the first
    such option may be omitted: ``combined:(lookahead)+(prompt_lookup)``.

    The name is a key of ``DRAFTERS``, an entry point that an installed package registers in the group
    ``outpace.drafters``, or the path of a class: ``my_package.my_module:Mine:option=value``.

    The same as JSON: ``{"method": "lookahead", "window": 7}``; an option's value may be such an object, or
    a list of them.

    Raises:
        OutpaceError: unknown drafter or option, invalid value, unbalanced parentheses, or a class of another
            package that cannot be imported or is not a drafter.
    """
    return load("drafter", DRAFTERS, spec, Drafter)


def drafter_class(name: str) -> type[Drafter[Any]]:
    """The class of a drafter, by what a spec string begins with.

    Raises:
        OutpaceError: there is no such drafter.
    """
    return named("drafter", DRAFTERS, name, Drafter)
