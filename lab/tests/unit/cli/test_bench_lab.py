"""``outpace bench lab`` and ``outpace bench compare`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outpace.cli import app
from outpace.core import OutpaceError
from outpace_lab.bench import roof
from outpace_lab.cli import bench_run as console
from unit.cli.test_bench import refused, rows_of

Bench = Callable[..., Any]


@pytest.fixture
def bench(folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs ``outpace bench lab`` in this process, on a tiny model and three prompts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(roof, "_ROUNDS", 1)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def invoke(*args: Any) -> Any:
        given = ["bench", "lab", "-m", folder, "--suite", f"file:{prompts}", "--max-new-tokens", 12, *args]
        return CliRunner().invoke(app, [str(arg) for arg in given])

    return invoke


def test_tables_files_and_a_comparison(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report's plots need matplotlib")
    file = tmp_path / "six.jsonl"
    file.write_text(
        "".join(json.dumps(text * 3) + "\n" for text in ("ab", "cd", "ef", "gh", "ij", "kl")), "utf-8"
    )
    methods = ("--drafters", "prompt_lookup:branches=1,suffix", "--peers", "none", "--repeats", 2)
    options = ("--suite", f"file:{file}", *methods)
    result = bench(*options, "--json", tmp_path / "a.json", "--html", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    for told in ("prompt_lookup:branches=1", "suffix", "speed over plain decoding", "95%"):
        assert told in result.stdout
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    found = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [row["tokens"] for row in found["rows"]] == [144, 144, 144]
    assert [row["groups"] for row in found["rows"]] == [6, 6, 6]
    compared = CliRunner().invoke(app, ["bench", "compare", "a.json", "a.json"])
    assert compared.exit_code == 0 and "2 of 2 rows overlap (100%)" in compared.stdout
    told = json.loads(CliRunner().invoke(app, ["bench", "compare", "a.json", "a.json", "--json"]).stdout)
    assert told["agreeing"] == told["comparable"] == 2


def test_grades(bench: Bench, tmp_path: Path) -> None:
    lines = [{"question": "How many?", "answer": "#### 1"}, {"question": "How much?", "answer": "#### 2"}]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = ("--suite", "gsm8k", "--data", tmp_path, "--drafters", "suffix", "--peers", "none")
    result = bench(*options, "--grade", "--json", "-")
    assert result.exit_code == 0, result.output
    (none,), (suffix,) = (row["quality"] for row in rows_of(result).values())
    assert none == suffix and none["kind"] == "number" and none["prompts"] == 2
    assert none["better"] == none["worse"] == 0 and none["score"] == none["plain"]
    assert "quality of the answers" in result.stderr
    refused(bench("--grade"), "--grade finds nothing to grade")
    refused(bench(*options, "--run-code"), "--run-code is for --grade")


def test_a_roof_that_is_not_known_is_noted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        torch.empty(1 << 46)  # what torch itself says

    monkeypatch.setattr(console, "measure_roof", full)
    result = bench("--drafters", "none", "--peers", "none", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["roof"] is None and found["notes"] == ["the roof was not measured: out of memory"]
    assert rows_of(result)["none", 1]["speedup"] == 1 and rows_of(result)["none", 1]["roof"] is None

    of_experts = roof.Roof(None, roof.Limits(1.0, 1, 1.0), (), 1)
    monkeypatch.setattr(console, "measure_roof", lambda *args: of_experts)
    result = bench("--drafters", "none", "--peers", "none")
    assert result.exit_code == 0 and "Note: no roof is known for experts" in result.stdout

    def broken(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(console, "measure_roof", broken)
    assert isinstance(bench("--drafters", "none", "--peers", "none").exception, RuntimeError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "vllm=/no/such/venv"], "/no/such/venv is not an environment"),
        (["--peers", "none", "--gguf", "model.gguf"], "--gguf is the model's weights for llama.cpp; add"),
        (["--suite", "gsm8k", "--data", "/no/such/folder"], "no such folder"),
        (["--html", "."], "cannot write .: a folder"),
    ],
)
def test_mistakes(bench: Bench, options: list[str], message: str) -> None:
    refused(bench(*options), message)


def test_a_missing_extra_is_told_before_anything_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace_lab.bench.html.find_spec", lambda name: None)
    refused(bench("--html", "report.html"), "lab[bench]")


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder where nobody may write")
@pytest.mark.parametrize("command", [("lab",), ("scaling",)])
@pytest.mark.parametrize(
    "options", [("--json", "/proc/a.json"), ("--html", "/proc/a.html"), ("--json", "/proc/version")]
)
def test_a_file_that_cannot_be_written_is_refused_first(
    folder: Path, prompts: Path, options: tuple[str, ...], command: tuple[str, ...]
) -> None:
    asked = ("bench", *command, "-m", "./not-even-looked-at", "--suite", f"file:{prompts}", *options)
    refused(CliRunner().invoke(app, list(map(str, asked))), f"cannot write {options[1]}: ")


def test_a_report_that_fails_costs_no_results(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(found: Any) -> str:
        raise OutpaceError("it cannot be drawn")

    monkeypatch.setattr("outpace_lab.bench.html.find_spec", lambda name: True)
    monkeypatch.setattr("outpace_lab.bench.html.page", fail)
    quick = ("--drafters", "none", "--peers", "none", "--limit", 1, "--html", "a.html")
    for where in ("a.json", "-"):
        result = bench(*quick, "--json", where)
        assert result.exit_code == 2 and "it cannot be drawn" in result.stderr
        text = result.stdout if where == "-" else Path(where).read_text("utf-8")
        assert json.loads(text.splitlines()[-1])["rows"][0]["tokens"] == 12


def test_options_before_a_subcommand_are_not_ignored(bench: Bench) -> None:
    result = CliRunner().invoke(app, ["bench", "--limit", "3", "compare", "a.json", "b.json"])
    refused(result, "--limit does not go with compare")
    refused(CliRunner().invoke(app, ["bench", "compare", "a.json", "b.json"]), "is not a benchmark's JSON")


def test_llama_cpp_gets_the_model_as_a_file(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")
    read: list[int] = []

    def worker(
        library: str, kind: str, environment: Path | None, load: dict[str, Any], promised: bool
    ) -> Any:
        read.append(len(gguf.GGUFReader(load["model"]).tensors))
        raise OutpaceError("no llama.cpp in this test")

    monkeypatch.setattr("outpace_lab.bench.peers.worker_of", worker)
    refused(bench("--peers", "llama.cpp:plain"), "no llama.cpp in this test")
    assert read == [9 + 3]
    refused(
        bench("--peers", "llama.cpp:plain", "--dtype", "float64"),
        "or give --gguf FILE of `outpace bench",
    )
