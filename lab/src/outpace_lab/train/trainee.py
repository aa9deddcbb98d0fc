"""A copy of a drafter's module that learns from a buffer, and is measured before its weights are used."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.draws.noise import key
from outpace.spec import check_choices, check_least
from outpace_lab.train.buffer import Record, batch_of
from outpace_lab.train.data import Document
from outpace_lab.train.metric import Replay
from outpace_lab.train.objectives import objective
from outpace_lab.train.on_policy import is_on_policy, own_text
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained, TrainingBatch

Weights = dict[str, Tensor]
Kept = Literal["learnt", "before", "first"]
_CLIP = 1.0  # the maximum norm of the gradients


@dataclass(frozen=True)
class Learning:
    """Options of a drafter that learns while it is used.

    Attributes:
        tokens: the capacity of the buffer; the oldest text is dropped. Each request in flight holds up to
            ``length`` tokens in addition.
        length: tokens per stretch of text that is learnt from, at most half of them context; at least 8.
        places: where the target's logits are kept. "rejected": only where the draft failed, as in the paper;
            "all": every place the target has visited, which takes more memory accordingly.
        every: tokens decoded between two rounds in the background.
        updates: updates of the weights per round.
        rows: stretches per update.
        learning_rate: of AdamW, constant.
        objective: a name in ``outpace_lab.train.objectives``.
        on_policy: share of updates on text that the drafter itself writes after the beginning of a stretch,
            scored by the target; for a draft model. 0 is the paper's sampling by the teacher, 1 that by the
            student, between them is mixed sampling (of updates, where the paper mixes tokens).
        held_back: one stretch in this many is used for measuring, not learnt from; at least 2.
        measured: tokens of output to measure on, the newest of those held back. There is no round until this
            many are available: with fewer, chance would decide which weights are kept.
        seed: of the order of the stretches.
    """

    tokens: int = 16384
    length: int = 256
    places: Literal["rejected", "all"] = "rejected"
    every: int = 1024
    updates: int = 16
    rows: int = 8
    learning_rate: float = 1e-4
    objective: str = "forward_kl"
    on_policy: float = 0.0
    held_back: int = 4
    measured: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("online", self, length=8, every=1, updates=1, rows=1, held_back=2, measured=1)
        check_least("online", self, tokens=2 * self.length)
        if 2 * self.measured * self.held_back > self.tokens:
            raise OutpaceError(
                f"online: a buffer of tokens={self.tokens} does not hold measured={self.measured} of output "
                f"at one in held_back={self.held_back}; it must be at least "
                f"{2 * self.measured * self.held_back}"
            )
        check_choices("online", self, "places")
        if not 0 < self.learning_rate < math.inf:
            raise OutpaceError(f"online: learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.on_policy <= 1:
            raise OutpaceError(f"online: on_policy must be a share from 0 to 1, not {self.on_policy}")
        objective(self.objective)


@dataclass(frozen=True)
class Round:
    """The result of a round.

    Attributes:
        number: the number of the round, from 1.
        records: stretches of text in the buffer available to learn from.
        places: the places in them at which the target's logits are known.
        loss: the mean of the updates; None if it was not finite, in which case the update was dropped.
        expected_length: expected tokens per step on the newest text held back, with the weights "learnt" in
            this round, those from "before" it, and the "first" ones of all.
        kept: the best of those; "learnt" in a tie.
    """

    number: int
    records: int
    places: int
    loss: float | None
    expected_length: dict[Kept, float] = field(default_factory=dict)
    kept: Kept = "before"


class Trainee:
    """A copy of a module, in float32 unless the module is in float64.

    Args:
        module: bound to its target; it is not changed.

    Raises:
        OutpaceError: it is to learn from its own text, and cannot write.
    """

    def __init__(self, module: Trained, learning: Learning) -> None:
        if learning.on_policy:
            _ = module.writer  # raises
        self._learning = learning
        # The target is shared, not copied.
        self.module = copy.deepcopy(module, {id(module.target): module.target})
        if any(weight.dtype != torch.float64 for weight in self.module.parameters()):
            self.module.float()
        self.module.requires_grad_(True).eval()
        self._first = self.weights()
        self._is_first = True
        self._optimizer = self._fresh()
        self.rounds = 0

    def _fresh(self) -> torch.optim.AdamW:
        rate = self._learning.learning_rate
        return torch.optim.AdamW(self.module.parameters(), lr=rate, weight_decay=0.0)

    def weights(self) -> Weights:
        """A copy of its weights."""
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def learn(self, learnt: Seq[Record], held_back: Seq[Record], stop: Callable[[], bool]) -> Round | None:
        """Run a round: some updates, then keep the best of the new weights, those before, and the first.

        Args:
            stop: called before each update; if it returns True the weights are restored, and the result is
                None.
        """
        before, was_first = self.weights(), self._is_first
        lengths: dict[Kept, float] = {"before": self._length(held_back)}
        losses: list[float] = []
        for update in range(self._learning.updates):
            if stop():
                self._return_to(before, was_first)
                return None
            losses.append(self._update(learnt, update))
        self._is_first = False
        sound = all(bool(weight.isfinite().all()) for weight in self.module.parameters())
        lengths = {"learnt": self._length(held_back) if sound else 0.0, **lengths}
        if not was_first:
            now = self.weights()
            self.module.load_state_dict(self._first)
            lengths["first"] = self._length(held_back)
            self.module.load_state_dict(now)
        kept = max(lengths, key=lambda name: lengths[name])
        if kept != "learnt":
            self._return_to(self._first if kept == "first" else before, was_first or kept == "first")
        self.rounds += 1
        places = sum(len(record.places) for record in learnt)
        loss = sum(losses) / len(losses)
        return Round(self.rounds, len(learnt), places, loss if math.isfinite(loss) else None, lengths, kept)

    def _return_to(self, weights: Weights, is_first: bool) -> None:
        """Restore weights, and reset the optimizer."""
        self.module.load_state_dict(weights)
        self._is_first = is_first
        self._optimizer = self._fresh()

    def _update(self, records: Seq[Record], update: int) -> float:
        learning = self._learning
        word = key(learning.seed, self.rounds, update)
        with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(word)
            chosen = [records[place] for place in torch.randperm(len(records))[: learning.rows].tolist()]
            own = is_on_policy(update, learning.on_policy)
            batch = self._own_text(chosen, word) if own else self._batch(chosen, learn=True)
            self.module.train()
            losses = self.module.loss(batch, objective(learning.objective))
            losses.total.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.module.eval()
        return float(losses.total.detach())

    @torch.no_grad()
    def _length(self, records: Seq[Record]) -> float:
        replay = Replay()
        rows = self._learning.rows
        for start in range(0, len(records), rows):
            batch = self._batch(records[start : start + rows], learn=False)
            replay.add(batch, self.module.accepted(batch))
        return replay.expected_length

    def _own_text(self, records: Seq[Record], seed: int) -> TrainingBatch:
        """The drafter's continuations of the beginnings of records, scored by the target."""
        rows = [[Document(r.tokens, r.context, source=tuple(r.source))] for r in records]
        written = own_text(self.module, rows, seed)
        return replace(read_batch(self.module.target, written, self.module.hidden_layers), sampled=True)

    def _batch(self, records: Seq[Record], learn: bool) -> TrainingBatch:
        target = self.module.target
        device = next(self.module.parameters()).device
        return batch_of(records, self.module.hidden_layers, target.vocabulary, device, learn)
