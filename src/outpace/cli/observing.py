"""``--observer``: what follows an engine's steps while it decodes, from an installed package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from outpace.cli import screen
from outpace.core import OutpaceError
from outpace.names import check_observer
from outpace.spec import load

if TYPE_CHECKING:
    from outpace.drafters.base import Drafter
    from outpace.engine.engine import Engine
    from outpace.engine.observer import Learner
    from outpace.loading import Loaded


class Attachment(ABC):
    """Options of an observer: a dataclass, which an entry point of the group ``outpace.observers`` names."""

    @abstractmethod
    def attach(self, model: Loaded, drafter: str) -> AbstractContextManager[Learner]:
        """Context in which an observer follows the steps of the model with a drafter.

        Raises:
            OutpaceError: the observer does not go with the model or the drafter.
        """


def observer_of(spec: str, parallel: str | None = None) -> Attachment | None:
    """The observer that a spec string names; None for an empty one.

    Raises:
        OutpaceError: unknown observer or option, an invalid value, or several processes.
    """
    if not spec:
        return None
    if parallel is not None:
        raise OutpaceError("--observer follows one process; leave one of --observer and --parallel out")
    check_observer(spec)
    return load("observer", {}, spec, Attachment)


def attached(
    observer: Attachment | None, model: Loaded, drafter: str
) -> AbstractContextManager[Learner | None]:
    """Context in which an observer is attached to a model; without one, its value is None."""
    return nullcontext() if observer is None else observer.attach(model, drafter)


def engine_of(
    model: Loaded,
    drafter: Drafter[Any] | str,
    verifier: str,
    slots: int,
    adaptive: bool | None,
    learner: Learner | None = None,
) -> Engine:
    """An engine with a drafter, or with the observer's drafter in its place."""
    from outpace.engine.slow import reasons

    own = drafter if learner is None else learner.drafter
    engine = model.engine(own, verifier, slots, "auto" if adaptive is None else adaptive, learner)
    for reason in reasons(engine.target, engine.drafter, engine.governor, engine.verifier):
        screen.note(f"slower than it could be: {reason}", style="yellow")
    return engine
