"""The engine of a server: its drafters, and those for a request's prediction or grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core import OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.reference import Reference
from outpace.drafters.none import NoDraft
from outpace.engine.engine import Engine
from outpace.engine.observer import Observer
from outpace.engine.parts import drafter_of
from outpace.loading import Loaded
from outpace.serve.admission import Limits
from outpace.serve.grammar import Forced
from outpace.serve.trace import Tracer

BROUGHT = "request"  # the drafter for a request's prediction or grammar


def with_brought(drafter: Drafter[Any]) -> Drafter[Any]:
    """A server's drafter, combined with those for a request's prediction or grammar."""
    parts: list[Drafter[Any]] = [] if drafter.reads_references else [Reference(prompt=False)]
    parts.append(Forced())
    if not isinstance(drafter, NoDraft):
        parts += drafter.parts if isinstance(drafter, Combined) else [drafter]
    return Combined(tuple(parts))


def make_engine(
    model: Loaded,
    drafter: Drafter[Any] | str | None,
    limits: Limits,
    others: Mapping[str, str] | None = None,
    learner: Observer | None = None,
    **more: Any,
) -> Engine:
    """Make an engine for a service.

    Args:
        others: spec strings of further drafters, by the names that requests use.
        learner: an observer that changes the drafter while it is used.
        more: further arguments of ``Engine``.

    Raises:
        OutpaceError: the parts do not fit together.
    """
    own = drafter_of(drafter)
    drafters: dict[str, Drafter[Any] | str] = dict(others or {})
    if BROUGHT in drafters:
        raise OutpaceError(f"{BROUGHT!r} names the drafter of predictions; choose another name")
    if type(own).attach is Drafter.attach:  # a drafter that replaces the target cannot be combined
        drafters[BROUGHT] = with_brought(own)
    observer = Tracer(learner)
    return model.engine(own, max_running=limits.running, drafters=drafters, observer=observer, **more)
