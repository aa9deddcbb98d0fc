"""``--online``: the drafter of ``generate`` and ``chat`` learns while it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli import screen
from outpace.core import OutpaceError
from outpace.spec import load

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.train import Online


@contextmanager
def learning(
    model: Loaded, drafter: str, wanted: bool, options: str, out: Path | None
) -> Iterator[Online | None]:
    """Context in which a drafter learns in the background; prints a summary at the end.

    Args:
        options: of ``Learning``, as in ``every=512,learning_rate=3e-5``.
        out: a folder to write the drafter to.

    Raises:
        OutpaceError: unknown option, invalid value, or a drafter that cannot learn.
    """
    if not wanted:
        yield None
        return
    from outpace.train import Learning, Online

    online = Online(model.target, drafter, load("way to learn", {"online": Learning}, f"online:{options}"))
    try:
        with online:
            yield online
    finally:
        screen.note(summary(online))
    if out is not None:
        online.save(out, model.tokenizer)
        screen.note(f"the drafter with the learnt weights is in {out}")


def engine_of(
    model: Loaded, spec: str, verifier: str, slots: int, adaptive: bool | None, learner: Online | None
) -> Engine:
    """An engine with a drafter, or with the learning drafter in its place."""
    return model.engine(
        spec if learner is None else learner.drafter,
        verifier,
        slots,
        "auto" if adaptive is None else adaptive,
        learner,
    )


def summary(online: Online) -> str:
    """A line about a drafter's learning."""
    rounds = online.rounds
    if not rounds:
        return (
            f"online: nothing was learnt; a round begins every {online.learning.every} tokens, "
            f"once {online.learning.held_back * online.learning.measured} are decoded"
        )
    kept = Counter(found.kept for found in rounds)
    last = rounds[-1].expected_length
    best = last[rounds[-1].kept]
    line = f"online: {sum(kept.values())} rounds, {kept['learnt']} kept; {best:.2f} tokens per step expected"
    return line + (f", {last['first']:.2f} with the first weights" if "first" in last else "")


def check_online(online: bool, options: str, out: Path | None) -> None:
    """Refuse options of --online without it, and an output folder that exists."""
    if options and not online:
        raise OutpaceError("--online-options are options of --online; add --online")
    if out is None:
        return
    if not online:
        raise OutpaceError("--online-out is the output folder of --online; add --online")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutpaceError(f"--online-out {out} exists already; give another folder")
