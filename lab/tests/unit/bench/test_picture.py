"""The picture of speeds by method that documents show."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "2026-11-22-growth-float32-cpu.json"


def test_the_same_file_makes_the_same_picture(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    for name, methods in (("one", "suffix,lookahead"), ("two", "suffix,lookahead"), ("other", "suffix")):
        draw["picture"](RESULT, methods.split(","), tmp_path / f"{name}.svg")
    one, two, other = ((tmp_path / f"{name}.svg").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    assert b"<svg" in one and b"<dc:date>" not in one
    with pytest.raises(SystemExit, match="has no speed of magic"):
        draw["picture"](RESULT, ["magic"], tmp_path / "some.svg")


def test_the_documented_commands_draw_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "benchmarks" / "picture.py")
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    commands = re.findall(r"^python lab/measure/picture.py (.*) --out docs/images/(.*)$", text, re.MULTILINE)
    assert {image for _, image in commands} == {"spec-bench.svg", "scaling.svg"}
    monkeypatch.chdir(ROOT)
    for options, image in commands:
        words = [script, *shlex.split(options), "--out", str(tmp_path / image)]
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(script, run_name="__main__")
        assert (tmp_path / image).stat().st_size > 10_000


def test_a_result_with_none_of_the_usual_methods(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    found = json.loads(RESULT.read_text("utf-8"))
    found["rows"] = [row for row in found["rows"] if row["drafter"] in ("none", "jacobi")]
    (tmp_path / "some.json").write_text(json.dumps(found), "utf-8")
    with pytest.raises(SystemExit, match=r"has nothing to draw; .* none"):
        draw["picture"](tmp_path / "some.json", None, tmp_path / "some.svg")


def test_a_panel_per_category_and_short_names(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    rows = {("s", "m", 1): {"peer": False, "categories": {"qa": {"speedup": 2.0, "interval": [1.0, 3.0]}}}}
    found = draw["by_category"](rows, "s")
    assert [*found] == [("qa", "m", 1)]
    assert found["qa", "m", 1]["speedup"] == 2.0 and found["qa", "m", 1]["speedup_interval"] == [1.0, 3.0]
    assert draw["by_category"](rows, "other") == {}
    assert draw["label"]("lookahead:window=4,ngram=3,guesses=2") == "lookahead 4, 3, 2"
    assert draw["label"]("combined:(suffix)+(jacobi)") == "suffix + jacobi"


def test_a_law_is_a_panel_per_result(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    result = ROOT / "benchmarks" / "2026-11-22-scaling-cpu.json"
    for name, files in (("one", [result]), ("again", [result]), ("both", [result, result])):
        draw["law"](files, tmp_path / f"{name}.svg")
    one, again, both = ((tmp_path / f"{name}.svg").read_text() for name in ("one", "again", "both"))
    assert one == again
    # Per panel a dashed line per N, from 3 to 6.
    assert one.count("stroke-dasharray") == 4 and both.count("stroke-dasharray") == 8
    with pytest.raises(SystemExit, match="is no result of outpace bench scaling"):
        draw["law"]([RESULT], tmp_path / "none.svg")
