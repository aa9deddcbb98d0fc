"""What ``outpace bench`` measures, from its options, and how it shows it; imported when the command runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from outpace.bench import record as records
from outpace.bench.items import Suite, counted
from outpace.bench.machine import machine
from outpace.bench.methods import close_all, make_methods, split_drafters, with_lengths
from outpace.bench.peers import Peer, PeerOptions, split_peers, versions_of
from outpace.bench.record import BenchRecord
from outpace.bench.rows import Row, rows_of
from outpace.bench.run import Measured, Settings, measure, reason
from outpace.bench.runs import Method
from outpace.bench.subject import fitting
from outpace.bench.suites import load_suite, split_names
from outpace.cli import screen
from outpace.cli.interrupt import Interrupt
from outpace.cli.parts import numbers
from outpace.cli.progress import bar
from outpace.cli.writer import STANDARD_OUTPUT, write_json
from outpace.core import OutpaceError, out_of_memory
from outpace.drafters import load_drafter
from outpace.embedded import nano_draft_path, nano_path
from outpace.loading import Loaded
from outpace.targets.ties import margin_of
from outpace.verify import load_verifier

if TYPE_CHECKING:
    from outpace.cli.bench import BenchOptions

Rows = Callable[[Measured], Seq[Row]]


@dataclass(frozen=True)
class BenchPlan:
    """Options of a benchmark that are known without the model."""

    suites: tuple[Suite, ...]
    limit: int | None
    drafters: tuple[str, ...]
    verifier: str
    adaptive: bool | None
    peers: tuple[Peer, ...]
    assistant: str | None
    batches: tuple[int, ...]
    settings: Settings
    notes: tuple[str, ...] = ()

    def with_drafter(self, spec: str, notes: Seq[str] = ()) -> BenchPlan:
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
        }


def plan(given: BenchOptions, peers: str, batches: tuple[int, ...]) -> BenchPlan:
    """Parse the lists of the command line.

    Args:
        peers: those that are measured where none is given.

    Raises:
        OutpaceError: a list names something unknown, or a suite twice.
    """
    names, adaptive = split_names(given.suite), given.adaptive
    specs = split_drafters(given.drafters)
    for spec in specs:
        load_drafter(spec)
    if given.lengths is not None:
        if adaptive:
            raise OutpaceError("--lengths and --adaptive both decide how much is drafted; leave one out")
        specs, adaptive = with_lengths(specs, numbers("lengths", given.lengths)), False
    load_verifier(given.verifier)
    chosen_peers = split_peers(given.peers or peers)
    if given.assistant is not None and not any(peer.name == "transformers:assisted" for peer in chosen_peers):
        raise OutpaceError(
            "--assistant is the draft model of transformers:assisted; add that to --peers, or leave it out"
        )
    return BenchPlan(
        suites=tuple(load_suite(name, given.data) for name in names),
        limit=given.limit,
        drafters=tuple(specs),
        verifier=given.verifier,
        adaptive=adaptive,
        peers=tuple(chosen_peers),
        assistant=given.assistant,
        batches=batches,
        settings=Settings(
            given.max_new_tokens, given.temperature, given.top_p, given.seed, given.repeats, given.eos
        ),
    )


def run(chosen: BenchPlan, model: Loaded, as_json: str | None) -> BenchRecord:
    """Measure, and write the table and the requested file.

    Raises:
        OutpaceError: a method cannot be made, no prompt fits, or plain decoding failed.
    """
    found = measure_all(chosen, model, partial(rows_of, margin=partial(margin_of, model.target)))
    from outpace.cli import bench_tables

    if found.rows:
        bench_tables.show(found, screen.err() if as_json == STANDARD_OUTPUT else screen.out())
    write_json(json.dumps(records.as_json(found)), as_json)
    return found


def measure_all(chosen: BenchPlan, model: Loaded, rows: Rows, weights: Path | None = None) -> BenchRecord:
    """Measure all methods on all suites.

    Args:
        rows: computes the rows of the methods on a suite.
        weights: as in ``PeerOptions``.

    Raises:
        OutpaceError: a method cannot be made, no prompt fits, or plain decoding failed.
    """
    notes = list(chosen.notes)
    if model.target.promise == "not exact":
        notes.append(f"not exact with this model, where near-ties may flip: {model.target.why_inexact}")
    suites = []
    for suite in chosen.suites:
        fits = fitting(model, suite, chosen.settings.max_new_tokens)
        if fits.left_out:
            notes.append(
                f"{suite.name}: {counted(fits.left_out)} left out, too long for the model or missing"
            )
        suites.append(fits.first(chosen.limit))
    with TemporaryDirectory(prefix="outpace-") as folder:
        with screen.busy("preparing the methods ..."):
            methods = make_methods(
                model,
                chosen.drafters,
                chosen.verifier,
                "auto" if chosen.adaptive is None else chosen.adaptive,
                chosen.peers,
                _options(chosen, model, Path(folder), weights),
            )
        try:
            found = _record(chosen, model, methods, notes)
            _measure(chosen, model, suites, methods, found, rows)
        finally:
            close_all(methods)
    return found


def _options(chosen: BenchPlan, model: Loaded, folder: Path, weights: Path | None) -> PeerOptions:
    assistant = chosen.assistant
    if assistant is None and model.source == str(nano_path()):
        assistant = str(nano_draft_path())
    length = model.target.context or PeerOptions.length
    return PeerOptions(folder, assistant, weights, length, chosen.settings.temperature)


def _record(chosen: BenchPlan, model: Loaded, methods: Seq[Method], notes: list[str]) -> BenchRecord:
    return BenchRecord(
        machine=machine(model.device),
        model={
            "name": model.name,
            "dtype": model.dtype,
            "device": model.device,
            "promise": model.target.promise,
            "step": model.target.plan.name,
            "bits": model.target.why_inexact or "bit-exact",
            **({"quantised": model.target.quantised} if model.target.quantised else {}),
        },
        settings=chosen.facts(),
        command=shlex.join(["outpace", *sys.argv[1:]]),
        notes=notes,
        peers=versions_of(methods),
    )


def _measure(
    chosen: BenchPlan, model: Loaded, suites: Seq[Suite], methods: Seq[Method], found: BenchRecord, rows: Rows
) -> None:
    """Measure each method, suite and batch size, and add the rows to the record.

    If plain decoding fails on a suite at a batch size, a note replaces the rows.
    """
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
                    found.rows += rows(measured)
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
