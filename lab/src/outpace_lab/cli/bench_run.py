"""``outpace bench lab``: a benchmark with the machine's roof, grades of the answers and a report."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outpace.cli import screen
from outpace.cli.bench_run import BenchPlan, measure_all, plan
from outpace.cli.writer import STANDARD_OUTPUT
from outpace.core import OutpaceError, out_of_memory
from outpace.loading import Loaded
from outpace.targets.ties import margin_of
from outpace_lab.bench.grading import check_gradable, grader_of
from outpace_lab.bench.grown import Grown
from outpace_lab.bench.growth import vocabulary_note
from outpace_lab.bench.growth_folder import shape_of
from outpace_lab.bench.peers import READ_GGUF
from outpace_lab.bench.results import LabRecord, as_json, lab_rows_of
from outpace_lab.bench.roof import EXPERTS, Roof, measure_roof
from outpace_lab.cli import bench_tables
from outpace_lab.cli.reports import write_results

__all__ = ["Extras", "extras_of", "plan", "run"]


@dataclass(frozen=True)
class Extras:
    """Options of a benchmark beside those of ``BenchPlan``."""

    gguf: Path | None
    grade: bool


def extras_of(chosen: BenchPlan, gguf: Path | None, grade: bool, run_code: bool) -> Extras:
    """Check the options that only this benchmark has.

    Raises:
        OutpaceError: one has no effect, or nothing can be graded.
    """
    if gguf is not None and not any(peer.library in READ_GGUF for peer in chosen.peers):
        raise OutpaceError(
            "--gguf is the model's weights for llama.cpp; add llama.cpp=VENV to --peers, or leave it out"
        )
    if grade:
        check_gradable(chosen.suites, run_code)
    elif run_code:
        raise OutpaceError("--run-code is for --grade; add that, or leave it out")
    return Extras(gguf, grade)


def run(
    chosen: BenchPlan, extras: Extras, model: Loaded, to_json: str | None, html: Path | None
) -> LabRecord:
    """Measure, and write the tables and the requested files.

    Raises:
        OutpaceError: a method cannot be made, no prompt fits, or plain decoding failed.
    """
    notes = list(chosen.notes)
    grown = model.like if isinstance(model, Grown) else shape_of(model.source)
    if grown is not None:
        weights: Any = model.target.model
        told = vocabulary_note(weights.config, getattr(torch, model.dtype).itemsize)
        notes.append(f"the vocabulary of this growth to {grown} is {told}")
    roof = _roof(model, notes)
    grader = grader_of(model) if extras.grade else None
    rows = partial(lab_rows_of, margin=partial(margin_of, model.target), roof=roof, grader=grader)
    measured = measure_all(replace(chosen, notes=tuple(notes)), model, rows, extras.gguf)
    settings = {**measured.settings, "grade": extras.grade}
    found = LabRecord(**{**vars(measured), "settings": settings}, roof=roof)
    if found.rows:
        bench_tables.show(found, screen.err() if to_json == STANDARD_OUTPUT else screen.out())
    from outpace_lab.bench.html import page

    write_results(json.dumps(as_json(found)), to_json, lambda: page(found), html if found.rows else None)
    return found


def _roof(model: Loaded, notes: list[str]) -> Roof | None:
    if model.target.model is None:
        notes.append("no roof is known for a model that transformers does not run")
        return None
    if model.target.quantised:
        notes.append(
            f"weights in {model.target.quantised} have no roof here; peers decode the model as it was loaded"
        )
        return None
    if model.target.has_encoder:
        notes.append("no roof is known for an encoder-decoder model")
        return None
    with screen.busy("measuring the machine ..."):
        try:
            found = measure_roof(model.target, 128, model.device, getattr(torch, model.dtype))
        except OutpaceError as error:
            notes.append(str(error))
            return None
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            notes.append("the roof was not measured: out of memory")
            return None
    if found.work is None:
        notes.append(EXPERTS)
    return found
