"""The drafter where none is named, and why it is this one.

What a target's own folder brings to draft with was trained for it, so it comes first, beside copying.
Otherwise ``suffix``, which fits every target. On a CPU the target's rounded self joins it where a trial says
that it pays: the trial needs a few forwards, and rounds one layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outpace.core import DEFAULT_DRAFTER, UnsupportedModel
from outpace.drafters import Drafter, load_drafter
from outpace.drafters.combined.combined import Combined
from outpace.engine.brought import Brought, brought
from outpace.engine.slow import tell
from outpace.targets.base import TargetModel
from outpace.verify import Verifier, load_verifier

_TOKENS, _RATE = 4, 0.9  # tokens of the chain that a trial counts on, and the rate at which each is right
_PAYS = 1.2  # times plain decoding's speed from which rounded weights are made


class Chosen(NamedTuple):
    """A drafter.

    Attributes:
        spec: its spec string.
        because: the reason for it.
        drafter: itself; what it has loaded, engines share.
    """

    spec: str
    because: str
    drafter: Drafter[Any]

    @classmethod
    def of(cls, spec: str, because: str) -> Chosen:
        return cls(spec, because, load_drafter(spec))


def usual(target: TargetModel, verifier: Verifier | str = "match", changes: bool = False) -> Chosen:
    """The drafter where none is named; one of chains if the target or the verifier takes only those.

    What a folder brings and cannot be used is told, once in a process.

    Args:
        changes: the target's weights change between texts, or it has one text only.

    Raises:
        OutpaceError: an unknown verifier.
    """
    verifier = load_verifier(verifier)
    chains = bool(target.why_chains_only or verifier.chains)
    copying = f"{DEFAULT_DRAFTER},branches=1" if chains else DEFAULT_DRAFTER
    alone = ""
    if chains or not verifier.coupled:
        who = "the target" if target.why_chains_only else f"verifier={verifier.name!r}"
        alone = f"{who} takes no draft of several drafters"
    found, refused = (None, "") if changes else brought(target, verifier)
    if found is not None:
        return _beside(found, copying, alone)
    if refused:
        tell(f"the model's folder brings a drafter that is not used: {refused}")
    chosen = _copying(target, copying, alone, changes)
    return chosen._replace(because=f"{chosen.because}; {refused}") if refused else chosen


def _beside(found: Brought, copying: str, alone: str) -> Chosen:
    """What a folder brings, beside copying, or alone for the reason that is given."""
    if alone:
        return Chosen(found.spec, f"{found.what}; alone, since {alone}", found.drafter)
    both = Combined((load_drafter(copying), found.drafter))
    return Chosen(f"combined:({copying})+({found.spec})", found.what, both)


def _copying(target: TargetModel, copying: str, alone: str, changes: bool) -> Chosen:
    """Copying, and the target's rounded self where that pays."""
    if alone:
        return Chosen.of(copying, alone)
    if changes:
        return Chosen.of(copying, "not self, since weights change, and would be rounded anew each time")
    if not target.plan.native:
        return Chosen.of(copying, "not self, which is for native steps on a CPU")
    try:
        verified, drafted = target.rounded_costs()
    except UnsupportedModel as error:
        return Chosen.of(copying, f"not self: {error}")
    tokens = sum(_RATE**place for place in range(_TOKENS + 1))
    speed = tokens / (verified + _TOKENS * drafted)
    told = f"a row with rounded weights takes {drafted:.2f} of a step"
    if speed < _PAYS:
        return Chosen.of(copying, f"not self: {told}, which gains too little")
    return Chosen.of(f"either:({copying})+(self)", told)


def usual_drafter(
    target: TargetModel, verifier: Verifier | str = "match", changes: bool = False
) -> Drafter[Any]:
    return usual(target, verifier, changes).drafter
