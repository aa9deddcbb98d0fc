"""Online learning with one drafter per topic: each learns from the requests that a router sends to it.

Liu et al. 2023 (OSD, arXiv 2310.07177), section 4. A stream that changes its topic back and forth does not
make the drafter of one topic forget what it has learnt for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.base import Drafter
from outpace.sequence import Sequence, Step
from outpace.targets import Target
from outpace_lab.drafters.routed import Routed, Router
from outpace_lab.train.online import Online
from outpace_lab.train.trainee import Learning, Round


class Topics:
    """Copies of a drafter, one per topic, each of which learns while it is used.

        topics = Topics(model, "draft_model", TopicRouter([maths, code]), 2)
        engine = Engine(topics.target, topics.drafter, observer=topics)

    It is used as an ``Online`` is.

    Args:
        target: a loaded transformers model, or a target.
        drafter: a drafter with trained weights in a folder, or its spec string; every topic begins with a
            copy.
        router: picks a request's topic from its prompt.
        count: number of topics, at least 1.

    Attributes:
        target, drafter: the target and drafter to make the engine with.
        learners: the ``Online`` of each topic.

    Raises:
        OutpaceError: the drafter has no weights to learn, or not a copy for each topic.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter[Any] | str,
        router: Router,
        count: int,
        learning: Learning | None = None,
    ) -> None:
        if count < 1:
            raise OutpaceError(f"topics: count must be at least 1, not {count}")
        self.target = Target(target)
        self.learners = [Online(self.target, drafter, learning) for _ in range(count)]
        self.drafter = Routed(tuple(learner.drafter for learner in self.learners), router)
        if len({learner.module for learner in self.learners}) < count:
            raise OutpaceError("topics: each topic learns weights of its own; give the drafter by its folder")
        self._router = router
        self._open: dict[Sequence, Online] = {}
        self._threads = ExitStack()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.learners[0].hidden_layers

    @property
    def timed(self) -> bool:
        return any(learner.timed for learner in self.learners)

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        learner = self._open[sequence] = self.learners[self._router(sequence.prompt)]
        learner.joined(sequence, hidden)

    def stepped(self, steps: Seq[Step]) -> None:
        for learner in self.learners:
            learner.stepped([step for step in steps if self._open[step.sequence] is learner])

    def left(self, sequence: Sequence) -> None:
        learner = self._open.pop(sequence, None)
        if learner is not None:
            learner.left(sequence)

    def step(self) -> list[Round | None]:
        """Run a round of each topic in this thread, as ``Online.step`` does."""
        return [learner.step() for learner in self.learners]

    def __enter__(self) -> Self:
        """Start learning in the background, a thread per topic."""
        for learner in self.learners:
            self._threads.enter_context(learner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.close()

    def save(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the drafter of each topic to a folder of its number, as ``Online.save`` does."""
        for number, learner in enumerate(self.learners):
            learner.save(Path(folder) / str(number), tokenizer)
