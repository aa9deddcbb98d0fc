"""The race: the order of turns, the colours, the screen."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from outpace.cli import demo as race
from outpace.cli.demo import COLOURS, Piece, Racer
from outpace.cli.interrupt import Interrupt
from outpace.core import SamplingParams
from outpace.drafters import load_drafter
from outpace.loading import Loaded

PROMPT = "abcabcabcabc"


def lanes(model: Loaded, spec: str = "prompt_lookup", tokens: int = 24) -> list[Racer]:
    params = SamplingParams(max_new_tokens=tokens)
    ids = model.encode(PROMPT)
    engines = {"plain": model.engine(), spec: model.engine(load_drafter(spec), adaptive=False)}
    return [Racer(label, engine, ids, params) for label, engine in engines.items()]


def screen(width: int, terminal: bool = False, height: int = 24, **options: Any) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        **options,
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@dataclass
class Runner:
    """A lane whose steps take given times."""

    pace: float
    left: int
    clock: float = 0.0
    log: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.left == 0

    def advance(self) -> None:
        self.left -= 1
        self.clock += self.pace
        self.log.append(self.clock)


def test_the_lane_whose_clock_is_behind_goes_next() -> None:
    slow, fast = Runner(0.3, 10), Runner(0.1, 10)
    for lane in race.race([slow, fast]):  # type: ignore[list-item]
        running = [one.clock for one in (slow, fast) if not one.done]
        if len(running) == 2:
            assert abs(running[0] - running[1]) <= 0.3 + 1e-9
        assert lane in (slow, fast)
    assert slow.done and fast.done
    # While both ran, the slow one took a third as many steps.
    assert sum(clock <= 1.0 for clock in slow.log) == 3 and sum(clock <= 1.0 for clock in fast.log) >= 9


def test_both_lanes_end_with_the_same_tokens(model: Loaded) -> None:
    both = lanes(model)
    for _ in race.race(both):
        pass
    plain, other = both
    assert plain.sequence.output == other.sequence.output
    assert plain.sequence.stats.steps == 24
    assert len(plain.pieces) == len(other.pieces) == 24
    text = model.tokenizer.decode(plain.sequence.output)
    joined = "".join(piece.text for piece in other.pieces)
    assert joined == race.screen.printable(text) == "".join(piece.text for piece in plain.pieces)


def test_drafted_tokens_are_marked_and_the_targets_own_are_not(model: Loaded) -> None:
    plain, other = lanes(model, "jacobi:num_speculative_tokens=4", tokens=40)
    for _ in race.race([plain, other]):
        pass
    assert all(piece.step is None for piece in plain.pieces)
    marked = [piece.step for piece in other.pieces if piece.step is not None]
    assert len(marked) == other.sequence.stats.accepted > 0


def test_a_step_has_one_colour_and_the_next_step_another(model: Loaded) -> None:
    lane = lanes(model)[0]
    lane.pieces = [
        Piece("a", 1),
        Piece("b", 1),
        Piece("c", None),
        Piece("d", 2),
        Piece("e", None),
        Piece("f", 5),
    ]
    spans = {lane.text().plain[span.start : span.end]: span.style for span in lane.text().spans}
    assert spans == {"a": COLOURS[0], "b": COLOURS[0], "d": COLOURS[1], "f": COLOURS[2]}


@pytest.mark.parametrize("width", [40, 59, 60, 80, 120])
def test_the_panels_fit_every_width(model: Loaded, width: int) -> None:
    both = lanes(model)
    for _ in race.race(both):
        pass
    console = screen(width)
    console.print(race.frame(both, console))
    rows = shown(console).splitlines()
    assert max(map(len, rows)) <= width
    assert shown(console).count("tokens/s") == 2
    assert sum("plain" in row and "prompt_lookup" in row for row in rows) == (width >= 60)


def test_a_frame_keeps_to_its_rows_and_shows_the_end_of_the_text(model: Loaded) -> None:
    both = lanes(model)
    for lane in both:
        lane.pieces = [Piece(f"row {number}\n", None) for number in range(100)]
    for width, rows in ((80, 8), (50, 14)):
        console = screen(width)
        console.print(race.frame(both, console, rows))
        assert len(shown(console).splitlines()) <= rows + 6
        assert "row 99" in shown(console) and "row 50" not in shown(console)


def test_a_terminal_that_can_be_redrawn_ends_with_the_whole_text(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(race.screen, "live", lambda console: True)
    console = screen(80, terminal=True)
    with Interrupt() as interrupt:
        race.show(lanes(model), console, once=False, interrupt=interrupt)
    # Redrawn many times, with the cursor moved up before each.
    assert shown(console).count("prompt_lookup") > 5 and "\x1b[1A" in shown(console)
    assert shown(console).rstrip().count("24 tokens") >= 2


@pytest.mark.parametrize("terminal", [True, False])
def test_once_draws_once(model: Loaded, terminal: bool) -> None:
    console = screen(80, terminal=terminal)
    with Interrupt() as interrupt:
        race.show(lanes(model), console, once=True, interrupt=interrupt)
    assert shown(console).count("prompt_lookup") == 1 and "\x1b[1A" not in shown(console)
    assert terminal or "\x1b" not in shown(console)


def test_the_verdict_on_unequal_outputs(model: Loaded) -> None:
    both = lanes(model, tokens=8)
    for _ in race.race(both):
        pass
    job = race.Job(0, race.PromptLine(PROMPT), model.encode(PROMPT))
    line, equal = race.verdict(model, job, both)
    assert equal and line.startswith("equal: yes, 8 tokens in ") and " instead of 8, " in line
    both[1].sequence.tokens[-3] ^= 1
    line, equal = race.verdict(model, job, both)
    assert not equal and line.startswith("equal: no, token 6 is ")
    assert "apart in log probability" in line


def test_a_terminal_without_colours_gets_none(model: Loaded) -> None:
    both = lanes(model)
    for _ in race.race(both):
        pass
    console = screen(80, terminal=True, no_color=True)
    console.print(race.heading(model, PROMPT, console), race.frame(both, console))
    codes = {code for part in shown(console).split("\x1b[")[1:] for code in part.split("m")[0].split(";")}
    assert codes <= {"0", "1", "2"}
    assert "bold: tokens accepted" in shown(console)
