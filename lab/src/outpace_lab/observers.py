"""``--observer online`` and ``--observer topics``: the drafter of a command learns while it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from outpace.cli import screen
from outpace.cli.observing import Attachment
from outpace.cli.prompts import PromptLine, read
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace_lab import train
from outpace_lab.drafters.routed import TopicRouter
from outpace_lab.train import Learning, Online, Topics


@dataclass(frozen=True)
class LearningOnline(Learning, Attachment):
    """A drafter with trained weights that learns in the background; its options are those of ``Learning``.

    Attributes:
        out: a new folder, to which the drafter is saved at the end; None saves nothing.
    """

    out: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        out = None if self.out is None else Path(self.out)
        if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise OutpaceError(f"out={out} exists already; give another folder")

    @contextmanager
    def attach(self, model: Loaded, drafter: str) -> Iterator[Online | Topics]:
        """Context in which the drafter learns in the background; prints a summary at the end.

        Raises:
            OutpaceError: a drafter that cannot learn.
        """
        online, learners = self.learners(model, drafter)
        try:
            with online:
                yield online
        finally:
            for name, learner in learners.items():
                screen.note(name + summary(learner))
            if self.out is not None:  # after a failure too: what was learnt is sound
                online.save(Path(self.out), model.tokenizer)
                screen.note(f"the drafter with the learnt weights is in {self.out}")

    def learners(self, model: Loaded, drafter: str) -> tuple[Online | Topics, dict[str, Online]]:
        """What learns, and the parts of it by the beginnings of their lines in the summary."""
        online = train.Online(model.target, drafter, self)
        return online, {"": online}


@dataclass(frozen=True)
class LearningTopics(LearningOnline):
    """A copy of the drafter for each topic, which learns from the requests like its example prompts.

    Attributes:
        files: JSONL files of prompts, one per topic, joined by ``+``.
    """

    files: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.topics:
            raise OutpaceError("topics needs files, as in topics:files=maths.jsonl+code.jsonl")

    @cached_property
    def topics(self) -> Mapping[Path, Sequence[PromptLine]]:
        """The example prompts of each topic by their file."""
        return read_topics([Path(name) for name in self.files.split("+") if name])

    def learners(self, model: Loaded, drafter: str) -> tuple[Online | Topics, dict[str, Online]]:
        router = TopicRouter([[model.encode(one.text) for one in found] for found in self.topics.values()])
        topics = train.Topics(model.target, drafter, router, len(self.topics), self)
        return topics, dict(zip((f"{file}: " for file in self.topics), topics.learners, strict=True))


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


def read_topics(files: Sequence[Path]) -> dict[Path, list[PromptLine]]:
    """Read the example prompts of topics.

    Raises:
        OutpaceError: one is given twice, cannot be read, has no prompts, or has references.
    """
    found: dict[Path, list[PromptLine]] = {}
    for file in files:
        if file in found:
            raise OutpaceError(f"the topic {file} is given twice; give each topic once")
        found[file] = read(None, file)
        for one in found[file]:
            if one.references:
                raise OutpaceError(one.where(f"{file}: topics have prompts only; leave references out"))
    return found
