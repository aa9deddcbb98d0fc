"""The verifiers, by name: which drafted tokens stand, and which tokens a step emits.

``match`` keeps the tokens of plain decoding, ``rejection`` and ``block`` their distribution. The others are
lossy, and say so.
"""

from __future__ import annotations

from outpace.spec import load
from outpace.verify.base import Draw, Verifier
from outpace.verify.block import Block
from outpace.verify.lossy import BiLD, TopBeta, Typical
from outpace.verify.match import Match
from outpace.verify.rejection import Rejection

__all__ = [
    "VERIFIERS",
    "BiLD",
    "Block",
    "Draw",
    "Match",
    "Rejection",
    "TopBeta",
    "Typical",
    "Verifier",
    "load_verifier",
]

_CLASSES: tuple[type[Verifier], ...] = (Match, Rejection, Block, Typical, TopBeta, BiLD)
VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls in _CLASSES}


def load_verifier(verifier: str | Verifier) -> Verifier:
    """A verifier from its spec string, ``name:option=value,option=value``; one that is one already as it is.

    Raises:
        OutpaceError: unknown verifier or option, or a value that does not fit; the message says what there
            is.
    """
    return verifier if isinstance(verifier, Verifier) else load("verifier", VERIFIERS, verifier)
