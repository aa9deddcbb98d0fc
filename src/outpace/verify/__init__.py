"""Verifiers by name: they decide which drafted tokens are accepted, and which tokens a step emits.

``match`` preserves the tokens of plain decoding, ``rejection`` their distribution.
"""

from __future__ import annotations

from outpace.plugins import defined
from outpace.spec import load
from outpace.verify.base import Draw, Verifier

__all__ = ["VERIFIERS", "Draw", "Verifier", "load_verifier"]

# A verifier is a class with a name in a module of this package.
VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls in defined(__name__, Verifier, "name")}


def load_verifier(verifier: str | Verifier) -> Verifier:
    """Make a verifier from its spec string, as in ``name:option=value``; an instance is returned unchanged.

    The name is one of ``VERIFIERS``, one that an installed package registers as an entry point in the group
    ``outpace.verifiers``, or the path of a class: ``my_package.my_module:Mine:option=value``.

    Raises:
        OutpaceError: unknown verifier or option, a value that does not fit, or a class of another package
            that cannot be imported or is not a verifier.
    """
    return verifier if isinstance(verifier, Verifier) else load("verifier", VERIFIERS, verifier, Verifier)
