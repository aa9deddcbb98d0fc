"""Construction of an engine's parts from its arguments, and checks that they fit each other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDraft
from outpace.draws.logits import tokens_only
from outpace.engine.profile import load_costs
from outpace.policy.governor import FullOrNarrow, Governor
from outpace.policy.plan import Policy
from outpace.targets.base import TargetModel
from outpace.verify import Verifier

_log = logging.getLogger(__name__)

Adaptive = Literal["auto"] | bool | Policy


def drafter_of(given: Drafter[Any] | str | None) -> Drafter[Any]:
    """The given drafter, the drafter of a spec string, or for None the one that proposes nothing.

    Raises:
        OutpaceError: the argument is neither, or the string does not describe a drafter.
    """
    drafter = load_drafter(given) if isinstance(given, str) else given or NoDraft()
    if not isinstance(drafter, Drafter):
        raise OutpaceError(f"drafter must be an instance or a spec string, as in 'lookahead'; not {given!r}")
    return drafter


def check_company(
    drafter: Drafter[Any], others: Mapping[str, Drafter[Any]], verifier: Verifier, target: TargetModel
) -> None:
    """Refuse drafters that cannot share an engine with others, and reserved names."""
    for name, other in others.items():
        if not isinstance(name, str) or not name or name == "off":
            raise OutpaceError(f"a drafter's name must be a string other than 'off', not {name!r}")
        check_shape(other, verifier, target)
    for one in (drafter, *others.values()) if others else ():
        if type(one).attach is not Drafter.attach:
            raise OutpaceError(
                f"{type(one).__name__} replaces the target by its own, which other drafters cannot use; "
                "make a separate engine for it"
            )


def check_shape(drafter: Drafter[Any], verifier: Verifier, target: TargetModel) -> None:
    """Refuse a drafter of trees under a verifier of chains, or samples that the verifier cannot weigh.

    For a target that takes chains only, trees are cut to chains.
    """
    trees = drafter.trees and not target.why_chains_only
    if drafter.trees and not trees:
        _log.warning(
            "%s takes chains only, since %s: of each tree of %s its likeliest path is verified",
            target.name,
            target.why_chains_only,
            drafter.name,
        )
    if drafter.drops_distributions and not verifier.coupled:
        raise OutpaceError(
            f"{type(drafter).__name__} merges sampled drafts of its parts and drops their "
            f"distributions, which verifier={verifier.name!r} needs; use verifier='match', or let the parts "
            "draft greedily (draft_model:draws=greedy)"
        )
    if verifier.chains and trees:
        raise OutpaceError(
            f"verifier={verifier.name!r} verifies chains, but {type(drafter).__name__} drafts "
            "trees; use verifier='match', 'rejection', or a drafter of chains (draft_model, "
            "jacobi, prompt_lookup:branches=1)"
        )
    if verifier.independent and trees and drafter.samples and not getattr(drafter, "replacement", False):
        raise OutpaceError(
            f"verifier={verifier.name!r} takes siblings drawn with replacement, and {type(drafter).__name__} "
            "draws them without; use verifier='rejection', or such draws "
            "(draft_model:branching=4x2,draws=independent,replacement=true)"
        )


def need_logits(target: TargetModel, reader: str) -> None:
    """Refuse what needs logits if the target returns its tokens alone."""
    if target.tells:
        raise tokens_only(reader)


def check_told(target: TargetModel, verifier: Verifier, layers: Seq[int]) -> None:
    """Refuse a verifier or readers of hidden states that need more than the target's own tokens."""
    if not verifier.by_tokens:
        need_logits(target, f"verifier={verifier.name!r}")
    if target.tells and layers:
        raise OutpaceError(
            "ranks that share drafts have no hidden states of each other's rows; use a drafter without "
            "trained parts and no observer that learns, or one rank"
        )


def policy_of(
    adaptive: Adaptive,
    drafter: Drafter[Any],
    verifier: Verifier,
    target: TargetModel,
    costs: str | Path | None = None,
) -> Policy | None:
    """The policy that decides how much is drafted: the given one, a governor, or None for full drafts.

    Args:
        adaptive: ``"auto"`` uses a governor under verifiers whose tokens do not depend on the drafts, True
            always, False never. A drafter that proposes nothing has no governor.
        costs: a profile written by ``Engine.save_costs`` or ``outpace tune``, with the governor's initial
            costs.

    Raises:
        OutpaceError: ``adaptive`` is invalid, there are costs but no governor, or the file contains no costs.
    """
    policy: Policy | None = None
    if adaptive == "auto" or isinstance(adaptive, bool):
        wanted = verifier.invariant if adaptive == "auto" else adaptive
        if wanted and not isinstance(drafter, NoDraft):
            options = drafter.widths, drafter.ramp, repr(drafter)
            narrow = drafter.narrow_widths
            policy = FullOrNarrow(narrow, *options) if narrow else Governor(*options)
            if target.seconds:
                policy.begin_with({"verify": {"1": target.seconds.items()}})
    elif callable(getattr(adaptive, "plan", None)) and not isinstance(adaptive, type):
        policy = adaptive
    else:
        raise OutpaceError(f"adaptive must be 'auto', True, False or a policy, not {adaptive!r}")
    if costs is not None:
        if not isinstance(policy, Governor):
            raise OutpaceError("costs are for a governor; add adaptive=True, or leave them out")
        policy.begin_with(load_costs(costs, target))
    return policy
