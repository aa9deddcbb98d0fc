"""``outpace search`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from folders import save_llama
from outpace.cli import app
from outpace.cli.interrupt import Interrupt
from outpace.core import SamplingParams
from outpace.drafters import load_drafter
from outpace.loading import load
from outpace_lab.cli import search

Run = Callable[..., Any]
SMALL = ["--trials", 4, "-n", 12, "--num-draft-tokens", 2]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "deep", layers=4)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, deep: Path, tmp_path: Path) -> Run:
    pytest.importorskip("optuna")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prompts = "".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(5))
    (tmp_path / "prompts.jsonl").write_text(prompts + json.dumps({"prompt": "x" * 200}) + "\n")
    data = ["--data", tmp_path / "prompts.jsonl", "-m", deep, "--device", "cpu"]
    return lambda *more: CliRunner().invoke(app, ["search", *map(str, [*data, *SMALL, *more])])


def test_layers_are_found_written_and_skipped(run: Run, deep: Path, tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    result = run("--prompts", 3, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["prompts"] == 3 and found["layers"] == 4 and 0 < len(found["skip"]) < 4
    assert "trials: 4 of 4" in result.stderr and "best so far: skip" in result.stderr
    assert "left out, since they fill the model's context of 96: 1 prompts" in result.stderr
    assert json.loads(out.read_text())["skip"] == found["skip"]
    assert found["drafter"] == f"self_speculative:skip={out},num_speculative_tokens=2"
    model, params = load(str(deep), device="cpu"), SamplingParams(max_new_tokens=12)
    prompts = [model.encode("say 1")]
    (fast,) = model.engine(found["drafter"], adaptive=False).generate(prompts, params)
    assert fast.stats.drafted > 0
    assert fast.tokens == model.engine().generate(prompts, params)[0].tokens
    again = run("--prompts", 3, "--out", out)
    assert again.exit_code == 2 and "exists and would be lost" in again.stderr
    # Without a file the layers are in the drafter's name itself.
    printed = run("--prompts", 3)
    skip = "+".join(map(str, found["skip"]))
    assert f"self_speculative:skip={skip},num_speculative_tokens=2" in printed.stdout
    assert load_drafter(f"self_speculative:skip={skip},num_speculative_tokens=2")


@pytest.mark.parametrize(("steps", "finds"), [(0, False), (30, True)])
def test_ctrl_c_leaves_the_best_so_far(
    run: Run, monkeypatch: pytest.MonkeyPatch, steps: int, finds: bool
) -> None:
    asked = []

    class Pressed(Interrupt):
        """Ctrl-C, after some steps of decoding."""

        @property
        def raised(self) -> bool:
            asked.append(True)
            return len(asked) > steps

        @raised.setter
        def raised(self, value: bool) -> None:
            pass

    monkeypatch.setattr(search, "Interrupt", Pressed)
    result = run("--trials", 500, "--json")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    if finds:
        assert 0 < json.loads(result.stdout)["trials"] < 30
    else:
        assert not result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--measure", "hours"), "there is no measure 'hours'. There are: counts, seconds"),
        (("--out", "layers.txt"), "--out must end in .json"),
        (("--out", "/nowhere/at/all.json"), "no such folder"),
        (("--data", "/nowhere.jsonl"), "cannot read /nowhere.jsonl"),
        (("-n", "0"), "nothing was decoded: allow new tokens"),
    ],
)
def test_mistakes(run: Run, options: Any, message: str) -> None:
    result = run(*options)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_training_it_names_the_search(run: Run, deep: Path, tmp_path: Path) -> None:
    options = ["--data", tmp_path / "prompts.jsonl", "-m", deep, "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, ["train", "self_speculative", *map(str, options)])
    assert result.exit_code == 2 and "`outpace search` finds the layers" in result.stderr
