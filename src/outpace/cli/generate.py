"""``outpace generate``: decode prompts; results go to a file or standard output, notes to standard error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import options as o
from outpace.cli import prompts, screen
from outpace.cli.app import app, finish, guarded
from outpace.cli.comparing import compare_all
from outpace.cli.encoder_decoder import AudioOptions, check_audio, spoken, with_own_rules
from outpace.cli.given import DraftingOptions, ModelOptions, PlaceOptions, StepOptions, taking
from outpace.cli.interrupt import Interrupt
from outpace.cli.observing import attached, engine_of, observer_of
from outpace.cli.parts import labelled, profiled, sampling
from outpace.cli.place import note_traffic
from outpace.cli.progress import bar
from outpace.cli.running import (
    Job,
    RunningTotal,
    counted,
    cut_note,
    exactness_note,
    generation_json,
    prepare,
    rate,
    run_many,
    run_one,
    stats_line,
)
from outpace.cli.writer import ResultWriter
from outpace.core import Generation, OutpaceError, SamplingParams, StructuredOutputs, need
from outpace.files import check_plain

_KINDS = ("json", "regex", "grammar", "choice")
_LONG = 200  # characters; a longer value is no file's name


def constraint_of(given: Seq[str]) -> StructuredOutputs | None:
    """The constraint that options name; None for none.

    Raises:
        OutpaceError: a kind is unknown, or there are two of them.
    """
    found: dict[str, Any] = {}
    for one in given:
        kind, equals, value = one.partition("=")
        if kind not in _KINDS or not equals or not value:
            raise OutpaceError(
                f"--constrain takes KIND=VALUE, with a kind of {', '.join(_KINDS)}; not {one!r}"
            )
        if kind == "choice":
            found.setdefault(kind, []).append(value)
        elif kind in found:
            raise OutpaceError(f"--constrain has two values of {kind}; leave one out")
        else:
            found[kind] = _text_or_file(value)
    if not found:
        return None
    need("serve", "--constrain")
    return StructuredOutputs(**found)


def _text_or_file(value: str) -> str:
    """A file's text without its last line break, or the value itself."""
    if len(value) > _LONG or "\n" in value or not Path(value).is_file():
        return value
    check_plain(Path(value))
    try:
        return Path(value).read_text("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OutpaceError(f"{value} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise OutpaceError(f"cannot read {value}: {error.strerror}") from None


if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.sequence import Sequence

PresencePenalty = Annotated[
    float,
    o.sampling_option(
        "--presence-penalty", metavar="X", help="Subtracted once from the logit of each token in the output."
    ),
]
FrequencyPenalty = Annotated[
    float,
    o.sampling_option(
        "--frequency-penalty",
        metavar="X",
        help="Subtracted from a token's logit once per occurrence in the output.",
    ),
]
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="A text file, or a .jsonl of prompts: strings, or objects with prompt, question or turns.",
    ),
]
Reference = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        "-r",
        metavar="FILE",
        help="Text file that the output may repeat, for --drafter reference; repeatable. "
        "(In a .jsonl: a list of texts, references.)",
    ),
]
InTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put each prompt into the model's chat template, or continue its text. Default: the template if "
        "there is one.",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", metavar="N", help="Prompts decoded together.", min=1)]
Stop = Annotated[
    list[str] | None,
    o.sampling_option("--stop", metavar="TEXT", help="Text that ends the output; repeatable."),
]
Constrain = Annotated[
    list[str] | None,
    o.sampling_option(
        "--constrain",
        metavar="KIND=VALUE",
        help="Constrain the text: json=SCHEMA, regex=PATTERN or grammar=GBNF, of which each may be a file's "
        "name; or choice=TEXT, repeatable.",
    ),
]
IgnoreEos = Annotated[bool, o.sampling_option("--ignore-eos", help="Continue after an end token.")]
Logprobs = Annotated[
    int | None,
    o.output_option(
        "--logprobs", metavar="N", help="With --json: log probabilities of each token and of N alternatives."
    ),
]
Out = Annotated[
    Path | None, o.output_option("--out", "-o", metavar="PATH", help="Write results to this file.")
]
Compare = Annotated[
    bool, o.output_option("--compare", help="Decode plainly too, in turns: equality and both speeds.")
]
Repeats = Annotated[
    int, o.output_option("--repeats", metavar="N", help="With --compare: report medians of N runs.", min=1)
]


@dataclass(frozen=True, kw_only=True)
class PromptOptions(AudioOptions):
    """What is decoded."""

    prompt: Prompt = None
    file: PromptFile = None
    reference: Reference = None
    chat: InTemplate = None
    batch: Batch = 1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, and what ends an output."""

    max_new_tokens: o.MaxNewTokens = 128
    temperature: o.Temperature = 0.0
    top_k: o.TopK = 0
    top_p: o.TopP = 1.0
    min_p: o.MinP = 0.0
    repetition_penalty: o.RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    seed: o.Seed = None
    stop: Stop = None
    constrain: Constrain = None
    ignore_eos: IgnoreEos = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where results go."""

    logprobs: Logprobs = None
    as_json: o.AsJson = False
    out: Out = None
    overwrite: o.Overwrite = False
    compare: Compare = False
    repeats: Repeats = 3


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(
    PromptOptions, ModelOptions, DraftingOptions, PlaceOptions, StepOptions, SamplingOptions, ReportOptions
):
    """The options of ``outpace generate``."""

    def params(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            OutpaceError: options are invalid, or at odds with each other.
        """
        check_audio(self, prompt=self.prompt, file=self.file, reference=self.reference, chat=self.chat)
        if self.compare and self.observer:
            raise OutpaceError(
                "--compare decodes each prompt several times, and an observer would have seen it before; "
                "leave one of --compare and --observer out"
            )
        if self.compare and self.batch > 1:
            raise OutpaceError("--compare measures one prompt at a time; leave --batch out")
        if self.compare and self.logprobs is not None:
            raise OutpaceError("--compare reports no --logprobs; leave one of them out")
        if self.logprobs is not None and not self.as_json:
            raise OutpaceError("--logprobs are reported in JSON only; add --json")
        named = {name: own for name, own in vars(self).items() if name in SamplingParams.__dataclass_fields__}
        constraint = constraint_of(self.constrain or ())
        return sampling(**{**named, "stop": self.stop or (), "structured_outputs": constraint})


@app.command(epilog='Example: outpace generate --prompt "The quick brown" --compare')
@guarded
@taking(GenerateOptions)
def generate(given: GenerateOptions) -> None:
    """Decode a prompt from --prompt, a file or standard input, or many from a JSONL file, or audio.

    Text goes to standard output, statistics to standard error; --compare ends with 1 if outputs differ."""
    params, watching = given.params(), observer_of(given.observer, given.parallel)
    source = given.source(
        given.model,
        seq2seq="audio" if given.audio else True,
        place=given.place(given.model),
        options=given.steps(),
        releases=not given.observer,
    )
    found = [] if given.audio else prompts.read(given.prompt, given.file, given.reference or ())
    copied, together = any(one.references for one in found), min(given.batch, len(given.audio or found))
    with contextlib.closing(ResultWriter(given.out, given.as_json, given.overwrite)) as writer:
        loaded, chosen = profiled(source, given.drafter, given.profile, given.verifier, copied, (together,))
        jobs = spoken(given, loaded) if given.audio else prepare(found, loaded, given.chat)
        with attached(watching, loaded, chosen.spec) as learner:
            engine = engine_of(loaded, chosen.drafter, given.verifier, together, given.adaptive, learner)
            ended = decode(
                loaded, engine, chosen.spec, jobs, with_own_rules(params, loaded, jobs), given, writer
            )
            note_traffic(engine)
    finish(*ended)


def generate_one(engine: Engine, job: Job, params: SamplingParams, writer: ResultWriter) -> bool:
    """Decode one prompt and stream its text. Return False if it was interrupted."""
    parts = job.parts(engine.target)
    with Interrupt() as interrupt:
        if writer.as_json:
            with screen.busy("decoding ..."):
                generation = run_one(engine, parts, params, interrupt, references=job.references)
            writer.json(generation_json(job, generation, engine))
        else:
            try:
                with screen.busy("reading the prompt ...") as read:

                    def show(text: str) -> None:
                        read()
                        writer.write(text)

                    generation = run_one(engine, parts, params, interrupt, show, job.references)
            except BaseException:
                if writer.started:
                    writer.write("\n")  # so that the message begins a new line
                raise
            writer.write("\n")
    cut = cut_note(generation, params)
    screen.note(stats_line(generation.stats) + exactness_note(engine, params.greedy) + (cut and f"; {cut}"))
    return not interrupt.raised


def decode(
    loaded: Loaded,
    engine: Engine,
    spec: str,
    jobs: Seq[Job],
    params: SamplingParams,
    given: GenerateOptions,
    writer: ResultWriter,
) -> tuple[bool, bool]:
    """Decode all prompts.

    Returns:
        Whether the run was complete, and whether outputs are equal that were promised to be.
    """
    if given.compare:
        return compare_all(loaded, engine, labelled(spec, engine), jobs, params, given.repeats, writer)
    if prompts.is_list(given.file) or len(jobs) > 1:  # even one in a file of prompts has a title
        return generate_many(engine, jobs, params, given.batch, writer), True
    return generate_one(engine, jobs[0], params, writer), True


def generate_many(
    engine: Engine, jobs: Seq[Job], params: SamplingParams, batch: int, writer: ResultWriter
) -> bool:
    """Decode several prompts and write each as it finishes. Return False if the run was interrupted."""
    total = RunningTotal()
    began = time.perf_counter()
    with Interrupt() as interrupt, bar(len(jobs), "prompts") as progress:

        def speed() -> str:
            tokens = total.tokens + sum(s.stats.tokens for s in engine.sequences)
            return f"{rate(tokens, time.perf_counter() - began):.1f} tokens/s"

        def finished(job: Job, generation: Generation) -> None:
            total.add(generation)
            if writer.as_json:
                writer.json(generation_json(job, generation, engine))
            else:
                writer.write(_titled(job, generation))
            progress.advance(speed())

        def stepped(sequences: list[Sequence]) -> None:
            progress.note(speed())

        run_many(engine, jobs, params, batch, interrupt, finished, stepped)
    seconds = time.perf_counter() - began
    screen.note(
        f"{total.prompts} of {counted(len(jobs), 'prompt')}, {counted(total.tokens, 'token')}, "
        f"{total.tau:.2f} per step, {rate(total.tokens, seconds):.1f} tokens/s, {seconds:.2f} s"
        + f"; {total.cut} cut at --max-new-tokens {params.max_new_tokens}" * bool(total.cut)
        + exactness_note(engine, params.greedy)
    )
    return not interrupt.raised


def _titled(job: Job, generation: Generation) -> str:
    """A result as text, under the number of its prompt or line."""
    place = f"prompt {job.index + 1}" if job.prompt.line is None else f"line {job.prompt.line}"
    return f"== {place} ==\n{(generation.text or '').strip()}\n\n"
