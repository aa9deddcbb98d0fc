"""Decoding one prompt or many, step by step, and results as JSON or as a line."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outpace.cli.interrupt import Interrupt
from outpace.cli.prompts import Prompt
from outpace.core import Generation, OutpaceError, SamplingParams, Stats

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.sequence import Sequence
    from outpace.verify import Verifier


@dataclass(frozen=True)
class Job:
    """A prompt ready to be decoded, and texts that its output may repeat; ``index`` counts from 0."""

    index: int
    prompt: Prompt
    ids: list[int]
    references: Seq[Seq[int]] = ()

    def references_for(self, engine: Engine) -> Seq[Seq[int]]:
        """The references, for an engine whose drafter reads any. (Plain decoding needs none.)"""
        return self.references if engine.drafter.reads_references else ()


@dataclass
class Total:
    """Totals of a run of several prompts so far."""

    prompts: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, stats: Stats) -> None:
        self.prompts += 1
        self.tokens += stats.tokens
        self.steps += stats.steps

    @property
    def tau(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


def prepare(prompts: Seq[Prompt], model: Loaded, chat: bool) -> list[Job]:
    """Tokenise every prompt before any is decoded.

    Raises:
        OutpaceError: one is empty or too long; the message names its line.
    """
    jobs = []
    for index, prompt in enumerate(prompts):
        try:
            references = [model.plain_tokens(text) for text in prompt.references]
            jobs.append(Job(index, prompt, model.encode(prompt.text, chat), references))
        except OutpaceError as error:
            raise type(error)(prompt.where(str(error))) from None
    return jobs


# -- running ---------------------------------------------------------------------------------------------


def run_one(
    engine: Engine,
    ids: Seq[int],
    params: SamplingParams,
    interrupt: Interrupt,
    show: Callable[[str], None] = lambda text: None,
    references: Seq[Seq[int]] = (),
) -> Generation:
    """Decode one prompt, step by step, handing text to ``show`` as it is accepted.

    An interrupt ends it with the finish reason ``removed`` and what has been decoded.
    """
    sequence = engine.add(ids, params, references=references)
    try:
        while sequence.finish_reason is None and not interrupt.raised:
            engine.step()
            sequence.check()
            _show(sequence, show)
    finally:
        engine.remove(sequence)
    sequence.check()
    _show(sequence, show)
    return sequence.generation()


def _show(sequence: Sequence, show: Callable[[str], None]) -> None:
    if sequence.text is not None:
        piece = sequence.text.release(final=sequence.finish_reason is not None)
        if piece:
            show(piece)


def run_many(
    engine: Engine,
    jobs: Seq[Job],
    params: SamplingParams,
    batch: int,
    interrupt: Interrupt,
    finished: Callable[[Job, Generation], None],
    stepped: Callable[[list[Sequence]], None] = lambda sequences: None,
) -> None:
    """Decode jobs, up to ``batch`` at a time; one joins as soon as another has ended."""
    waiting = list(jobs)[::-1]
    running: list[tuple[Job, Sequence]] = []
    try:
        while not interrupt.raised:
            while waiting and len(running) < batch:
                job = waiting.pop()
                running.append((job, engine.add(job.ids, params, references=job.references)))
            if not running:
                return
            stepped(engine.step())
            ended = [entry for entry in running if entry[1].finish_reason is not None]
            running = [entry for entry in running if entry[1].finish_reason is None]
            for job, sequence in ended:
                sequence.check()
                finished(job, sequence.generation())
    finally:
        for _, sequence in running:
            engine.remove(sequence)


# -- results as JSON -------------------------------------------------------------------------------------


def stats_json(stats: Stats) -> dict[str, Any]:
    """The raw counts, and the ratios people ask for."""
    return {
        **asdict(stats),
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "seconds": stats.seconds,
        "tokens_per_second": rate(stats.tokens, stats.seconds),
    }


def generation_json(job: Job, generation: Generation, verifier: Verifier) -> dict[str, Any]:
    """One prompt's result."""
    interrupted = generation.finish_reason == "removed"
    found: dict[str, Any] = {
        "index": job.index,
        "prompt": job.prompt.text,
        "tokens": generation.tokens,
        "text": generation.text,
        "finish_reason": "interrupted" if interrupted else generation.finish_reason,
        "seed": generation.seed,
        "verifier": str(verifier),
        "stats": stats_json(generation.stats),
    }
    if generation.logprobs is not None:
        found["logprobs"] = [asdict(entry) for entry in generation.logprobs]
    return found


def rate(tokens: int, seconds: float) -> float:
    """Tokens per second."""
    return tokens / seconds if seconds > 0 else 0.0


def lossy_note(verifier: Verifier) -> str:
    """Remark on an output that is not the target's; empty for an exact verifier."""
    return f"; not the model's own output: {verifier}" if verifier.lossy else ""


def stats_line(stats: Stats) -> str:
    """One line about a generation."""
    speed = rate(stats.tokens, stats.seconds)
    return (
        f"{stats.tokens} tokens in {stats.steps} steps, {stats.mean_accepted_length:.2f} per step, "
        f"{speed:.1f} tokens/s, {stats.seconds:.2f} s"
    )
