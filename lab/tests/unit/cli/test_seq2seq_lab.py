"""The laboratory's commands on encoder-decoder models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.loading import load
from parts import in_turn
from seq2seq_models import NEW, folder, prompts, stock

__all__ = ["folder", "prompts"]
Run = Callable[..., Any]

# Those after the first three are slow.
TRAINED = [
    "eagle:layers=1+2",
    "medusa:heads=2",
    "spec_drafter:tokens=3",
    "blockwise:heads=2",
    "dflash:tokens=3,layers=1+2",
    "hydra:heads=2",
]


@pytest.mark.parametrize(
    ("method", "folder"), in_turn(TRAINED, ["t5", "bart"], among=TRAINED[:3]), indirect=["folder"]
)
def test_train(run: Run, folder: Path, prompts: Path, tmp_path: Path, method: str) -> None:
    """Drafters learn the model's answers to sources, and change none."""
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out"
    asked.write_text("".join(json.dumps({"prompt": f"say {number} " * 3}) + "\n" for number in range(12)))
    settings = ("--steps", 4, "--rows", 3, "--length", 40, "--held-out", 0.3, "-n", 12, "--json")
    model = ("-m", folder, "--dtype", "float64")
    result = run("train", method, *model, "--data", asked, "--out", out, "--states", tmp_path, *settings)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["expected_length"] >= 1
    written = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    start = list(load(str(folder), seq2seq=True).target.start)
    assert all(line["tokens"][: line["prompt_length"]] == start for line in written)
    assert len({tuple(line["source"]) for line in written}) == 12
    drafter = ("-d", f"{method.partition(':')[0]}:path={out}", "--no-adaptive", "--json", "--batch", 2)
    result = run("generate", *model, "--file", prompts, "-n", NEW, *drafter)
    assert result.exit_code == 0, result.output
    found = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    assert [one["tokens"] for one in found] == stock(folder)
    assert all(one["stats"]["drafted"] > 0 for one in found)


def test_training_on_texts_without_prompts_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('"a text"\n')
    texts = ("--data", tmp_path / "texts.jsonl", "--length", 40)
    result = run("train", "medusa", "-m", folder, *texts, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "answers prompts; give prompts, not texts" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["search", "tune"])
def test_other_commands_refuse(run: Run, folder: Path, prompts: Path, tmp_path: Path, command: str) -> None:
    more = ["--data", prompts, "--out", tmp_path / "out.json"]
    result = run(command, "-m", folder, *(more if command == "search" else more[2:]))
    assert result.exit_code == 2, result.output
    assert "is an encoder-decoder model; use it with `outpace generate`, `outpace train`" in " ".join(
        result.stderr.split()
    )
