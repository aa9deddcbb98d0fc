"""The target's answers to prompts, saved to the drafter's folder as they are made."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.cli import progress, screen
from outpace.core import OutpaceError, SamplingParams
from outpace.files import replace_text
from outpace.learned.learned import Fit
from outpace.loading import Loaded
from outpace_lab.train import data
from outpace_lab.train.data import Document
from outpace_lab.train.distil import answer
from outpace_lab.train.processes import Processes

ANSWERS, HELD_OUT = "answers", "held_out"
"""Names of answer files: to learn from, and to measure on if the texts are not the target's own."""

_SHOWN = {ANSWERS: "prompts answered", HELD_OUT: "held-out prompts answered"}
_TOGETHER = 256  # prompts per process between two writes


def answered(
    model: Loaded,
    prompts: list[Document],
    params: SamplingParams,
    out: Path,
    processes: Processes,
    name: str = ANSWERS,
) -> list[Document]:
    """The target's answers, computed in shares by the processes unless they are in ``out`` already.

    Args:
        params: must have a seed.
        name: name of the files in ``out``: ``ANSWERS`` or ``HELD_OUT``.

    Raises:
        OutpaceError: the answers in ``out`` are to other prompts, or were made with other options.
    """
    facts = {
        "target": Fit.of(model.target).name,
        "prompts": data.digest(prompts),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
    }
    kept = _Kept(out, name, facts, len(prompts))
    done, found = kept.read(model)
    processes.wait()  # until all have read
    if done == len(prompts):
        screen.note(f"the target's answers are in {kept.file} already")
        return found
    if processes.first:
        kept.begin(done, found)
    with progress.bar(len(prompts), _SHOWN[name]) as bar:
        bar.advance(steps=done)
        while done < len(prompts):
            began = time.perf_counter()
            part = prompts[done : done + _TOGETHER * processes.count]
            start, own = processes.share(part)
            made = processes.gather(answer(model.target, own, _seeded(params, done + start)))
            done += len(part)
            found += made
            if processes.first:
                kept.add(made, done, len(found), time.perf_counter() - began)
            bar.advance(steps=len(part))
    processes.wait()
    return found


def seconds(out: Path) -> float:
    """Seconds spent on the answers in a folder, over all runs."""
    notes = [out / f"{name}.json" for name in _SHOWN]
    kept = [json.loads(note.read_text("utf-8")) for note in notes if note.is_file()]
    return sum(float(noted.get("seconds", 0.0)) for noted in kept)


def _seeded(params: SamplingParams, start: int) -> SamplingParams:
    """Parameters for prompts from ``start`` on, with consecutive seeds."""
    return replace(params, seed=((params.seed or 0) + start) % 2**64)


class _Kept:
    """Answers on disk, with a note of their inputs, their number and the seconds they took.

    Args:
        name: name of both files.
        facts: the inputs.
        prompts: number of prompts.

    Raises:
        OutpaceError: the files are of other inputs.
    """

    def __init__(self, out: Path, name: str, facts: dict[str, Any], prompts: int) -> None:
        self.file, self._note = out / f"{name}.jsonl", out / f"{name}.json"
        self._facts = facts
        self._prompts = prompts
        self._seconds = 0.0

    def read(self, model: Loaded) -> tuple[int, list[Document]]:
        """Read the number of answered prompts, and the answers."""
        if not self._note.is_file():
            if self.file.exists():
                raise OutpaceError(f"{self.file} would be overwritten; give another --out")
            return 0, []
        try:
            noted: dict[str, Any] = json.loads(self._note.read_text("utf-8"))
            done, lines = noted.pop("answered", self._prompts), noted.pop("lines", None)
            self._seconds = noted.pop("seconds", 0.0)
        except (OSError, ValueError, AttributeError) as error:
            raise OutpaceError(f"{self._note} cannot be read: {error}; give another --out") from error
        if noted != self._facts:
            raise OutpaceError(
                f"{self.file} has answers to other prompts or with other options; give another --out"
            )
        try:
            held = self.file.read_text("utf-8").splitlines()[:lines]
            found = [data.parse(json.loads(line), model) for line in held]
        except (OSError, ValueError, OutpaceError) as error:
            raise OutpaceError(f"{self.file} cannot be read: {error}; give another --out") from error
        return done, found

    def begin(self, done: int, found: list[Document]) -> None:
        """Cut the file back to the noted answers: an interruption may have come before the note."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._write_note(done, len(found))
        data.write(found, self.file)

    def add(self, made: list[Document], done: int, lines: int, seconds: float) -> None:
        self._seconds += seconds
        data.write(made, self.file, append=True)
        self._write_note(done, lines)

    def _write_note(self, done: int, lines: int) -> None:
        text = json.dumps(
            self._facts | {"answered": done, "lines": lines, "seconds": self._seconds}, indent=2
        )
        replace_text(self._note, text + "\n")
