"""GGUF files in the laboratory's commands: benchmarks beside llama.cpp, tuning, times of forwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

import outpace
from gguf_files import gguf_file
from outpace.cli import app
from outpace_lab.bench import tuning
from outpace_lab.bench.roof import measure_widths


def command(*asked: Any) -> Any:
    found = CliRunner().invoke(app, list(map(str, asked)))
    assert found.exit_code == 0, found.output
    return found


def test_the_benchmark_measures_a_file_beside_llama_cpp(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "say 1, say 1"}))
    asked = ("--drafters", "none,suffix", "--suite", f"file:{prompts}", "--max-new-tokens", 16, "--json", "-")
    found = json.loads(command("bench", "lab", "--model", gguf_file("q8_0"), *asked).stdout)
    rows = {row["drafter"]: row for row in found["rows"]}
    assert set(rows) == {"none", "suffix", "llama.cpp:plain", "llama.cpp:prompt_lookup"}
    assert rows["suffix"]["equal"] == rows["suffix"]["outputs"] == 1
    assert found["peers"]["llama.cpp"]["llama-cpp-python"] and found["model"]["bits"] == "bit-exact"


def test_tune_measures_a_file_and_its_profile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "WIDTHS", (1, 2, 8))
    prompts, out, file = tmp_path / "prompts.jsonl", tmp_path / "profile.toml", gguf_file("q8_0")
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}, say {n}"}) + "\n" for n in range(8)))
    asked = ("--suite", f"file:{prompts}", "-n", 6, "--drafters", "prompt_lookup", "--budget", 60)
    found = json.loads(command("tune", "-m", file, *asked, "--verify", "--json", "--out", out).stdout)
    assert found["differences"] == [] and found["verified"]["equal"] == found["verified"]["outputs"] == 2
    read = command("generate", "-m", file, "--profile", out, "--prompt", "say 1", "--max-new-tokens", 8)
    assert read.output


def test_a_model_is_written_for_the_demo(tmp_path: Path) -> None:
    command("gguf", "--out", tmp_path / "nano.gguf")
    asked = ("--model", tmp_path / "nano.gguf", "--once", "--max-new-tokens", 16)
    assert "equal" in command("demo", *asked).output


def test_forwards_are_timed_by_their_width() -> None:
    target = outpace.load(str(gguf_file("q8_0")), llamacpp="threads=1").target
    assert all(seconds > 0 for seconds in measure_widths(target, 16, (1, 2), batch=2))
