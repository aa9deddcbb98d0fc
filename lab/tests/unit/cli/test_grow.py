"""``outpace grow`` from a user's point of view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outpace.cli import app
from outpace.core import SamplingParams
from outpace.loading import Loaded, load
from outpace_lab.bench.grown import load_grown
from outpace_lab.bench.llama_shapes import SHAPES, Shape

# The tiny model has 32, 48, 1, 2, 1, 16.
LARGER = Shape(64, 96, 3, 4, 2, 32)


@pytest.fixture(autouse=True)
def shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "larger", LARGER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["grow", *map(str, arguments)])


def test_a_grown_folder_says_the_same(folder: Path, model: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    result = run("-m", folder, "--like", "larger", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["vocabulary"] == 257 and "31" not in found["vocabulary_note"].split("MB")[1]
    assert "less in a step than with 32000 tokens" in found["vocabulary_note"]
    assert found["shape"]["hidden_size"] == 64 and found["dtype"] == "float32" and found["shards"] == 1
    assert json.loads((out / "growth.json").read_text())["like"] == "larger"
    grown = load(str(out), device="cpu")
    assert sum(weight.numel() for weight in grown.target.model.parameters()) == found["parameters"]  # type: ignore[attr-defined]
    params = SamplingParams(max_new_tokens=20)
    ids = model.encode("say it")
    assert (
        grown.engine().generate([ids], params)[0].tokens == model.engine().generate([ids], params)[0].tokens
    )
    assert "exists and would be lost" in run("-m", folder, "--like", "larger", "--out", out).stderr


def test_the_table_names_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    result = run("-m", folder, "--like", "larger", "--out", tmp_path / "grown", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "257: the model's own" in result.stdout and "in bfloat16" in result.stdout


def test_a_model_loads_grown(folder: Path, model: Loaded) -> None:
    """Without a folder: straight on the device."""
    grown = load_grown(str(folder), "larger", device="cpu")
    assert str(grown) == f"{folder} grown to larger, float32 on cpu"
    assert Shape.of(grown.target.model.config) == LARGER  # type: ignore[attr-defined]
    assert load_grown(str(folder), "larger", "float64", "cpu").dtype == "float64"
    params, ids = SamplingParams(max_new_tokens=20), model.encode("say it")
    (answer,) = grown.engine("lookahead").generate([ids], params)
    assert answer.tokens == model.engine().generate([ids], params)[0].tokens
    assert torch.get_default_dtype() == torch.float32


def test_bench_measures_a_grown_model(folder: Path, tmp_path: Path) -> None:
    """Peers in other processes could only load the small one."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"say it, say it"\n')
    common = ("-m", folder, "--like", "larger", "--device", "cpu", "--suite", f"file:{prompts}", "-n", 4)
    command = ["bench", "lab", *map(str, common), "--drafters", "none", "--json", "-", "--peers"]
    result = CliRunner().invoke(app, [*command, "transformers:plain"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["model"]["name"] == f"{folder} grown to larger"
    refused = CliRunner().invoke(app, [*command, "vllm:plain"])
    assert refused.exit_code == 2 and "is in memory alone" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--like", "llama-8b"), "there is no shape 'llama-8b'. Did you mean 'llama"),
        (("--like", "larger", "--dtype", "int8"), "there is no dtype 'int8'"),
        (("--like", "larger", "-m", "/nowhere"), "no such folder: /nowhere"),
        (("--like", "larger", "--out", "/nowhere/grown"), "no such folder: /nowhere"),
    ],
)
def test_mistakes(folder: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = run("-m", folder, "--out", tmp_path / "grown", *options)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert not (tmp_path / "grown").exists()


def test_a_benchmark_of_a_growth_says_whose_the_vocabulary_is(folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "grown"
    prompts.write_text('"say it"\n', "utf-8")
    assert run("-m", folder, "--like", "larger", "--out", out).exit_code == 0
    common = ("bench", "lab", "--device", "cpu", "--suite", f"file:{prompts}", "-n", 2, "--drafters", "none")
    for given, noted in ((("-m", folder, "--like", "larger"), 1), (("-m", out), 1), (("-m", folder), 0)):
        page = tmp_path / "report.html"
        asked = (*common, *given, "--peers", "none", "--json", "-", "--html", page)
        result = CliRunner().invoke(app, list(map(str, asked)))
        assert result.exit_code == 0, result.output
        notes = json.loads(result.stdout.splitlines()[-1])["notes"]
        told = [note for note in notes if "the vocabulary of this growth to larger is the model's" in note]
        assert len(told) == noted and all("than with 32000 tokens" in note for note in told)
        for text in (result.stderr, page.read_text("utf-8")):
            assert ("the vocabulary of this growth" in " ".join(text.split())) == bool(noted)
    (out / "growth.json").write_text("[]", "utf-8")
    result = CliRunner().invoke(app, list(map(str, (*common, "-m", out, "--peers", "none"))))
    assert result.exit_code == 2 and "growth.json is broken" in " ".join(result.stderr.split())
