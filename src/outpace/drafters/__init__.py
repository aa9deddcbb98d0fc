"""The drafters, by name, and their spec strings: ``lookahead:window=7,ngram=5,guesses=7``."""

from __future__ import annotations

from typing import Any

from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.jacobi import Jacobi
from outpace.drafters.lookahead import Lookahead
from outpace.drafters.none import NoDraft
from outpace.drafters.prompt_lookup import PromptLookup
from outpace.spec import load

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
    return load("drafter", DRAFTERS, spec)
