"""``outpace generate``: results to a writer, remarks to standard error."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from outpace.cli import screen
from outpace.cli.comparing import compare_all, failed, report
from outpace.cli.interrupt import Interrupt
from outpace.cli.progress import bar
from outpace.cli.running import Job, Total, generation_json, lossy_note, rate, run_many, run_one, stats_line
from outpace.cli.writer import Writer
from outpace.core import Generation, SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.sequence import Sequence


def generate_one(engine: Engine, job: Job, params: SamplingParams, writer: Writer) -> bool:
    """Decode one prompt; its text streams. False if it was interrupted."""
    with Interrupt() as interrupt:
        if writer.as_json:
            with screen.busy("decoding ..."):
                generation = run_one(engine, job.ids, params, interrupt, references=job.references)
            writer.json(generation_json(job, generation, engine.verifier))
        else:
            try:
                generation = run_one(engine, job.ids, params, interrupt, writer.write, job.references)
            except BaseException:
                if writer.started:
                    writer.write("\n")  # the message begins a line of its own
                raise
            writer.write("\n")
    line = stats_line(generation.stats) + lossy_note(engine.verifier)
    if generation.finish_reason == "length" and len(generation.tokens) < params.max_new_tokens:
        line += "; stopped because the model's context is full"
    screen.note(line)
    return not interrupt.raised


def generate_many(engine: Engine, jobs: Seq[Job], params: SamplingParams, batch: int, writer: Writer) -> bool:
    """Decode several prompts; each is written as it finishes. False if the run was interrupted."""
    total = Total()
    began = time.perf_counter()
    with Interrupt() as interrupt, bar(len(jobs), "prompts") as progress:

        def speed() -> str:
            tokens = total.tokens + sum(s.stats.tokens for s in engine.sequences)
            return f"{rate(tokens, time.perf_counter() - began):.1f} tokens/s"

        def finished(job: Job, generation: Generation) -> None:
            total.add(generation.stats)
            if writer.as_json:
                writer.json(generation_json(job, generation, engine.verifier))
            else:
                writer.write(_titled(job, generation))
            progress.advance(speed())

        def stepped(sequences: list[Sequence]) -> None:
            progress.note(speed())

        run_many(engine, jobs, params, batch, interrupt, finished, stepped)
    seconds = time.perf_counter() - began
    screen.note(
        f"{total.prompts} of {len(jobs)} prompts, {total.tokens} tokens, {total.tau:.2f} per step, "
        f"{rate(total.tokens, seconds):.1f} tokens/s, {seconds:.2f} s{lossy_note(engine.verifier)}"
    )
    return not interrupt.raised


def _titled(job: Job, generation: Generation) -> str:
    """A result as text, under the line it belongs to."""
    place = f"prompt {job.index + 1}" if job.prompt.line is None else f"line {job.prompt.line}"
    return f"== {place} ==\n{(generation.text or '').strip()}\n\n"


def compare(
    model: Loaded,
    engine: Engine,
    label: str,
    jobs: Seq[Job],
    params: SamplingParams,
    repeats: int,
    writer: Writer,
) -> tuple[bool, bool]:
    """Compare an engine with plain decoding; whether the run was whole, and whether outputs are equal."""
    found, whole = compare_all(model, (model.engine(), engine), jobs, params, repeats, writer)
    if found and not writer.as_json:
        report(found, label, writer)
    return whole, not failed(found)
