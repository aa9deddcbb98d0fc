"""Online speculative decoding: a drafter learns from its mistakes while it is used.

Liu et al. 2023 (OSD, arXiv 2310.07177). Where a draft fails, the target's logits are available already. They
go into a buffer, from which a copy of the drafter's weights learns from time to time. The copy replaces the
drafter's weights only if it would have had at least as many tokens accepted, on text that it has not learnt
from. The drafter only proposes, so no token of the output changes (docs/concepts/exactness.md).

Differences from the paper: new weights are measured before they are used, and dropped if they are worse;
heads and other trained drafters learn as draft models do. A draft model keeps keys and values computed with
older weights until its request ends; that makes its drafts slightly worse, and nothing else.
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
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.embedded import nano_draft_path
from outpace.learned.learned import Learned
from outpace.sequence import Sequence, Step
from outpace.targets import Target, TargetModel
from outpace_lab.train.buffer import Buffer, Record, Recording
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.trained import Trained
from outpace_lab.train.trainee import Learning, Round, Trainee, Weights

ROUNDS = "online.json"


class Online:
    """A drafter that learns while it is used: an engine's drafter and its observer.

        online = Online(model, "draft_model")
        engine = Engine(online.target, online.drafter, observer=online)
        with online:              # learns in the background; or call online.step() between requests
            engine.generate(prompts)

    It is used with one engine. The drafter gets weights of its own; one that was made with a module keeps
    that module, which then learns.

    Args:
        target: a loaded transformers model, or a target.
        drafter: a drafter with trained weights, or its spec string: one of ``train.methods.LEARNED``.
        report: called after each round, in the learning thread.

    Attributes:
        target, drafter: the target and drafter to make the engine with.
        module: the trained part of that drafter, whose weights change.
        rounds: the results of the last thousand rounds.
        error: the exception that ended the thread early; ``close`` raises it.

    Raises:
        OutpaceError: the drafter has no weights to learn, or shares them.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter[Any] | str,
        learning: Learning | None = None,
        report: Callable[[Round], None] = lambda round: None,
    ) -> None:
        self.target = Target(target)
        self.drafter, self.module = own_weights(drafter, self.target)
        self.learning = learning or Learning()
        self.rounds: deque[Round] = deque(maxlen=1000)
        self.error: Exception | None = None
        self._report = report
        self._trainee = Trainee(self.module, self.learning)
        self._buffer = Buffer(self.learning.tokens, self.learning.held_back, self.learning.measured)
        self._open: dict[Sequence, Recording] = {}
        self._fresh = 0  # decoded tokens added to the buffer since the last round began
        self._learnt: Weights | None = None  # weights to draft with from the next step on
        self._changed = threading.Condition()  # guards the buffer, _fresh, _learnt and _closing
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- called by the engine ----------------------------------------------------------------------------

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.module.hidden_layers

    @property
    def timed(self) -> bool:
        return self._thread is not None

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        own = {layer: hidden[layer] for layer in self.hidden_layers if layer in hidden}
        everywhere = self.learning.places == "all"
        source = () if sequence.source is None else sequence.source.tokens
        self._open[sequence] = Recording(sequence.tokens, own, self.learning.length, everywhere, source)

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
        """Copy learnt weights into the drafter. Call only while no draft is being made."""
        if self._learnt is not None:
            learnt, self._learnt = self._learnt, None
            with torch.no_grad():
                for name, own in self.module.state_dict().items():
                    own.copy_(learnt[name])

    # -- learning ----------------------------------------------------------------------------------------

    def step(self) -> Round | None:
        """Run a round in this thread, between two steps of the engine, and draft with the weights it kept.

        Returns:
            None if there is not enough text yet to learn from and to measure on.

        Raises:
            OutpaceError: a background thread is learning.
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
        """Start learning in a background thread: a round after every ``every`` decoded tokens.

        While it trains, torch's own random numbers are not reproducible; the engine uses none of them.
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
        """Stop the thread, if there is one; an unfinished round is discarded.

        Do not call it during a step of the engine.

        Raises:
            OutpaceError: learning had failed. Decoding continued with the weights learnt until then.
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
        """Write the drafter with its current weights, and ``online.json`` with the result of each round.

        The folder is what the drafter's option ``path`` takes; for a draft model, ``model``.

        Args:
            tokenizer: the target's, for a drafter whose folder contains one.

        Raises:
            OutpaceError: a background thread is learning.
        """
        if self._thread is not None:
            raise OutpaceError("it learns in the background; close() it first")
        self._trainee.module.save(folder)
        if tokenizer is not None:
            self._trainee.module.accompany(Path(folder), tokenizer)
        rounds = [asdict(found) for found in self.rounds]
        (Path(folder) / ROUNDS).write_text(json.dumps(rounds, indent=2) + "\n", encoding="utf-8")


def own_weights(drafter: Drafter[Any] | str, target: TargetModel) -> tuple[Drafter[Any], Trained]:
    """A drafter that shares its module with no other, in the target's dtype and device; and that module.

    A drafter that was given with a module keeps it.

    Raises:
        OutpaceError: it has no weights to learn, or shares them.
    """
    given = load_drafter(drafter) if isinstance(drafter, str) else drafter
    name = given.name
    if name not in LEARNED:
        inside = "" if name not in ("combined", "cascade") else "; make it with the drafter of an Online"
        raise OutpaceError(
            f"online: {name} has no weights of its own to learn{inside}. Drafters that have: "
            f"{', '.join(LEARNED)}"
        )
    field = "model" if name == "draft_model" else "path"
    place = getattr(given, field)
    if place is None and name == "draft_model":
        place = nano_draft_path()
    module_of_method = isinstance(place, Learned) and place.method == name
    if not (isinstance(place, str | Path) or module_of_method):
        raise OutpaceError(
            f"online: {name} needs weights of its own to learn: give {field}=FOLDER, or a module; see "
            f"outpace train {name}"
        )
    module = LEARNED[name].of(place, target, pack=False)
    module.requires_grad_(False).eval()
    return replace(given, **{field: module.drafting_part}), module
