"""Decoding of one or many prompts, step by step, and results as JSON or as a line."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outpace.cli.interrupt import Interrupt
from outpace.cli.prompts import PromptLine
from outpace.core import Generation, OutpaceError, SamplingParams, Stats

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.sequence import Sequence
    from outpace.targets import TargetModel


@dataclass(frozen=True)
class Job:
    """A tokenised prompt, and texts that its output may repeat; ``index`` counts from 0.

    ``source`` is what the encoder reads, if that is not the prompt; ``ids`` then start the decoder's text.
    """

    index: int
    prompt: PromptLine
    ids: list[int]
    references: Seq[Seq[int]] = ()
    source: Any = None

    def parts(self, target: TargetModel) -> tuple[list[int], Any]:
        """The prompt and the source of its request."""
        return target.parts(self.ids) if self.source is None else (self.ids, self.source)

    def references_for(self, engine: Engine) -> Seq[Seq[int]]:
        """The references if the engine's drafter reads them, otherwise none."""
        return self.references if engine.drafter.reads_references else ()


@dataclass
class RunningTotal:
    """Running totals over several prompts."""

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    cut: int = 0

    def add(self, generation: Generation) -> None:
        stats = generation.stats
        self.prompts += 1
        self.cut += generation.finish_reason == "length"
        self.tokens += stats.tokens
        self.steps += stats.steps

    @property
    def tau(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


def prepare(prompts: Seq[PromptLine], model: Loaded, chat: bool | None) -> list[Job]:
    """Tokenise all prompts before any is decoded.

    Args:
        chat: whether they are turns in the chat template; None for yes if there is one.

    Raises:
        OutpaceError: one is empty or too long; the message names its line.
    """
    jobs = []
    chat = model.has_template and not model.target.has_encoder if chat is None else chat
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
    parts: tuple[list[int], Any],
    params: SamplingParams,
    interrupt: Interrupt,
    show: Callable[[str], None] = lambda text: None,
    references: Seq[Seq[int]] = (),
) -> Generation:
    """Decode one text, step by step, and pass text to ``show`` as it is emitted.

    ``parts`` are its prompt and its source. An interrupt ends it with the finish reason ``removed`` and
    the tokens decoded so far.
    """
    prompt, source = parts
    sequence = engine.add(prompt, params, references=references, source=source)
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
    """Decode jobs, up to ``batch`` at a time; the next joins as soon as one has ended."""
    waiting = list(jobs)[::-1]
    running: list[tuple[Job, Sequence]] = []
    try:
        while not interrupt.raised:
            while waiting and len(running) < batch:
                job = waiting.pop()
                prompt, source = job.parts(engine.target)
                sequence = engine.add(prompt, params, references=job.references, source=source)
                running.append((job, sequence))
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
    return {
        **asdict(stats),
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
        "seconds": stats.seconds,
        "tokens_per_second": rate(stats.tokens, stats.seconds),
    }


def generation_json(job: Job, generation: Generation, engine: Engine) -> dict[str, Any]:
    interrupted = generation.finish_reason == "removed"
    found: dict[str, Any] = {
        "index": job.index,
        "prompt": job.prompt.text,
        "tokens": generation.tokens,
        "text": generation.text,
        "finish_reason": "interrupted" if interrupted else generation.finish_reason,
        "seed": generation.seed,
        "verifier": str(engine.verifier),
        "stats": stats_json(generation.stats),
    }
    if generation.logprobs is not None:
        first = len(generation.tokens) - len(generation.logprobs)
        found["logprobs"] = [
            _logprob(engine, token, one.logprob)
            | {"top": [_logprob(engine, *other) for other in one.top.items()]}
            for token, one in zip(generation.tokens[first:], generation.logprobs, strict=True)
        ]
    return found


def _logprob(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    text = "" if engine.tokenizer is None else engine.tokenizer.decode([token])
    return {"token": token, "text": text, "logprob": logprob}


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def exactness_note(engine: Engine, greedy: bool) -> str:
    """Note on outputs that may not be plain decoding's; empty if this is promised, or nothing is."""
    verifier, target = engine.verifier, engine.target
    if verifier.lossy:
        return f"; not the model's own output: {verifier}"
    if verifier.keeps_tokens(greedy) and target.promise == "not exact":
        return f"; not exact, near-ties may flip: {target.why_inexact}"
    return ""


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def cut_note(generation: Generation, params: SamplingParams) -> str:
    """Note on an output that a limit has cut; empty if it ended by itself."""
    if generation.finish_reason != "length":
        return ""
    if len(generation.tokens) < params.max_new_tokens:
        return "cut: the model's context is full"
    return f"cut at {counted(params.max_new_tokens, 'token')} (--max-new-tokens)"


def stats_line(stats: Stats) -> str:
    speed = rate(stats.tokens, stats.seconds)
    return (
        f"{counted(stats.tokens, 'token')} in {counted(stats.steps, 'step')}, "
        f"{stats.mean_accepted_length:.2f} per step, {speed:.1f} tokens/s, {stats.seconds:.2f} s"
    )
