"""``outpace tune``: the fastest drafter and its options for a user's model, machine and prompts."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace._version import __version__
from outpace.bench.items import Suite, counted
from outpace.bench.methods import split_drafters
from outpace.bench.remarks import described
from outpace.bench.rows import Row, number
from outpace.bench.run import Settings
from outpace.bench.runs import BASELINE
from outpace.bench.speed import LEAST_GROUPS, Speed
from outpace.bench.statistics import overlap
from outpace.bench.subject import fitting
from outpace.bench.suites import load_together
from outpace.cli import screen
from outpace.cli.interrupt import Interrupt
from outpace.cli.progress import Bar, bar
from outpace.cli.writer import check_out
from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.engine.profile import Profile, read_profiles, save_profile
from outpace.files import beside
from outpace.loading import Loaded
from outpace_lab.bench.tuning import Goal, Tuned, Way, tune, verify

DRAFTERS = (
    "lookahead,prompt_lookup,suffix,token_recycling,jacobi,"
    "combined:(suffix)+(token_recycling),max_nodes=8,combined:(suffix)+(token_recycling),max_nodes=16,"
    "combined:(suffix)+(token_recycling),max_nodes=32"
)
_HELD_OUT = 4  # one prompt in this many is held back for --verify
_SHOWN = 8  # candidates in the table


@dataclass(frozen=True)
class Plan:
    """Options of tuning that are known without the model."""

    suite: Suite
    limit: int | None
    specs: tuple[str, ...]
    goal: Goal
    settings: Settings
    budget: float
    out: Path
    verify: bool


def plan(
    suite: str,
    data: Path | None,
    limit: int | None,
    drafters: str,
    objective: str,
    batches: tuple[int, ...],
    settings: Settings,
    budget: float,
    out: Path,
    check: bool,
) -> Plan:
    """Parse the options.

    Raises:
        OutpaceError: unknown suite, drafter or objective, or a path that cannot be written.
    """
    if not math.isfinite(budget):
        raise OutpaceError(f"--budget must be a finite number of seconds, not {budget}")
    if out.exists():
        read_profiles(out)  # refuses to overwrite another kind of file
    for file in (out, beside(out)):
        check_out(file, overwrite=True)
    goal = Goal(objective, batches)
    specs = tuple(spec for spec in split_drafters(drafters) if spec != BASELINE)
    for spec in specs:
        load_drafter(spec)
    prompts = load_together(suite, data)
    shuffled = list(prompts.items)
    random.Random(settings.seed).shuffle(shuffled)  # so that the first are like the others
    suited = replace(prompts, items=tuple(shuffled))
    return Plan(suited, limit, specs, goal, settings, budget, out, check)


@dataclass
class Found:
    """Result of tuning.

    Attributes:
        unseen: the prompts held back for verifying, if requested.
        saved: whether the profile was written.
        verified: the choice's measurement on the held-back prompts; None before that.
        broken: whether outputs promised to equal plain decoding's differ there.
    """

    tuned: Tuned
    profile: Profile
    unseen: Suite | None
    saved: bool = False
    verified: Row | None = None
    broken: bool = False

    @property
    def whole(self) -> bool:
        """True if everything requested was done."""
        return self.saved and (self.unseen is None or self.verified is not None)


def run(chosen: Plan, model: Loaded) -> Found | None:
    """Tune; return None if interrupted.

    Raises:
        OutpaceError: nothing could be measured, or there are too few prompts.
    """
    fits = fitting(model, chosen.suite, chosen.settings.max_new_tokens)
    if fits.left_out:
        screen.note(f"{fits.name}: {counted(fits.left_out)} left out, too long for the model or missing")
    seen, unseen = _apart(fits.first(chosen.limit), chosen)
    with Interrupt() as interrupt, bar(max(1, round(chosen.budget)), "seconds") as progress:
        clock = _Seconds(progress, round(chosen.budget))
        tuned = tune(
            model,
            chosen.specs,
            seen,
            chosen.goal,
            chosen.settings,
            chosen.budget,
            clock.report,
            lambda: interrupt.raised,
        )
    return None if tuned is None else Found(tuned, _profile(tuned, chosen), unseen)


def finish(found: Found, chosen: Plan, model: Loaded) -> None:
    """Write the profile, and verify it if requested and not interrupted.

    Raises:
        OutpaceError: the profile cannot be written, or the choice fails on the other prompts.
    """
    save_profile(chosen.out, model.target, found.profile)
    found.saved = True
    if found.unseen is not None:
        with Interrupt() as interrupt, screen.busy("verifying on other prompts ..."):
            found.verified = verify(
                model, found.tuned.way, found.unseen, chosen.goal, chosen.settings, lambda: interrupt.raised
            )
    found.broken = found.verified is not None and found.verified.breaks_promise(model.target.promise)


def _apart(suite: Suite, chosen: Plan) -> tuple[Suite, Suite | None]:
    """The prompts to tune on, and those held back for verifying."""
    if not chosen.verify:
        return suite, None
    least = max(chosen.goal.batches)
    count = max(least, len(suite.items) // _HELD_OUT)
    if len(suite.items) < 2 * count:
        raise OutpaceError(
            f"--verify needs prompts that were not tuned on, but {suite.name} has {len(suite.items)} that "
            f"fit; give at least {2 * least}, or leave --verify out"
        )
    return replace(suite, items=suite.items[count:]), replace(suite, items=suite.items[:count])


class _Seconds:
    """A bar that advances with time."""

    def __init__(self, progress: Bar, total: int) -> None:
        self._bar = progress
        self._total = total
        self._began = time.perf_counter()
        self._shown = 0
        self._note = ""

    def report(self, text: str) -> None:
        self._note = text or self._note
        now = min(self._total, int(time.perf_counter() - self._began))
        if now > self._shown:
            self._bar.advance(self._note, now - self._shown)
            self._shown = now
        elif text:
            self._bar.note(text)


def _profile(tuned: Tuned, chosen: Plan) -> Profile:
    row = tuned.row
    return Profile(
        drafter=tuned.way.spec,
        objective=chosen.goal.objective,
        batch=tuned.way.batch,
        tokens_per_second=_speed(row).tokens_per_second,
        speedup=_speed(row).speedup,
        mean_accepted_length=row.tau or 0.0,
        prompts=row.prompts,
        suite=chosen.suite.name,
        outpace=__version__,
        costs={
            "verify": {
                str(batch): [[batch * rows, seconds] for rows, seconds in by_rows.items()]
                for batch, by_rows in tuned.steps.items()
            }
        },
    )


def _speed(row: Row) -> Speed:
    """The speed of a row that did not fail."""
    assert row.speed is not None
    return row.speed


# -- showing ---------------------------------------------------------------------------------------------


def as_json(found: Found, chosen: Plan) -> dict[str, Any]:
    """The result as JSON values."""
    tuned, checked = found.tuned, found.verified
    return {
        "profile": asdict(found.profile),
        "out": str(chosen.out) if found.saved else None,
        "whole": found.whole,
        "expected": _figures(tuned.row),
        "verified": None if checked is None else _figures(checked),
        "as_expected": None
        if checked is None
        else overlap(_speed(tuned.row).interval, _speed(checked).interval),
        "differences": [] if checked is None else [asdict(one) for one in checked.differences],
        "broken": found.broken,
        "candidates": [{"name": str(way), **_figures(row)} for way, row in _ranked(tuned)],
        "left_out": [str(way) for way in tuned.left_out],
        "seconds": tuned.seconds,
    }


def _figures(row: Row) -> dict[str, Any]:
    speed = row.speed
    return {
        "tokens_per_second": speed and speed.tokens_per_second,
        "speedup": speed and speed.speedup,
        "interval": speed and speed.interval,
        "tau": row.tau,
        "prompts": row.prompts,
        "equal": row.outputs - row.different,
        "outputs": row.outputs,
        "failed": row.error,
    }


def _ranked(tuned: Tuned) -> list[tuple[Way, Row]]:
    """The candidates: those measured longest first, then by speed; failed ones last."""

    def order(one: tuple[Way, Row]) -> tuple[bool, int, float]:
        row = one[1]
        return row.speed is None, -row.prompts, -row.speed.tokens_per_second if row.speed else 0.0

    return sorted(tuned.rows.items(), key=order)


def table(found: Found) -> Table:
    """Table of the candidates that were measured longest."""
    tuned = found.tuned
    made = Table(title=f"{len(tuned.rows)} candidates, {tuned.seconds:.0f} s", title_justify="left")
    for name in ("drafter", "prompts", "tau", "tokens/s"):
        made.add_column(name, justify="left" if name == "drafter" else "right")
    for place, (way, row) in enumerate(_ranked(tuned)):
        if row.speed is not None and (place < _SHOWN or way.spec == BASELINE):
            style = "bold green" if way == tuned.way else ""
            speed = number(row.speed.tokens_per_second, 1)
            made.add_row(str(way), str(row.prompts), number(row.tau), speed, style=style)
    return made


def show(found: Found, chosen: Plan, console: Console) -> None:
    """Print the table and the lines below it."""
    console.print(table(found))
    for line in lines(found, chosen):
        console.print(Text(line), soft_wrap=True)


def lines(found: Found, chosen: Plan) -> list[str]:
    """Lines: the choice, its expected speed, failures, and the result of verifying."""
    tuned, speed = found.tuned, _speed(found.tuned.row)
    each = "" if chosen.goal.objective == "throughput" else " for each prompt"
    said = [f"fastest: {tuned.way}"]
    if tuned.way.spec == BASELINE:
        said[0] += ", plain decoding: no drafter paid here"
    said.append(
        f"expected: {speed.tokens_per_second:.1f} tokens/s{each}, {_times(speed)} as fast as plain decoding"
    )
    if tuned.left_out:
        said.append(f"left out, too wide to pay: {', '.join(map(str, tuned.left_out))}")
    said += [f"failed: {way}: {row.error}" for way, row in tuned.rows.items() if row.error is not None]
    if found.verified is not None:
        said += _verified(found.verified, speed, each, found.broken)
    elif found.unseen is not None:
        said.append("not verified")
    said.append(f"profile: {chosen.out}" if found.saved else "no profile was written")
    return said


def _verified(checked: Row, expected: Speed, each: str, broken: bool) -> list[str]:
    """Lines about the choice on held-back prompts: speed, and outputs that differ from plain decoding's."""
    speed = _speed(checked)
    verdict = {
        True: "as expected",
        False: "not as expected",
        None: f"too few to compare with the expected speed: at least {LEAST_GROUPS} groups are needed",
    }
    said = [
        f"verified on {checked.prompts} other prompts: {speed.tokens_per_second:.1f} tokens/s{each}, "
        f"{_times(speed)}, {checked.outputs - checked.different} of {checked.outputs} outputs equal to plain "
        f"decoding's; {verdict[overlap(expected.interval, speed.interval)]}"
    ]
    said += [f"  {described(one)}" for one in checked.differences]
    if checked.differences and not broken:
        said.append("  no promise is broken: in float32 a near-tie may flip, in smaller dtypes any token")
    return said


def _times(speed: Speed) -> str:
    text = f"{speed.speedup:.2f} times"
    return text if speed.interval is None else f"{text} ({speed.interval[0]:.2f} to {speed.interval[1]:.2f})"
