"""``outpace bench``: a table of methods for a user's model, hardware and prompts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from outpace.bench import record as records
from outpace.bench.grading import check_gradable, grader_of
from outpace.bench.items import Suite, counted
from outpace.bench.lab.gguf import write_gguf
from outpace.bench.lab.grown import Grown
from outpace.bench.lab.growth import vocabulary_note
from outpace.bench.lab.growth_folder import shape_of
from outpace.bench.lab.roof import EXPERTS, Roof, measure_roof
from outpace.bench.machine import machine
from outpace.bench.methods import (
    READ_GGUF,
    Peer,
    PeerOptions,
    close_all,
    make_methods,
    split_drafters,
    split_peers,
    with_lengths,
)
from outpace.bench.peers import versions_of
from outpace.bench.record import Record
from outpace.bench.rows import rows_of
from outpace.bench.run import Settings, measure, reason
from outpace.bench.runs import Method
from outpace.bench.subject import fitting
from outpace.bench.suites import load_suite, split_names
from outpace.cli import screen
from outpace.cli.interrupt import Interrupt
from outpace.cli.parts import numbers
from outpace.cli.progress import bar
from outpace.cli.writer import STANDARD_OUTPUT, write_results
from outpace.core import OutpaceError, out_of_memory
from outpace.drafters import load_drafter
from outpace.embedded import nano_draft_path, nano_path
from outpace.loading import Loaded
from outpace.targets import is_gguf
from outpace.targets.drift import margin_of
from outpace.verify import load_verifier


@dataclass(frozen=True)
class Plan:
    """Options of a benchmark that are known without the model."""

    suites: tuple[Suite, ...]
    limit: int | None
    drafters: tuple[str, ...]
    verifier: str
    adaptive: bool | None
    peers: tuple[Peer, ...]
    assistant: str | None
    gguf: Path | None
    batches: tuple[int, ...]
    settings: Settings
    grade: bool = False
    notes: tuple[str, ...] = ()

    def with_drafter(self, spec: str, notes: Seq[str] = ()) -> Plan:
        """Add the drafter of a profile, with notes about it."""
        drafters = self.drafters if spec in self.drafters else (*self.drafters, spec)
        return replace(self, drafters=drafters, notes=tuple(notes))

    def facts(self) -> dict[str, object]:
        """The settings that the figures depend on, for the record."""
        return {
            **asdict(self.settings),
            "suites": {suite.name: suite.source for suite in self.suites},
            "limit": self.limit,
            "drafters": list(self.drafters),
            "verifier": self.verifier,
            "adaptive": self.adaptive,
            "peers": [peer.name for peer in self.peers],
            "assistant": self.assistant,
            "batches": list(self.batches),
            "grade": self.grade,
        }


def plan(
    suites: str,
    data: Path | None,
    limit: int | None,
    drafters: str,
    lengths: str | None,
    verifier: str,
    adaptive: bool | None,
    peers: str,
    assistant: str | None,
    gguf: Path | None,
    batches: str,
    settings: Settings,
    grade: bool = False,
    run_code: bool = False,
) -> Plan:
    """Parse the lists of the command line.

    Raises:
        OutpaceError: a list names something unknown, or a suite twice, or nothing can be graded.
    """
    names = split_names(suites)
    specs = split_drafters(drafters)
    for spec in specs:
        load_drafter(spec)
    if lengths is not None:
        if adaptive:
            raise OutpaceError("--lengths and --adaptive both decide how much is drafted; leave one out")
        specs, adaptive = with_lengths(specs, numbers("lengths", lengths)), False
    load_verifier(verifier)
    chosen_peers = split_peers(peers)
    _refuse_unread(chosen_peers, assistant, gguf)
    loaded = tuple(load_suite(name, data) for name in names)
    if grade:
        check_gradable(loaded, run_code)
    elif run_code:
        raise OutpaceError("--run-code is for --grade; add that, or leave it out")
    return Plan(
        suites=loaded,
        limit=limit,
        drafters=tuple(specs),
        verifier=verifier,
        adaptive=adaptive,
        peers=tuple(chosen_peers),
        assistant=assistant,
        gguf=gguf,
        batches=numbers("batch", batches),
        settings=settings,
        grade=grade,
    )


def _refuse_unread(peers: Seq[Peer], assistant: str | None, gguf: Path | None) -> None:
    """Refuse options of peers that were not selected."""
    if assistant is not None and not any(peer.name == "transformers:assisted" for peer in peers):
        raise OutpaceError(
            "--assistant is the draft model of transformers:assisted; add that to --peers, or leave it out"
        )
    if gguf is not None and not any(peer.library in READ_GGUF for peer in peers):
        raise OutpaceError(
            "--gguf is the model's weights for llama.cpp; add llama.cpp=VENV to --peers, or leave it out"
        )


def run(chosen: Plan, model: Loaded, as_json: str | None, html: Path | None) -> Record:
    """Measure, and write the table and the requested files.

    Raises:
        OutpaceError: a method cannot be made, no prompt fits, or plain decoding failed.
    """
    with TemporaryDirectory(prefix="outpace-") as folder:
        found = _measure_all(replace(chosen, gguf=_gguf(chosen, model, Path(folder))), model)
    from outpace.cli import bench_tables as report

    if found.rows:
        screen_of = screen.err() if as_json == STANDARD_OUTPUT else screen.out()
        report.show(found, screen_of)
    from outpace.bench.html import page

    drawn = html if found.rows else None
    write_results(json.dumps(records.as_json(found)), as_json, lambda: page(found), drawn)
    return found


def _gguf(chosen: Plan, model: Loaded, folder: Path) -> Path | None:
    """The model's weights for llama.cpp: the given file, or one converted from the model if needed.

    Raises:
        OutpaceError: the model cannot be converted for llama.cpp.
    """
    if chosen.gguf is not None or not any(peer.library in READ_GGUF for peer in chosen.peers):
        return chosen.gguf
    if is_gguf(model.source):
        return Path(model.source)
    weights = model.target.model
    if weights is None:
        raise OutpaceError("llama.cpp as a peer needs a transformers model; use --peers none")
    file = folder / "model.gguf"
    with screen.busy("writing the model for llama.cpp ..."):
        try:
            write_gguf(weights, file, model.dtype, model.tokenizer)
        except OutpaceError as error:
            raise type(error)(f"{error}; or give --gguf FILE, of the same model") from None
    return file


def _measure_all(chosen: Plan, model: Loaded) -> Record:
    tokens = chosen.settings.max_new_tokens
    notes = list(chosen.notes)
    grown = model.like if isinstance(model, Grown) else shape_of(model.source)
    if grown is not None:
        weights: Any = model.target.model
        told = vocabulary_note(weights.config, getattr(torch, model.dtype).itemsize)
        notes.append(f"the vocabulary of this growth to {grown} is {told}")
    if model.target.promise == "not exact":
        notes.append(f"not exact with this model, where near-ties may flip: {model.target.inexact}")
    suites = []
    for suite in chosen.suites:
        fits = fitting(model, suite, tokens)
        if fits.left_out:
            notes.append(
                f"{suite.name}: {counted(fits.left_out)} left out, too long for the model or missing"
            )
        suites.append(fits.first(chosen.limit))
    assistant = chosen.assistant
    if assistant is None and model.source == str(nano_path()):
        assistant = str(nano_draft_path())
    options = PeerOptions(
        assistant, chosen.gguf, model.target.context or PeerOptions.length, chosen.settings.temperature
    )
    with screen.busy("preparing the methods ..."):
        methods = make_methods(
            model,
            chosen.drafters,
            chosen.verifier,
            "auto" if chosen.adaptive is None else chosen.adaptive,
            chosen.peers,
            options,
        )
    found = Record(
        machine=machine(model.device),
        model={
            "name": model.name,
            "dtype": model.dtype,
            "device": model.device,
            "promise": model.target.promise,
            "step": model.target.plan.name,
            "bits": model.target.inexact or "bit-exact",
            **({"quantised": model.target.quantised} if model.target.quantised else {}),
        },
        settings=chosen.facts(),
        command=shlex.join(["outpace", *sys.argv[1:]]),
        notes=notes,
        peers=versions_of(methods),
    )
    try:
        found.roof = _roof(model, notes)
        _measure(chosen, model, suites, methods, found)
    finally:
        close_all(methods)
    return found


def _measure(chosen: Plan, model: Loaded, suites: Seq[Suite], methods: Seq[Method], found: Record) -> None:
    """Measure each method, suite and batch size, and add the rows to the record.

    If plain decoding fails on a suite at a batch size, a note replaces the rows.

    Raises:
        OutpaceError: it failed on all of them.
    """
    grader = grader_of(model) if chosen.grade else None
    groups = [-(-len(suite.items) // batch) for suite in suites for batch in chosen.batches]
    failures: list[str] = []
    with Interrupt() as interrupt, bar(chosen.settings.repeats * sum(groups), "prompts") as progress:
        for suite, batch in product(suites, chosen.batches):
            name = suite.name if batch == 1 else f"{suite.name}, {batch} at once"
            asked = (model, _of_batch(methods, batch, found.notes), suite, batch, chosen.settings)
            try:
                advanced = lambda _, name=name: progress.advance(name)  # noqa: E731
                measured = measure(*asked, advanced, lambda: interrupt.raised)
                if measured.groups:
                    found.rows += rows_of(measured, partial(margin_of, model.target), found.roof, grader)
            except (OutpaceError, MemoryError, RuntimeError) as error:
                if not isinstance(error, OutpaceError) and not out_of_memory(error):
                    raise
                failures.append(f"{name}: {reason(error)}")
            found.interrupted = interrupt.raised
            if found.interrupted:
                break
    if failures and not found.rows and not found.interrupted:
        raise OutpaceError("; ".join(failures))
    found.notes += failures
    found.whole = not failures and not found.interrupted


def _of_batch(methods: Seq[Method], batch: int, notes: list[str]) -> list[Method]:
    """The methods that can decode a batch of this size."""
    if batch == 1:
        return list(methods)
    for method in methods:
        note = f"{method.name}: not with --batch above 1, since it decodes one prompt at a time"
        if method.lone and note not in notes:
            notes.append(note)
    return [method for method in methods if not method.lone]


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
