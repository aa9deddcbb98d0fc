"""Online speculative decoding: a drafter learns from what it got wrong while it is used.

Liu et al. 2023 (OSD, arXiv 2310.07177). Where a draft fails, the target's logits are there already; they go
into a buffer, and from time to time a copy of the drafter's weights learns from it. It takes the drafter's
place only where it would have had as many tokens accepted, on text that it has not learnt from. The drafter
can only propose, so no token of the output changes.

What differs from the paper: what is learnt is measured before it is used, and undone where it is worse; heads
and other trained drafters learn as draft models do. A draft model keeps the keys and values that older
weights made until its request ends; they make guesses a little worse, and nothing else.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS, LEARNED, load_drafter
from outpace.drafters.base import Drafter
from outpace.embedded import nano_draft_path
from outpace.learned.learned import Learned
from outpace.sequence import Sequence, Step
from outpace.targets import Target, TargetModel
from outpace.train.buffer import Buffer, Record, Recording
from outpace.train.trainee import Learning, Round, Trainee, Weights

ROUNDS = "online.json"


class Online:
    """A drafter that learns while it is used: an engine's drafter and its observer.

        online = Online(model, "draft_model")
        engine = Engine(online.target, online.drafter, observer=online)
        with online:              # learns in the background; or call online.step() between requests
            engine.generate(prompts)

    One engine uses it; the weights are this drafter's own, unless it was made with a module, which is then
    the one that learns.

    Args:
        target: a loaded transformers model, or a target.
        drafter: a drafter with trained weights, or its spec string: those of ``outpace.drafters.LEARNED``.
        report: called after each round, in the thread that learns.

    Attributes:
        target, drafter: what the engine is to be made with.
        rounds: what came of each, of the last thousand.
        error: what ended the thread before its time; ``close`` raises it.

    Raises:
        OutpaceError: the drafter has no weights to learn, or not ones of its own.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter[Any] | str,
        learning: Learning | None = None,
        report: Callable[[Round], None] = lambda round: None,
    ) -> None:
        self.target = Target(target)
        self.drafter, self._module = own_weights(drafter, self.target)
        self.learning = learning or Learning()
        self.rounds: deque[Round] = deque(maxlen=1000)
        self.error: Exception | None = None
        self._report = report
        self._trainee = Trainee(self._module, self.learning)
        self._buffer = Buffer(self.learning.tokens, self.learning.held_back, self.learning.measured)
        self._open: dict[Sequence, Recording] = {}
        self._fresh = 0  # tokens decoded that have come into the buffer since the last round began
        self._learnt: Weights | None = None  # what is to be drafted with from the next step on
        self._changed = threading.Condition()  # guards all of these
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- what an engine calls ----------------------------------------------------------------------------

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._module.hidden_layers

    @property
    def timed(self) -> bool:
        return self._thread is not None

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        own = {layer: hidden[layer] for layer in self.hidden_layers if layer in hidden}
        everywhere = self.learning.places == "all"
        self._open[sequence] = Recording(sequence.tokens, own, self.learning.length, everywhere)

    def stepped(self, steps: Seq[Step]) -> None:
        for step in steps:
            full = self._open[step.sequence].add(step, self.hidden_layers)
            if full is not None:
                self._keep(full)
        with self._changed:
            self._swap()

    def left(self, sequence: Sequence) -> None:
        recording = self._open.pop(sequence, None)
        if recording is not None:
            self._keep(recording.end())

    def _keep(self, record: Record) -> None:
        with self._changed:
            self._buffer.add(record)
            self._fresh += len(record.tokens) - record.context
            self._changed.notify()

    def _swap(self) -> None:
        """Draft with what was learnt. Only where no draft is being made."""
        if self._learnt is not None:
            learnt, self._learnt = self._learnt, None
            with torch.no_grad():
                for name, own in self._module.state_dict().items():
                    own.copy_(learnt[name])

    # -- learning ----------------------------------------------------------------------------------------

    def step(self) -> Round | None:
        """A round in this thread, between two steps of the engine; what it kept is drafted with from here on.

        Returns:
            None where there is not enough text yet to learn from and to measure on.

        Raises:
            OutpaceError: it learns in the background.
        """
        if self._thread is not None:
            raise OutpaceError("it learns in the background already; close() it first")
        found = self._round()
        with self._changed:
            self._swap()
        return found

    def _round(self) -> Round | None:
        with self._changed:
            learnt, held_back = self._buffer.learnt, self._buffer.held_back
            self._fresh = 0
        if not learnt or not held_back:
            return None
        found = self._trainee.learn(learnt, held_back, stop=lambda: self._closing)
        if found is None:
            return None
        with self._changed:
            self.rounds.append(found)
            if found.kept != "before":
                self._learnt = self._trainee.weights()
        self._report(found)
        return found

    # -- in the background -------------------------------------------------------------------------------

    def start(self) -> Online:
        """Learn in a thread of its own, a round whenever ``every`` tokens were decoded since the last began.

        While it trains, torch's own random numbers are not repeatable; the engine draws none of them.
        """
        if self._thread is not None:
            raise OutpaceError("it learns in the background already")
        self._closing, self.error = False, None
        self._thread = threading.Thread(target=self._run, name="outpace online learning", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._fresh >= self.learning.every)
                    if self._closing:
                        return
                self._round()
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """End the thread, if there is one; a round in the middle is given up.

        Not during a step of the engine.

        Raises:
            OutpaceError: learning had failed. Decoding went on with what had been learnt until then.
        """
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        thread.join()
        self._thread, self._closing = None, False
        with self._changed:
            self._swap()
        if self.error is not None:
            raise OutpaceError(f"online learning failed: {self.error!r}") from self.error

    def __enter__(self) -> Online:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the drafter as it is now, for ``path`` (a draft model: ``model``), and ``online.json``, what
        came of each round.

        Args:
            tokenizer: the target's, for a drafter whose folder has one.

        Raises:
            OutpaceError: it learns in the background.
        """
        if self._thread is not None:
            raise OutpaceError("it learns in the background; close() it first")
        self._trainee.module.save(folder)
        if tokenizer is not None:
            self._trainee.module.accompany(Path(folder), tokenizer)
        rounds = [asdict(found) for found in self.rounds]
        (Path(folder) / ROUNDS).write_text(json.dumps(rounds, indent=2) + "\n", encoding="utf-8")


def own_weights(drafter: Drafter[Any] | str, target: TargetModel) -> tuple[Drafter[Any], Learned]:
    """A drafter with a module that no other drafter has, in the target's dtype and on its device; and that
    module. One that was given with a module keeps it.

    Raises:
        OutpaceError: it has no weights to learn, or not ones of its own.
    """
    given = load_drafter(drafter) if isinstance(drafter, str) else drafter
    name = next((name for name, cls in DRAFTERS.items() if type(given) is cls), type(given).__name__)
    if name not in LEARNED:
        inside = "" if name not in ("combined", "cascade") else "; make it with the drafter of an Online"
        raise OutpaceError(
            f"online: {name} has no weights of its own to learn{inside}. Those that have: "
            f"{', '.join(LEARNED)}"
        )
    field = "model" if name == "draft_model" else "path"
    place = getattr(given, field)
    if place is None and name == "draft_model":
        place = nano_draft_path()
    if not isinstance(place, str | Path | LEARNED[name]):
        raise OutpaceError(
            f"online: {name} needs weights that are its own to learn: give {field}=FOLDER, or a module; see "
            f"outpace train {name}"
        )
    module = LEARNED[name].of(place, target)
    module.requires_grad_(False).eval()
    return replace(given, **{field: module}), module
