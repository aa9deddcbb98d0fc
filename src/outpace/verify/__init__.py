"""Verifiers by name: they decide which drafted tokens are accepted, and which tokens a step emits.

``match`` preserves the tokens of plain decoding, ``rejection``, ``spectr``, ``block`` and ``traversal`` their
distribution. The others are lossy, and marked as such.
"""

from __future__ import annotations

from outpace.spec import load
from outpace.verify.base import Draw, Verifier
from outpace.verify.block import Block
from outpace.verify.lossy import BiLD, Lenient, TopBeta, Typical
from outpace.verify.match import Match
from outpace.verify.rejection import Rejection
from outpace.verify.spectr import SpecTr
from outpace.verify.traversal import Traversal

__all__ = [
    "VERIFIERS",
    "BiLD",
    "Block",
    "Draw",
    "Lenient",
    "Match",
    "Rejection",
    "SpecTr",
    "TopBeta",
    "Traversal",
    "Typical",
    "Verifier",
    "load_verifier",
]

_CLASSES: tuple[type[Verifier], ...] = (
    Match,
    Rejection,
    SpecTr,
    Block,
    Traversal,
    Typical,
    TopBeta,
    BiLD,
    Lenient,
)
VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls in _CLASSES}


def load_verifier(verifier: str | Verifier) -> Verifier:
    """Make a verifier from its spec string, as in ``name:option=value``; an instance is returned unchanged.

    The name is one of ``VERIFIERS``, one that an installed package registers as an entry point in the group
    ``outpace.verifiers``, or the path of a class: ``my_package.my_module:Mine:option=value``.

    Raises:
        OutpaceError: unknown verifier or option, a value that does not fit, or a class of another package
            that cannot be imported or is not a verifier.
    """
    return verifier if isinstance(verifier, Verifier) else load("verifier", VERIFIERS, verifier, Verifier)
