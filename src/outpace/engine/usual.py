"""The drafter where none is named, and why it is this one.

``suffix`` fits every target. On a CPU the target's rounded self joins it where a trial says that it pays: the
trial needs a few forwards, and rounds one layer.
"""

from __future__ import annotations

from typing import NamedTuple

from outpace.core import DEFAULT_DRAFTER, UnsupportedModel
from outpace.targets.base import TargetModel
from outpace.verify import Verifier, load_verifier

_TOKENS, _RATE = 4, 0.9  # tokens of the chain that a trial counts on, and the rate at which each is right
_PAYS = 1.2  # times plain decoding's speed from which rounded weights are made


class Usual(NamedTuple):
    """A drafter's spec string, and the reason for it."""

    spec: str
    because: str


def usual(target: TargetModel, verifier: Verifier | str = "match", changes: bool = False) -> Usual:
    """The drafter where none is named; one of chains if the target or the verifier takes only those.

    Args:
        changes: the target's weights change between texts.

    Raises:
        OutpaceError: an unknown verifier.
    """
    verifier = load_verifier(verifier)
    chains = bool(target.why_chains_only or verifier.chains)
    copying = f"{DEFAULT_DRAFTER},branches=1" if chains else DEFAULT_DRAFTER
    if chains or not verifier.coupled:
        who = "the target" if target.why_chains_only else f"verifier={verifier.name!r}"
        return Usual(copying, f"{who} takes no draft of several drafters")
    if changes:
        return Usual(copying, "not self, since weights change, and would be rounded anew each time")
    if not target.plan.native:
        return Usual(copying, "not self, which is for native steps on a CPU")
    try:
        verified, drafted = target.rounded_costs()
    except UnsupportedModel as error:
        return Usual(copying, f"not self: {error}")
    tokens = sum(_RATE**place for place in range(_TOKENS + 1))
    speed = tokens / (verified + _TOKENS * drafted)
    told = f"a row with rounded weights takes {drafted:.2f} of a step"
    if speed < _PAYS:
        return Usual(copying, f"not self: {told}, which gains too little")
    return Usual(f"either:({copying})+(self)", told)


def usual_drafter(target: TargetModel, verifier: Verifier | str = "match", changes: bool = False) -> str:
    """The spec string of ``usual``."""
    return usual(target, verifier, changes).spec
