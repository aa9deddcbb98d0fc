"""The picture of speeds by method that documents show."""

from __future__ import annotations

import runpy
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
