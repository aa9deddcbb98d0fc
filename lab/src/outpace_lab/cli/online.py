"""``--online``: the drafter of ``generate``, ``chat`` and ``serve`` learns while it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli import screen
from outpace.cli.prompts import Prompt, read
from outpace.core import OutpaceError
from outpace.spec import load

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace_lab.train import Online, Topics


@contextmanager
def learning(
    model: Loaded,
    drafter: str,
    wanted: bool,
    options: str,
    out: Path | None,
    topics: Mapping[Path, Sequence[Prompt]] | None = None,
) -> Iterator[Online | Topics | None]:
    """Context in which a drafter learns in the background; prints a summary at the end.

    Args:
        options: of ``Learning``, as in ``every=512,learning_rate=3e-5``.
        out: a folder to write the drafter to.
        topics: example prompts of each topic by their file, for a drafter per topic.

    Raises:
        OutpaceError: unknown option, invalid value, or a drafter that cannot learn.
    """
    if not wanted:
        yield None
        return
    from outpace_lab.drafters.routed import TopicRouter
    from outpace_lab.train import Learning, Online, Topics

    how = load("way to learn", {"online": Learning}, f"online:{options}")
    online: Online | Topics
    if topics:
        router = TopicRouter([[model.encode(one.text) for one in found] for found in topics.values()])
        online = Topics(model.target, drafter, router, len(topics), how)
        learners = list(zip((f"{file}: " for file in topics), online.learners, strict=True))
    else:
        online = Online(model.target, drafter, how)
        learners = [("", online)]
    try:
        with online:
            yield online
    finally:
        for name, learner in learners:
            screen.note(name + summary(learner))
        if out is not None:  # after a failure too: what was learnt is sound
            online.save(out, model.tokenizer)
            screen.note(f"the drafter with the learnt weights is in {out}")


def engine_of(
    model: Loaded,
    spec: str,
    verifier: str,
    slots: int,
    adaptive: bool | None,
    learner: Online | Topics | None,
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


def read_topics(files: Sequence[Path]) -> dict[Path, list[Prompt]]:
    """Read the files of ``--topic``.

    Raises:
        OutpaceError: one is given twice, cannot be read, has no prompts, or has references.
    """
    found: dict[Path, list[Prompt]] = {}
    for file in files:
        if file in found:
            raise OutpaceError(f"--topic {file} is given twice; give each topic once")
        found[file] = read(None, file)
        for one in found[file]:
            if one.references:
                raise OutpaceError(
                    one.where(f"--topic {file}: topics have prompts only; leave references out")
                )
    return found


def check_online(
    online: bool,
    options: str,
    out: Path | None,
    parallel: str | None = None,
    topics: bool = False,
) -> None:
    """Refuse options of --online without it, several processes, and an output folder that exists."""
    if online and parallel is not None:
        raise OutpaceError("--online learns in one process; leave one of --online and --parallel out")
    if topics and not online:
        raise OutpaceError("--topic names a topic of --online; add --online")
    if options and not online:
        raise OutpaceError("--online-options are options of --online; add --online")
    if out is None:
        return
    if not online:
        raise OutpaceError("--online-out is the output folder of --online; add --online")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutpaceError(f"--online-out {out} exists already; give another folder")
