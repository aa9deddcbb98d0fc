"""The drafters by name, and their spec strings, as in ``lookahead:window=7,ngram=5,guesses=7``."""

from __future__ import annotations

from typing import Any

from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.drafters.blocks.dflash import DFlash, DFlashModule
from outpace.drafters.blocks.parallel_tokens import LookAhead, ParallelTokens
from outpace.drafters.blocks.spec_drafter import SpecDrafter, SpecDrafterModule
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.copying.reference import Reference
from outpace.drafters.copying.suffix import Suffix
from outpace.drafters.copying.token_recycling import TokenRecycling
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleModule
from outpace.drafters.heads.hydra import Hydra, HydraHeads
from outpace.drafters.heads.medusa import Blockwise, BlockwiseHeads, Medusa, MedusaHeads
from outpace.drafters.layers.early_exit import EarlyExit
from outpace.drafters.layers.exit_adapter import Adapter
from outpace.drafters.layers.self_speculative import SelfSpeculative
from outpace.drafters.layers.windowed import Windowed
from outpace.drafters.models.cascade import Cascade
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.models.draft_module import DraftModule
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.jacobi import Jacobi
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.drafters.retrieval.retrieval import Retrieval
from outpace.learned.learned import Learned
from outpace.spec import load

__all__ = [
    "DRAFTERS",
    "LEARNED",
    "Blockwise",
    "Cascade",
    "Combined",
    "DFlash",
    "DraftModel",
    "Drafter",
    "Eagle",
    "EarlyExit",
    "Hydra",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "NoDraft",
    "ParallelTokens",
    "PromptLookup",
    "Reference",
    "Retrieval",
    "SelfSpeculative",
    "SequenceDrafter",
    "SpecDrafter",
    "Suffix",
    "TokenRecycling",
    "Windowed",
    "load_drafter",
]

DRAFTERS: dict[str, type[Drafter[Any]]] = {
    cls.name: cls
    for cls in (
        NoDraft,
        Blockwise,
        Cascade,
        Combined,
        DFlash,
        DraftModel,
        Eagle,
        EarlyExit,
        Hydra,
        Jacobi,
        Lookahead,
        Medusa,
        ParallelTokens,
        PromptLookup,
        Reference,
        Retrieval,
        SelfSpeculative,
        SpecDrafter,
        Suffix,
        TokenRecycling,
        Windowed,
    )
}

# Trained methods, with the modules that training saves and their drafters load.
LEARNED: dict[str, type[Learned]] = {
    cls.method: cls
    for cls in (
        BlockwiseHeads,
        DFlashModule,
        DraftModule,
        EagleModule,
        Adapter,
        HydraHeads,
        MedusaHeads,
        LookAhead,
        SpecDrafterModule,
    )
}


def load_drafter(spec: str) -> Drafter[Any]:
    """A drafter from its spec string: a name, then options, as in ``name:option=value,option=value``.

    An option whose value is a drafter takes a spec string in parentheses; for several, join them by plus
    signs: ``combined:parts=(lookahead:window=5,ngram=4)+(prompt_lookup),max_nodes=40``. The name of the first
    such option may be omitted: ``combined:(lookahead)+(prompt_lookup)``.

    The name is a key of ``DRAFTERS``, an entry point that an installed package registers in the group
    ``outpace.drafters``, or the path of a class: ``my_package.my_module:Mine:option=value``.

    Raises:
        OutpaceError: unknown drafter or option, invalid value, unbalanced parentheses, or a class of another
            package that cannot be imported or is not a drafter.
    """
    return load("drafter", DRAFTERS, spec, Drafter)
