"""The engine of a server, and the drafter that a request gets, also for its prediction or grammar."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS
from outpace.drafters.base import Drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.reference import Reference
from outpace.drafters.none import NoDraft
from outpace.engine.engine import Engine
from outpace.engine.observer import Observer
from outpace.engine.parts import drafter_of
from outpace.loading import Loaded
from outpace.serve.admission import Limits
from outpace.serve.errors import Refused
from outpace.serve.grammar import Forced
from outpace.serve.request import ParsedRequest
from outpace.serve.trace import Tracer
from outpace.targets.base import TargetModel

_PREFIXES = 0.1  # of free memory, for the prefix cache; --memory leaves it by default
_FORGETFUL = {"memory": 0, "share": False}
_CHAINS = {"branches": 1, "window": 0, "top_k": 1}  # with these, drafters draft no tree
BROUGHT = "request"  # the drafter for a request's prediction or grammar


def with_brought(drafter: Drafter[Any]) -> Drafter[Any]:
    """A server's drafter, combined with those for a request's prediction or grammar."""
    parts: list[Drafter[Any]] = [] if drafter.reads_references else [Reference(prompt=False)]
    parts.append(Forced())
    if not isinstance(drafter, NoDraft):
        parts += drafter.parts if isinstance(drafter, Combined) else [drafter]
    return Combined(tuple(parts))


def ready_drafters(default: Drafter[Any], target: TargetModel) -> dict[str, Drafter[Any]]:
    """The drafters that need nothing, by name, beside the default one; they remember no outputs.

    For a target that takes no trees, those that can draft chains. What it refuses is left out, and all
    if the default one replaces the target.
    """
    if type(default).attach is not Drafter.attach:
        return {}
    found: dict[str, Drafter[Any]] = {}
    for name, cls in DRAFTERS.items():
        if cls.needs or cls is NoDraft or name == default.name:
            continue
        known = {own.name for own in fields(cls)}
        options = {**_FORGETFUL, **(_CHAINS if target.why_chains_only else {})}
        if "window" in options and "window" in known:
            options["guesses"] = 1  # of lookahead, whose guesses are chains
        one = cls(**{option: value for option, value in options.items() if option in known})
        if not (one.trees and target.why_chains_only):
            with suppress(OutpaceError):
                one.prepare(target)
                found[name] = one
    return found


def make_engine(
    model: Loaded,
    drafter: Drafter[Any] | str | None,
    limits: Limits,
    others: Mapping[str, str] | None = None,
    learner: Observer | None = None,
    ready: bool = False,
    **more: Any,
) -> Engine:
    """Make an engine for a service.

    Args:
        others: spec strings of further drafters, by the names that requests use.
        learner: an observer that changes the drafter while it is used.
        ready: let requests also select ``ready_drafters`` by their names.
        more: further arguments of ``Engine``.

    Raises:
        OutpaceError: the parts do not fit together.
    """
    default = drafter_of(drafter)
    drafters: dict[str, Drafter[Any] | str] = {
        **(ready_drafters(default, model.target) if ready else {}),
        **(others or {}),
    }
    if BROUGHT in drafters:
        raise OutpaceError(f"{BROUGHT!r} names the drafter of predictions; choose another name")
    if type(default).attach is Drafter.attach:  # a drafter that replaces the target cannot be combined
        drafters[BROUGHT] = with_brought(default)
    observer = Tracer(learner)
    return model.engine(default, max_running=limits.running, drafters=drafters, observer=observer, **more)


def rooms(memory: float, prefixes: int | None) -> dict[str, Any]:
    """A server's limits of memory as arguments of ``Engine``.

    Args:
        memory: GiB for keys and values, or, below 1, a share of free memory.
        prefixes: MiB for the prefix cache; 0 for none, None for a share of free memory.
    """
    return {
        "memory": memory if memory < 1 else int(memory * 2**30),
        "prefix_cache": _PREFIXES if prefixes is None else prefixes * 2**20 or None,
    }


class Drafters:
    """The drafters of an engine by the names that requests use.

    Attributes:
        names: the names for requests; the first is the default.
    """

    def __init__(self, engine: Engine) -> None:
        default = "off" if isinstance(engine.drafter, NoDraft) else engine.drafter.name
        self._names: dict[str | None, str] = {None: default, "off": "off"}  # by the engine's names
        self._names |= {name: name for name in engine.drafter_names}
        self._predicting = {name for name in self._names if name != "off" and engine.reads_references(name)}
        self.names = [name for name in dict.fromkeys(self._names.values()) if name != BROUGHT]

    def shown(self, name: str | None) -> str:
        """The name in responses of the drafter with this name in the engine."""
        return self._names[name]

    def chosen(self, request: ParsedRequest) -> str | None:
        """The engine's name of the drafter for a request.

        Raises:
            Refused: there is no drafter of this name, or it cannot draft from the request's prediction.
        """
        name = request.params.drafts.drafter
        if name == self._names[None] and name != "off":
            name = None
        if name not in self._names or name == BROUGHT:
            known = ", ".join(map(repr, self.names))
            raise Refused(400, f"this server has no drafter {name!r}; it has {known}", "speculation")
        brings = bool(request.prediction) or request.schema is not None
        name = BROUGHT if name is None and brings and BROUGHT in self._names else name
        if request.prediction and name not in ("off", *self._predicting):
            raise Refused(400, f"{self._unread(name)}; or leave prediction out", "prediction")
        return name

    def _unread(self, name: str | None) -> str:
        """The reason for which a drafter drafts nothing from a prediction, and the remedy."""
        default = self._names[None]
        if BROUGHT not in self._names:
            return (
                f"this server's drafter {default!r} cannot draft from a prediction; give speculation: 'off'"
            )
        return (
            f"the drafter {name!r} cannot draft from a prediction; leave speculation out, for drafts of "
            f"{default!r} and of the prediction"
        )
