"""The metric of a drafter: tokens per step, by replaying decoding on held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace_lab.train.boosting import accepted_together
from outpace_lab.train.trained import Objective, Trained, TrainingBatch


@dataclass
class Replay:
    """Counts of the steps that decoding would take through a text, assuming the target would emit it.

    Every step drafts, also the one after a prompt, which is plain in decoding if the drafter reads the
    target's hidden states.

    Attributes:
        steps: forwards of the target.
        tokens: tokens emitted, including the target's own at the end of each path.
        accepted: per position in the draft, from the first, the number of steps that accepted it.
    """

    steps: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def expected_length(self) -> float:
        """The expected mean accepted length (tau): 1 without a draft."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """The share of steps that accept each position of the draft, as in ``accepted_per_position``."""
        return [count / self.steps for count in self.accepted]

    def add(self, batch: TrainingBatch, accepted: Tensor) -> None:
        """Replay a batch's documents, each from the last token of its prompt on.

        Args:
            accepted: [B, T], the number of tokens accepted of a draft made at each place.
        """
        for documents, counted, lengths in zip(
            batch.documents.tolist(), batch.counted.tolist(), accepted.tolist(), strict=True
        ):
            place = 0
            while place < len(documents):
                end = place
                while end < len(documents) and documents[end] == documents[place]:
                    end += 1
                if documents[place] >= 0:
                    self._walk(counted[place:end], lengths[place:end])
                place = end

    def _walk(self, counted: list[bool], lengths: list[int]) -> None:
        first = next((place for place, learnt in enumerate(counted) if learnt), len(counted))
        root = max(first - 1, 0)
        last = len(counted) - 1
        while root < last:
            # As in the engine, the last token is never drafted: a path takes at most all tokens before it.
            path = min(lengths[root], last - root - 1)
            self.steps += 1
            self.tokens += path + 1
            self.accepted += [0] * (path - len(self.accepted))
            for position in range(path):
                self.accepted[position] += 1
            root += path + 1


@torch.no_grad()
def evaluate(
    module: Trained, batches: Iterable[TrainingBatch], objective: Objective, earlier: Seq[Trained] = ()
) -> tuple[Replay, float]:
    """Measure a module on held-out text: the replay, together with earlier drafters, and the mean loss."""
    replay, losses = Replay(), []
    for batch in batches:
        replay.add(batch, accepted_together(batch, [module, *earlier]))
        losses.append(float(module.loss(batch, objective).total))
    return replay, sum(losses) / max(len(losses), 1)


@torch.no_grad()
def replay(modules: Seq[Trained], batches: Iterable[TrainingBatch]) -> Replay:
    """Replay held-out text with the merged drafts of several drafters."""
    found = Replay()
    for batch in batches:
        found.add(batch, accepted_together(batch, modules))
    return found
