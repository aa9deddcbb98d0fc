"""``outpace drafters`` from a user's point of view."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import outpace
from outpace.cli import app
from outpace.drafters import DRAFTERS
from outpace.drafters.copying.reference import Reference
from outpace.loading import load
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, list(args))


def test_drafters_lists_every_method_with_its_options(run: Any) -> None:
    told = json.loads(run("drafters", "--json").stdout)
    found = {entry["name"]: entry for entry in told if entry["package"] == "outpace"}
    assert set(found) == set(DRAFTERS)
    lookahead = found["lookahead"]
    assert "2402.02057" in lookahead["paper"] and lookahead["summary"]
    assert [(o["name"], o["type"], o["default"]) for o in lookahead["options"][:2]] == [
        ("window", "int", DRAFTERS["lookahead"]().window),  # type: ignore[attr-defined]
        ("ngram", "int", DRAFTERS["lookahead"]().ngram),  # type: ignore[attr-defined]
    ]
    assert all(option["description"] for entry in found.values() for option in entry["options"])
    lines = " ".join(run("drafters").stdout.split())
    for entry in found.values():
        needs = f"; needs {entry['needs']}" if entry["needs"] else ""
        assert f"{entry['name']} {entry['when']}{needs} " in lines
        assert entry["when"].partition(" ")[0] in ("for", "to", "with", "on")


def test_one_drafter_is_shown_with_its_options_and_its_paper(run: Any) -> None:
    entry = json.loads(run("drafters", "combined", "--json").stdout)
    shown = run("drafters", "combined").stdout
    assert all(
        option["name"] in shown.split() or f"{option['name']}:" in shown.split()
        for option in entry["options"]
    )
    for text in (entry["summary"], entry["when"], entry["needs"], entry["paper"]):
        assert text in " ".join(shown.split())
    assert "\u2026" not in shown
    result = run("drafters", "sufix")
    assert result.exit_code == 2 and "Did you mean 'suffix'?" in result.stderr
    assert "without options" in run("drafters", "suffix:memory=0").stderr


def test_what_drafters_need_is_told_by_those_that_need_something() -> None:
    for cls in DRAFTERS.values():
        options = {field.name for field in dataclasses.fields(cls)} & {"parts", "path", "model"}
        assert bool(cls.needs) == bool(options or cls is Reference), cls.name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a drafter, a broken one, and one that has a name of outpace's own."""
    (tmp_path / "guesses.py").write_text(
        "from dataclasses import dataclass\n"
        "from outpace.drafters.copying.prompt_lookup import PromptLookup\n\n\n"
        "@dataclass(frozen=True)\nclass Guess(PromptLookup):\n"
        '    """Guesses well.\n\n    Attributes:\n        window: tokens it looks at.\n    """\n\n'
        "    window: int = 2\n    paper = 'Guess et al.'\n",
        "utf-8",
    )
    info = tmp_path / "guesses-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guesses\nVersion: 0.3\n", "utf-8")
    names = {"guess": "guesses:Guess", "broken": "guesses:Gone", "lookahead": "guesses:Guess"}
    lines = ["[outpace.drafters]", *(f"{name} = {value}" for name, value in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("guesses", None)


@pytest.mark.usefixtures("package")
def test_drafters_of_other_packages_are_listed(run: Any) -> None:
    result = run("drafters", "--json")
    assert result.exit_code == 0, result.output
    found = {entry["name"]: entry for entry in json.loads(result.stdout) if "guesses" in entry["package"]}
    assert [entry["package"] for entry in found.values()] == ["guesses 0.3"] * 3
    assert found["guess"]["summary"] == "Guesses well." and found["guess"]["error"] is None
    window = next(option for option in found["guess"]["options"] if option["name"] == "window")
    assert (window["default"], window["description"]) == (2, "tokens it looks at.")
    assert "'broken' of guesses 0.3 cannot be imported" in found["broken"]["error"]
    assert "its own drafter 'lookahead'; select this one as guesses:Guess" in found["lookahead"]["error"]
    shown = " ".join(run("drafters").stdout.split())
    assert "guesses 0.3 guess Guesses well broken" in shown
    assert "broken the drafter 'broken' of guesses 0.3 cannot be imported" in shown
    one = " ".join(run("drafters", "guess").stdout.split())
    assert one.startswith("guess (guesses 0.3) Guesses well. paper Guess et al. Options")
    assert "window: int = 2 tokens it looks at." in one


@pytest.mark.usefixtures("package")
def test_a_drafter_of_another_package_decodes(run: Any, folder: Path) -> None:
    """By its name, by its path, and as a part of another one; the tokens are those of plain decoding."""
    common = ("generate", "-m", str(folder), "-p", "abcabcabc", "-n", "12", "--json", "--drafter")
    plain = json.loads(run(*common, "none").stdout)
    for spec in ("guess:window=3", "guesses:Guess:window=3", "combined:(guesses:Guess)+(suffix)"):
        result = run(*common, spec)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["tokens"] == plain["tokens"]
    result = run(*common, "broken")
    assert result.exit_code == 2 and "cannot be imported" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("package")
def test_a_drafter_of_another_package_goes_wherever_a_spec_does(
    run: Any, folder: Path, tmp_path: Path
) -> None:
    """The benchmark and ``accelerate`` decode with it, and the server's engine has it."""
    spec, entry = "guesses:Guess:window=3,num_speculative_tokens=4", "guess:num_speculative_tokens=2"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabcabc"}\n{"prompt": "xyzxyz"}\n', "utf-8")
    common = ("-m", str(folder), "--suite", f"file:{prompts}", "--max-new-tokens", "12", "--device", "cpu")
    result = run("bench", *common, "--drafters", f"none,{spec},{entry}", "--peers", "none", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["drafter"] for row in rows] == ["none", spec, entry]
    assert all(row["drafted"] is not None for row in rows[1:])

    model = load(str(folder), device="cpu")
    engine = make_engine(model, spec, Limits(), {"copy": entry})
    assert [type(engine.drafter).__name__, engine.drafter_names[0]] == ["Guess", "copy"]
    inputs = torch.tensor([model.tokens("abcabcabc")])
    plain = model.target.model.generate(inputs, max_new_tokens=8, do_sample=False)
    outpace.accelerate(model.target.model, spec)
    assert torch.equal(model.target.model.generate(inputs, max_new_tokens=8, do_sample=False), plain)
    outpace.restore(model.target.model)
