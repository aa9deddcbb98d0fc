"""The parts of an engine, made of what was given, and whether they fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDraft
from outpace.policy.costs import load_costs
from outpace.policy.governor import Governor, Policy
from outpace.targets.base import TargetModel
from outpace.verify import Verifier


def drafter_of(given: Drafter[Any] | str | None) -> Drafter[Any]:
    """A drafter itself, the one of a spec string, or the one that proposes nothing.

    Raises:
        OutpaceError: it is something else, or the string names no drafter.
    """
    drafter = load_drafter(given) if isinstance(given, str) else given or NoDraft()
    if not isinstance(drafter, Drafter):
        raise OutpaceError(f"a drafter is an instance or a spec string, as in 'lookahead'; not {given!r}")
    return drafter


def check_shape(drafter: Drafter[Any], verifier: Verifier) -> None:
    """Refuse a drafter of trees under a verifier of chains."""
    if verifier.chains and drafter.trees:
        raise OutpaceError(
            f"verifier={verifier.name!r} takes chains, and {type(drafter).__name__} drafts "
            "trees; use verifier='match' or 'rejection', or a drafter of chains (draft_model, jacobi, "
            "prompt_lookup:branches=1)"
        )


def adapts(drafter: Any, verifier: Verifier) -> bool:
    """Whether a governor decides how much is drafted where nobody said so.

    It does for a drafter that is given by its name alone: whoever gives options or an instance means them.
    And only under a verifier that it cannot change the tokens of.
    """
    return (
        isinstance(drafter, str) and ":" not in drafter and drafter.strip() != "none" and verifier.invariant
    )


def policy_of(
    adaptive: bool | Policy, costs: str | Path | None, drafter: Drafter[Any], target: TargetModel
) -> Policy | None:
    """What decides how much is drafted: a policy that was given, a governor, or nothing.

    Args:
        costs: a file that ``Engine.save_costs`` wrote, for the governor to begin with.

    Raises:
        OutpaceError: there are costs and no governor, or the file is not one of costs.
    """
    if not isinstance(adaptive, bool):
        policy: Policy | None = adaptive
    elif adaptive:
        policy = Governor(drafter.widths, drafter.ramp, repr(drafter))
    else:
        policy = None
    if costs is not None:
        if not isinstance(policy, Governor):
            raise OutpaceError("costs are for a governor; add adaptive=True, or leave them out")
        policy.begin_with(load_costs(costs, target.identity))
    return policy
