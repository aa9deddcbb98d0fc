"""The demo: plain and accelerated decoding of one prompt, side by side.

One machine runs both, so they take turns, and each has a clock that counts only its own seconds of prefill
and decoding. The one whose clock is behind runs next, so both have always used about the same time, and the
faster one is ahead on the screen. Drawing is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, finish, guarded
from outpace.cli.comparing import first_difference, kept, promises, warm_up
from outpace.cli.given import LoadingOptions, ModelOptions, taking
from outpace.cli.interrupt import Interrupt
from outpace.cli.observing import engine_of
from outpace.cli.parts import labelled, profiled, sampling
from outpace.cli.prompts import PromptLine
from outpace.cli.running import Job, rate
from outpace.core import OutpaceError, SamplingParams
from outpace.text import TextStream

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded

DrafterSpec = Annotated[str, o.drafter_option("--drafter", "-d", help=o.SPEC)]
Question = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt in place of the question.")
]
Once = Annotated[
    bool, typer.Option("--once", help="Print only the final state, for terminals that cannot be redrawn.")
]
Real = Annotated[
    bool,
    typer.Option(
        "--real", help="Use SmolLM2-135M-Instruct, which `outpace pull smollm2` fetches, as a chat model."
    ),
]

# On a CPU a wide forward costs more: the embedded model has a small window, others the default drafter.
DEMO_DRAFTER = "lookahead:window=4,ngram=4,guesses=4"


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ModelOptions, LoadingOptions):
    """The options of ``outpace demo``."""

    drafter: DrafterSpec = ""
    profile: o.ProfileFile = None
    prompt: Question = None
    once: Once = False
    real: Real = False
    max_new_tokens: o.MaxNewTokens = 128
    temperature: o.Temperature = 0.0
    seed: o.Seed = 0
    verifier: o.VerifierName = "match"
    adaptive: o.Adaptive = None


@app.command(epilog="Example: outpace demo --drafter lookahead:window=5,ngram=4")
@guarded
@taking(DemoOptions)
def demo(given: DemoOptions) -> None:
    """Race plain against accelerated decoding of one question, side by side.

    Both get the same share of time. Ends with exit code 1 if their outputs differ, unless the verifier does
    not promise equality.
    """
    params = sampling(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    model, prompt, drafter = given.model, given.prompt, given.drafter
    if prompt == "":
        raise OutpaceError("the prompt is empty; give --prompt TEXT, or leave it out for the demo's question")
    if given.profile is None:
        drafter = drafter or ("" if given.real or model else DEMO_DRAFTER)
    if given.real and model is not None:
        raise OutpaceError("--real names the model; leave --model out")
    if given.real:
        model, prompt = "smollm2", prompt or REAL_PROMPT
    loaded, chosen = profiled(given.source(model), drafter, given.profile, given.verifier)
    engines = (loaded.engine(), engine_of(loaded, chosen.drafter, given.verifier, 1, given.adaptive))
    label = labelled(chosen.spec, engines[1])
    console = screen.out()
    text = prompt or DEMO_PROMPT
    job = Job(0, PromptLine(text), loaded.encode(text, chat=given.real))
    console.print(heading(loaded, text, console))
    with Interrupt() as interrupt:
        with screen.busy("warming up ..."):
            warm_up(engines, job, params, interrupt)
        lanes = [
            Racer(name, engine, job.ids, params)
            for name, engine in zip(("plain", label), engines, strict=True)
        ]
        show(lanes, console, given.once, interrupt)
    for lane in lanes:
        lane.engine.remove(lane.sequence)
    if interrupt.raised:
        finish(False)
    line, equal = verdict(loaded, job, lanes)
    console.print(Text(line, style="bold green" if equal else "bold red"), soft_wrap=True)
    finish(True, equal)


DEMO_PROMPT = (
    "Question: A bakery fills 6 trays with 12 rolls each. It sells 45 rolls in the morning and half of the "
    "rest in the afternoon. Each roll costs 2 dollars. How many dollars does the bakery take in that day?\n"
    "Answer:"
)
REAL_PROMPT = (
    "Write a Python class Matrix with methods add, subtract, multiply and transpose. Check in each that the "
    "sizes fit."
)

# Steps alternate between these, so that neighbouring steps are distinguishable.
COLOURS = ("bold green", "bold magenta", "bold cyan")
_REDRAW_SECONDS = 1 / 15
_NARROW = 60  # below this many columns the panels are stacked
_ROWS_AROUND = 10  # rows of the screen around the panels' text


@dataclass(frozen=True)
class Piece:
    """The text of one token, and the step that accepted it as drafted; None if it is the target's own."""

    text: str
    step: int | None


class Racer:
    """One decoder in the race, with its clock and the text so far."""

    def __init__(self, label: str, engine: Engine, ids: Seq[int], params: SamplingParams) -> None:
        self.label = label
        self.engine = engine
        self.sequence = engine.add(ids, params)
        self.pieces: list[Piece] = []
        assert engine.tokenizer is not None
        self._text = TextStream(engine.tokenizer)

    @property
    def clock(self) -> float:
        """Seconds that this lane has used."""
        return self.sequence.stats.seconds

    @property
    def done(self) -> bool:
        return self.sequence.finish_reason is not None

    def advance(self) -> None:
        stats = self.sequence.stats
        tokens, accepted = stats.tokens, stats.accepted
        self.engine.step()
        self.sequence.check()
        new = self.sequence.output[tokens:]
        drafted = stats.accepted - accepted
        for place, token in enumerate(new):
            self._text.push(token)
            text = self._text.release(final=self.done and place == len(new) - 1)
            self.pieces.append(Piece(screen.printable(text), stats.steps if place < drafted else None))

    def text(self) -> Text:
        """The text, with drafted tokens in the colour of their step and the target's own uncoloured."""
        found = Text(no_wrap=False, overflow="fold")
        colour, last = -1, None
        for piece in self.pieces:
            if piece.step is not None and piece.step != last:
                colour, last = (colour + 1) % len(COLOURS), piece.step
            found.append(piece.text, COLOURS[colour] if piece.step is not None else "")
        if found.plain.startswith(" "):
            found = found[1:]
        return found

    def numbers(self) -> Text:
        stats = self.sequence.stats
        text = Text(f"{rate(stats.tokens, self.clock):.1f} tokens/s, {stats.steps} steps", style="bold")
        rest = f"\n{stats.tokens} tokens, {self.clock:.2f} s" + (", done" if self.done else "")
        return text.append(rest, style="not bold")


def race(lanes: Seq[Racer]) -> Iterator[Racer]:
    """Advance the lane whose clock is behind until all are done, and yield it after each step."""
    while running := [lane for lane in lanes if not lane.done]:
        lane = min(running, key=lambda lane: lane.clock)
        lane.advance()
        yield lane


# -- drawing ---------------------------------------------------------------------------------------------


def frame(lanes: Seq[Racer], console: Console, rows: int | None = None) -> RenderableType:
    """The lanes' panels with their figures, limited to the last ``rows`` rows of text."""
    beside = console.width >= _NARROW
    width = (console.width - 1) // 2 if beside else console.width
    if rows is not None and not beside:
        rows = rows // 2 - 3
    texts = [list(lane.text().wrap(console, width - 4)) for lane in lanes]
    if rows is not None:
        texts = [lines[-max(rows, 3) :] for lines in texts]
    height = max(map(len, texts)) if beside else 0
    blocks = [
        Group(
            Panel(
                Text("\n").join(lines),
                title=Text(lane.label),
                title_align="left",
                width=width,
                height=max(height or len(lines), 1) + 2,
            ),
            Padding(lane.numbers(), (0, 0, 0, 2)),
        )
        for lane, lines in zip(lanes, texts, strict=True)
    ]
    if not beside:
        return Group(*blocks)
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(*blocks)
    return grid


def heading(model: Loaded, prompt: str, console: Console) -> Text:
    text = Text(f"{model}. Both take turns, each on its own clock.\n", style="dim")
    text.append(screen.printable(prompt.strip()), style="not dim")
    if console.is_terminal:
        text.append(f"\n{'bold' if console.no_color else 'coloured'}: tokens accepted from the draft")
        if not console.no_color:
            text.append(", one colour per step")
    return text


def show(lanes: Seq[Racer], console: Console, once: bool, interrupt: Interrupt) -> None:
    """Run the race on the screen; with ``once`` draw only the final state."""
    if once or not screen.live(console):
        with screen.busy("both decode ..."):
            for _ in race(lanes):
                if interrupt.raised:
                    break
        console.print(frame(lanes, console))
        return
    rows = console.height - _ROWS_AROUND
    with Live(frame(lanes, console, rows), console=console, auto_refresh=False) as live:
        drawn = time.perf_counter()
        for _ in race(lanes):
            if interrupt.raised:
                break
            if time.perf_counter() - drawn >= _REDRAW_SECONDS:
                live.update(frame(lanes, console, rows), refresh=True)
                drawn = time.perf_counter()
        # When it closes, a Live prints its whole last frame, however long.
        live.update(frame(lanes, console))


# -- the verdict -----------------------------------------------------------------------------------------


def verdict(model: Loaded, job: Job, lanes: Seq[Racer]) -> tuple[str, bool]:
    """The last line, and whether the outputs are as promised: equal, except with some verifiers."""
    plain, other = (lane.sequence.generation() for lane in lanes)
    params = lanes[1].sequence.params
    different = first_difference(model, job, plain, other, params.greedy)
    if different is None:
        ratio = rate(1, other.stats.seconds) * plain.stats.seconds
        return (
            f"equal: yes, {len(other.tokens)} tokens in {other.stats.steps} steps instead of "
            f"{plain.stats.steps}, {ratio:.2f} times as fast"
        ), True
    if not promises(lanes[1].engine, params):
        return f"equal: no, {different} ({kept(lanes[1].engine)})", True
    return f"equal: no, {different}", False
