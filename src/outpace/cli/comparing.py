"""Plain and accelerated decoding of the same prompts, measured in turns: ``generate --compare``."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outpace.cli import screen
from outpace.cli.interrupt import Interrupt
from outpace.cli.progress import bar
from outpace.cli.running import Job, rate, run_one, stats_json
from outpace.cli.writer import ResultWriter
from outpace.core import Generation, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded

_WARM_UP_TOKENS = 8


@dataclass
class Side:
    """One way of decoding a prompt, its answer, and the seconds of each repeat."""

    engine: Engine
    generation: Generation | None = None
    seconds: list[float] = field(default_factory=list)
    repeatable: bool = True

    def run(self, job: Job, params: SamplingParams, interrupt: Interrupt) -> None:
        references = job.references_for(self.engine)
        found = run_one(self.engine, job.parts(self.engine.target), params, interrupt, references=references)
        if found.finish_reason == "removed":
            return
        if self.generation is not None and found.tokens != self.generation.tokens:
            self.repeatable = False
        self.generation = self.generation or found
        self.seconds.append(found.stats.seconds)

    @property
    def answer(self) -> Generation:
        assert self.generation is not None
        return self.generation

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def json(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "tokens": answer.tokens,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "tokens_per_second": rate(len(answer.tokens), self.median),
            "stats": stats_json(answer.stats),
        }


@dataclass(frozen=True)
class Divergence:
    """The first place where two outputs differ; a token is None if that output has ended.

    ``margin`` is the difference in log probability of the model's two best tokens there, if greedy.
    """

    index: int
    plain: int | None
    other: int | None
    plain_text: str
    other_text: str
    margin: float | None

    def __str__(self) -> str:
        text = f"token {self.index + 1} is {self.plain_text} plainly and {self.other_text} accelerated"
        if self.margin is not None:
            text += f"; the two best tokens there are {self.margin:.2g} apart in log probability"
        return text


@dataclass(frozen=True)
class Comparison:
    """Both sides of one prompt.

    Attributes:
        promised: whether equal tokens are promised.
    """

    job: Job
    plain: Side
    other: Side
    promised: bool
    difference: Divergence | None

    @property
    def equal(self) -> bool:
        return self.difference is None and self.plain.repeatable and self.other.repeatable

    @property
    def ratio(self) -> float:
        return self.plain.median / self.other.median if self.other.median > 0 else 0.0

    def json(self) -> dict[str, Any]:
        different = self.difference
        return {
            "index": self.job.index,
            "prompt": self.job.prompt.text,
            "equal": self.equal,
            "equality_promised": self.promised,
            "promise": self.other.answer.stats.promise,
            "why_inexact": self.other.answer.stats.why_inexact,
            "first_difference": None if different is None else dict(vars(different)),
            "verifier": str(self.other.engine.verifier),
            "lossy": self.other.engine.verifier.lossy,
            "seed": self.plain.answer.seed,
            "speed_ratio": self.ratio,
            "plain": self.plain.json(),
            "accelerated": self.other.json(),
        }


def first_difference(
    model: Loaded, job: Job, plain: Generation, other: Generation, greedy: bool
) -> Divergence | None:
    """The first place where two outputs of a prompt differ; None if they are equal."""
    from outpace.targets.ties import margin, parting

    index = parting(plain.tokens, other.tokens)
    if index is None:
        return None
    a, b = (tokens[index] if index < len(tokens) else None for tokens in (plain.tokens, other.tokens))
    texts = ["the end" if token is None else repr(model.tokenizer.decode([token])) for token in (a, b)]
    apart = None
    if greedy and a is not None:
        prompt, source = job.parts(model.target)
        apart = margin(model.target, [*prompt, *plain.tokens[:index]], source)
    return Divergence(index, a, b, texts[0], texts[1], apart)


def compare(
    model: Loaded,
    engines: tuple[Engine, Engine],
    job: Job,
    params: SamplingParams,
    repeats: int,
    interrupt: Interrupt,
) -> Comparison | None:
    """Decode a prompt plainly and accelerated in turns, in the opposite order in every second repeat.

    None if interrupted before both sides were measured once.
    """
    if params.seed is None and not params.greedy:
        params = replace(params, seed=secrets.randbits(64))
    plain, other = Side(engines[0]), Side(engines[1])
    for repeat in range(repeats):
        for side in (plain, other) if repeat % 2 == 0 else (other, plain):
            if not interrupt.raised:
                side.run(job, params, interrupt)
    if plain.generation is None or other.generation is None:
        return None
    different = first_difference(model, job, plain.generation, other.generation, params.greedy)
    return Comparison(job, plain, other, promises(engines[1], params), different)


def promises(engine: Engine, params: SamplingParams) -> bool:
    """True if an engine promises the tokens of plain decoding, not only the distribution or less."""
    return engine.verifier.keeps_tokens(params.greedy) and engine.target.promise != "not exact"


def warm_up(engines: Seq[Engine], job: Job, params: SamplingParams, interrupt: Interrupt) -> None:
    """Decode a few tokens with each engine, since the first forwards of a process are slower."""
    short = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
    for engine in engines:
        run_one(engine, job.parts(engine.target), short, interrupt, references=job.references_for(engine))


def compare_all(
    model: Loaded,
    engine: Engine,
    label: str,
    jobs: Seq[Job],
    params: SamplingParams,
    repeats: int,
    writer: ResultWriter,
) -> tuple[bool, bool]:
    """Compare an engine with plain decoding on each prompt: JSON lines as they come, or a report at the end.

    Returns:
        Whether the run was complete, and whether outputs are equal that were promised to be.
    """
    found: list[Comparison] = []
    engines = model.engine(), engine
    with Interrupt() as interrupt, bar(len(jobs), "comparing") as progress:
        warm_up(engines, jobs[0], params, interrupt)
        for job in jobs:
            one = compare(model, engines, job, params, repeats, interrupt)
            if one is not None:
                found.append(one)
                if writer.as_json:
                    writer.json(one.json())
            if interrupt.raised:
                break
            progress.advance("" if one is None else f"{one.ratio:.2f} times as fast")
    if found and not writer.as_json:
        report(found, label, writer)
    return not interrupt.raised, not any(one.promised and not one.equal for one in found)


# -- the report ------------------------------------------------------------------------------------------


def report(found: Seq[Comparison], label: str, writer: ResultWriter) -> None:
    if len(found) == 1:
        writer.write((found[0].other.answer.text or "") + "\n")
    console = screen.out()
    console.print(screen.fitting(_table(found, label), console))
    for line in verdict(found):
        screen.write(line + "\n")


def _table(found: Seq[Comparison], label: str) -> Table:
    """Table of sums over the prompts: tokens, steps and median seconds."""
    table = Table("", "plain", label, title=None)
    for column in table.columns[1:]:
        column.justify = "right"
        column.overflow = "fold"
    sides = [[one.plain for one in found], [one.other for one in found]]
    tokens = [sum(len(side.answer.tokens) for side in group) for group in sides]
    steps = [sum(side.answer.stats.steps for side in group) for group in sides]
    seconds = [sum(side.median for side in group) for group in sides]
    both = (0, 1)
    if len(found) > 1:
        table.add_row("prompts", *(str(len(group)) for group in sides))
    table.add_row("tokens", *(str(tokens[i]) for i in both))
    table.add_row("steps", *(str(steps[i]) for i in both))
    table.add_row("tokens per step (tau)", *(f"{tokens[i] / max(steps[i], 1):.2f}" for i in both))
    table.add_row("seconds (median)", *(f"{seconds[i]:.3f}" for i in both))
    table.add_row("tokens per second", *(f"{rate(tokens[i], seconds[i]):.1f}" for i in both))
    table.add_row("speed", "1.00", f"{rate(1, seconds[1]) * seconds[0]:.2f}")
    return table


def verdict(found: Seq[Comparison]) -> list[str]:
    """Lines that report whether the outputs are equal, and if not, where they differ."""
    unequal = [one for one in found if not one.equal]
    if not unequal:
        return ["equal: yes" if len(found) == 1 else f"equal: yes, all {len(found)} prompts"]
    lines = [f"equal: no, {len(unequal)} of {len(found)} prompts differ" if len(found) > 1 else "equal: no"]
    for one in unequal[:10]:
        what = str(one.difference) if one.difference else "repeats of the same decoding differ"
        lines.append("  " + one.job.prompt.where(what))
    if not all(one.promised for one in unequal):
        lines.append(f"  ({kept(found[0].other.engine)})")
    return lines


def kept(engine: Engine) -> str:
    """The guarantee of an engine that may change tokens, as text."""
    if engine.verifier.lossy:
        return f"the verifier {engine.verifier} changes the distribution of the output"
    if engine.verifier.invariant:
        return f"not exact with this model, where near-ties may flip: {engine.target.why_inexact}"
    return f"the verifier {engine.verifier} preserves the distribution of the output, not its tokens"
