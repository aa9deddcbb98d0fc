"""Names from other packages: commands, and advice for what is in outpace-lab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outpace.cli.app import add_plugins, app, benchmarks
from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS, Drafter, load_drafter
from outpace.plugins import defined, why_absent
from outpace.verify import load_verifier

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with one module, ``extra``, and its entry points, beside no other package."""

    def make(source: str, points: str) -> None:
        (tmp_path / "extra.py").write_text(source, "utf-8")
        info = tmp_path / "extra-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n", "utf-8")
        (info / "entry_points.txt").write_text(points, "utf-8")

    monkeypatch.setattr(sys, "path", [str(tmp_path), *(part for part in sys.path if "lab" not in part)])
    monkeypatch.delitem(sys.modules, "extra", raising=False)
    return make


HELLO = """
def register(app):
    @app.command()
    def hello() -> None:
        print("hello from extra")
"""


def test_a_command_of_another_package_stands_under_its_name(install: Install) -> None:
    install(HELLO, "[outpace.commands]\nextra = extra:register\n")
    fresh = typer.Typer()
    fresh.command("own")(lambda: None)
    add_plugins(fresh)
    assert CliRunner().invoke(fresh, ["hello"]).output == "hello from extra\n"
    (hello,) = (command for command in fresh.registered_commands if command.rich_help_panel == "extra 1.0")
    assert hello.callback is not None and hello.callback.__name__ == "hello"


@pytest.mark.parametrize("source", ["raise RuntimeError('two\\nlines')", "register = None", ""])
def test_commands_that_fail_are_a_line_and_the_others_work(
    install: Install, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    install(source, "[outpace.commands]\nextra = extra:register\n")
    fresh = typer.Typer()
    fresh.command("own")(lambda: print("own"))
    fresh.command("other")(lambda: None)
    add_plugins(fresh)
    told = capsys.readouterr().err.strip()
    assert told.startswith("the commands of extra are left out: ")
    assert CliRunner().invoke(fresh, ["own"]).output == "own\n"


def test_help_is_never_broken_by_a_package(tmp_path: Path) -> None:
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[outpace.commands]\nextra = nowhere:register\n", "utf-8")
    command = [sys.executable, "-c", "import outpace.cli; outpace.cli.main()", "--help"]
    paths = {"PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path)])}
    run = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    assert run.returncode == 0 and "generate" in run.stdout
    assert run.stderr.count("\n") == 1 and "No module named 'nowhere'" in run.stderr


@pytest.mark.parametrize(
    ("kind", "load", "name"),
    [("drafter", load_drafter, "cascade:drafter=(suffix)"), ("verifier", load_verifier, "typical")],
)
def test_a_name_in_the_laboratory_is_answered_with_its_package(
    monkeypatch: pytest.MonkeyPatch, kind: str, load: Callable[[str], object], name: str
) -> None:
    monkeypatch.setattr("outpace.spec.installed", lambda group: {})
    bare = name.partition(":")[0]
    with pytest.raises(OutpaceError, match=f"^{bare} is in outpace-lab: pip install "):
        load(name)
    assert why_absent(kind, "lookahead") is None


def test_a_command_in_the_laboratory_is_answered_with_its_package() -> None:
    without = typer.Typer(cls=app.info.cls)
    without.command("own")(lambda: None)
    without.command("other")(lambda: None)
    result = CliRunner().invoke(without, ["train", "nano"])
    assert result.exit_code == 2
    assert "train is in outpace-lab: pip install " in " ".join(result.output.split())


def test_a_benchmark_in_the_laboratory_is_answered_with_its_package() -> None:
    without = typer.Typer(cls=benchmarks.info.cls)
    without.command("own")(lambda: None)
    without.command("other")(lambda: None)
    result = CliRunner().invoke(without, ["compare", "a.json", "b.json"])
    assert result.exit_code == 2
    assert "compare is in outpace-lab: pip install " in " ".join(result.output.split())


def test_outpaces_own_drafters_are_found() -> None:
    assert set(DRAFTERS.values()) == set(defined("outpace.drafters", Drafter, "paper"))
    assert {"lookahead", "suffix", "none", "draft_model"} <= set(DRAFTERS)
    assert Drafter not in DRAFTERS.values()
