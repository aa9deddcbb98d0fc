"""The law by enumeration, the fit on points that obey it, lines, and a small measurement of the whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.bench.items import Item, Suite
from outpace.bench.run import Settings
from outpace.cli import app
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace_lab.bench.roof import work_of
from outpace_lab.bench.scaling import Point, Setting, compression, expected_tokens, fit, line, measure_scaling
from outpace_lab.bench.scaling_page import as_json, page, verdict

GRID = [Setting(window, ngram) for ngram in (3, 4, 5) for window in (1, 2, 4, 8)]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("guesses", "length"), [(1, 1), (1, 3), (2, 2), (3, 3)])
def test_the_expected_tokens_are_those_of_every_case(acceptance: float, guesses: int, length: int) -> None:
    # Every guess stands to some depth; the longest counts, and one token is the target's own.
    depths = [acceptance**k * (1 - acceptance) for k in range(length)] + [acceptance**length]
    total = 0.0
    for case in itertools.product(range(length + 1), repeat=guesses):
        weight = 1.0
        for depth in case:
            weight *= depths[depth]
        total += weight * (max(case) + 1)
    assert expected_tokens(acceptance, guesses, length) == pytest.approx(total)


def test_good_guesses_in_every_step_or_never() -> None:
    assert compression(0.5, 1, 2, 2) == pytest.approx(expected_tokens(0.5, 2, 2))
    assert compression(0.5, 1e9, 2, 2) == pytest.approx(1)
    assert compression(0.5, 4, 2, 2) == pytest.approx((3 + expected_tokens(0.5, 2, 2)) / 4)


@pytest.mark.parametrize(("acceptance", "every"), [(0.213, 1.5), (0.457, 3.0), (0.811, 6.0)])
def test_the_fit_finds_the_numbers_that_made_the_points(acceptance: float, every: float) -> None:
    points = [(s, compression(acceptance, every, s.window, s.ngram - 1)) for s in GRID]
    found = fit(points)
    assert found.acceptance == pytest.approx(acceptance, abs=1e-3)
    assert found.every == pytest.approx(every, rel=1e-2)
    assert found.error < 1e-4
    # Every second point 10% too high: that much is left, and it is told.
    noisy = [(s, tau * (1.1 if i % 2 else 1.0)) for i, (s, tau) in enumerate(points)]
    assert 0.03 < fit(noisy).error < 0.06


def test_points_that_gain_nothing() -> None:
    found = fit([(s, 1.0) for s in GRID])
    assert found.error < 1e-4 and all(found.predict(s) == pytest.approx(1, abs=1e-3) for s in GRID)
    with pytest.raises(OutpaceError, match="two settings at least"):
        fit([(Setting(2, 3), 1.5)])


def point(flops: float, steps: int) -> Point:
    return Point(Setting(1, 3), 1.0, flops, steps, 100 / steps, True)


def test_lines() -> None:
    straight = line(3, [point(2.0**k, 100 - 10 * k) for k in range(1, 6)], 100)
    assert straight.slope == pytest.approx(-0.1) and straight.r2 == pytest.approx(1)
    assert straight.first_half == pytest.approx(-0.1) == straight.second_half
    flat = line(3, [point(2.0**k, steps) for k, steps in enumerate((90, 70, 60, 59, 59))], 100)
    assert flat.first_half == pytest.approx(-0.15) and flat.second_half == pytest.approx(-0.005)
    assert flat.r2 < 0.9
    with pytest.raises(OutpaceError, match="3 windows at least"):
        line(3, [point(1, 1), point(2, 1)], 100)


def test_a_small_measurement(model: Loaded) -> None:
    items = (Item("1", "all", ("abcabc",)), Item("2", "all", ("xyz",)))
    suite = Suite("s", items, "here")
    grid = [Setting(window, ngram) for ngram in (3, 4) for window in (1, 2, 4)]
    work = work_of(model.target)
    found = measure_scaling(model, work, suite, Settings(16), grid, batch=2)
    assert found.whole and found.prompts == 2 and found.plain_steps == 32
    assert [one.ngram for one in found.lines] == [3, 4]
    for one in found.points:
        setting = one.setting
        # Window and guesses, less what the trie has in common; steps and tokens make tau.
        assert 1 <= one.rows <= (2 * setting.window) * (setting.ngram - 1) + setting.window
        assert one.equal and one.tau == 32 / one.steps
    assert found.points[0].flops < found.points[1].flops < found.points[2].flops
    again = measure_scaling(model, work, suite, Settings(16), grid, batch=1)
    assert [one.steps for one in again.points] == [one.steps for one in found.points]
    told = json.loads(json.dumps(as_json(found, {"command": "c"})))
    assert told["points"][0]["window"] == 1 and told["points"][0]["predicted_tau"] >= 1
    text = page(found, "model", "command")
    assert text.count("<img") == 2 and all(line in text for line in verdict(found)[:1])
    with pytest.raises(OutpaceError, match="interrupted before"):
        measure_scaling(model, work, suite, Settings(16), grid, stopped=lambda: True)


def test_a_window_is_not_cut_where_an_answer_ends(model: Loaded) -> None:
    """It is deeper than all of the answer: cut, it would never have more cells than that has tokens."""
    suite = Suite("s", (Item("1", "all", ("abcabc",)),), "here")
    grid = [Setting(window, 3) for window in (4, 24)]
    narrow, wide = measure_scaling(model, work_of(model.target), suite, Settings(8), grid).points
    assert wide.rows > 24 + narrow.rows and wide.equal and wide.tau == 8 / wide.steps


def test_the_command(model: Loaded, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"abcabc"\n"xyz"\n', "utf-8")

    def run(*args: Any) -> Any:
        given = ["bench", "scaling", "-m", model.source, "--suite", f"file:{file}", "--max-new-tokens", 12]
        return CliRunner().invoke(app, [str(arg) for arg in [*given, *args]])

    result = run("--windows", "1,2,4", "--ngrams", 3, "--json", "-", "--html", tmp_path / "law.html")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [one["window"] for one in found["points"]] == [1, 2, 4] and found["whole"]
    assert "The law fits with a = " in result.stderr and "N = 3: " in result.stderr
    assert (tmp_path / "law.html").stat().st_size > 10_000
    for args, message in (
        (["--windows", "a"], "--windows takes numbers"),
        (["--ngrams", "1"], "at least 2"),
        (["--windows", "2", "--ngrams", "3"], "two settings at least"),
        (["--max-new-tokens", 1], "at least 2"),
    ):
        wrong = run(*args)
        assert wrong.exit_code == 2 and message in " ".join(wrong.stderr.split()), wrong.output
