"""``outpace train`` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.console.models import Loaded
from outpace.core import SamplingParams

Run = Callable[..., Any]
SMALL = ["--steps", 6, "--evaluate-every", 3, "--rows", 2, "--length", 40, "--held-out", 0.3]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Run:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")
    prompts = "".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(20))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    data = ["--data", tmp_path / "prompts.jsonl", "-m", folder, "--device", "cpu", "-n", 20]
    return lambda method, *more: CliRunner().invoke(app, ["train", method, *map(str, [*data, *more])])


def test_a_drafter_is_trained_and_drafts(run: Run, model: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    result = run("medusa:heads=2,nodes=4", *SMALL, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["documents"] + found["held_out_documents"] == 20 and found["steps"] == 6
    assert found["expected_length"] >= 1 and found["parameters"] == 2 * (32 * 32 + 32)
    # 6 steps of 2 rows, each at most 40 tokens long and more than half full.
    assert 6 * 2 * 20 < found["tokens_seen"] <= 6 * 2 * 40 and found["cpu_seconds"] > 0
    facts = json.loads((out / "provenance.json").read_text())
    assert facts["result"]["expected_length"] == found["expected_length"]
    assert len(facts["data"]["sha256"]) == 64 and facts["versions"]["torch"]
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    params = SamplingParams(max_new_tokens=20)
    (plain,) = model.engine().generate([model.encode("say 0")], params)
    assert answers[0]["tokens"][answers[0]["prompt_length"] :] == plain.tokens
    (fast,) = model.engine(f"medusa:path={out}").generate([model.encode("say 0")], params)
    assert fast.tokens == plain.tokens and fast.stats.drafted > 0
    # The same command again finds the answers and the finished run.
    again = json.loads(run("medusa:heads=2,nodes=4", *SMALL, "--out", out, "--json").stdout)
    assert again["expected_length"] == found["expected_length"]
    other = run("medusa:heads=2,nodes=4", *SMALL, "--out", out, "-n", 10)
    assert other.exit_code == 2 and "or with other options; give another --out" in " ".join(
        other.stderr.split()
    )


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("medusa:depth=2", (), "medusa has no option 'depth'"),
        (
            "magic",
            (),
            "there is no method 'magic'. There are: blockwise, dflash, draft_model, eagle, early_exit",
        ),
        ("medusa", ("--objective", "luck"), "there is no objective 'luck'"),
        ("medusa", ("--length", "4000"), "the model's context is 96; give --length 96 or less"),
        ("medusa", ("--data", "/nowhere.jsonl"), "cannot read /nowhere.jsonl"),
    ],
)
def test_mistakes(run: Run, method: str, options: Any, message: str, tmp_path: Path) -> None:
    result = run(method, *SMALL, "--out", tmp_path / "out", *options)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output
