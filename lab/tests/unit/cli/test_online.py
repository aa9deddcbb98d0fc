"""``--observer online`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.core import SamplingParams
from outpace.drafters.heads.medusa import MedusaConfig
from outpace.loading import Loaded
from outpace_lab.train import Online
from outpace_lab.train.modules.heads import TrainedMedusa

Run = Callable[..., Any]
PROMPTS = [f"say {number}" for number in range(8)]


class Thorough(Online):
    """Learning with a round in any case, independent of the clock."""

    def close(self) -> None:
        super().close()
        if not self.rounds:
            self.step()


@pytest.fixture
def heads(model: Loaded, tmp_path: Path) -> str:
    TrainedMedusa.new(MedusaConfig(heads=2, own_head=True, max_nodes=4), model.target).save(
        tmp_path / "heads"
    )
    return f"medusa:path={tmp_path / 'heads'}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Run:
    monkeypatch.setattr("outpace_lab.train.Online", Thorough)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return lambda command, *more, **options: CliRunner().invoke(
        app, [command, *map(str, ["-m", folder, "--device", "cpu", *more])], **options
    )


def test_many_prompts_teach_the_drafter(run: Run, heads: str, model: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "learnt"
    options = ["-f", tmp_path / "prompts.jsonl", "-d", heads, "--json", "-n", 20, "--ignore-eos"]
    result = run("generate", *options, "--observer", f"online:measured=20,updates=3,out={out}")
    assert result.exit_code == 0, result.output
    found = [json.loads(line)["tokens"] for line in result.stdout.splitlines()]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain = model.engine().generate([model.encode(prompt) for prompt in PROMPTS], params)
    assert found == [one.tokens for one in plain]
    assert "online: 1 rounds" in result.stderr and "tokens per step expected" in result.stderr
    (first,) = json.loads((out / "online.json").read_text())
    assert first["places"] > 0
    (again,) = model.engine(f"medusa:path={out}", adaptive=False).generate([model.encode(PROMPTS[0])], params)
    assert again.tokens == plain[0].tokens and again.stats.drafted


def test_one_prompt_is_too_little_and_says_so(run: Run, heads: str) -> None:
    result = run("generate", "-p", "say", "-d", heads, "-n", 5, "--observer", "online")
    assert result.exit_code == 0
    assert "nothing was learnt; a round begins every 1024 tokens" in " ".join(result.stderr.split())
    result = run("generate", "-p", "say", "-d", heads, "-n", 5, "--observer", "online:every=9")
    assert "a round begins every 9 tokens" in " ".join(result.stderr.split())


def test_a_chat_teaches_the_drafter(run: Run, heads: str, tmp_path: Path) -> None:
    talk = {"input": "\n".join([*PROMPTS, "/exit"]) + "\n"}
    out = tmp_path / "learnt"
    options = ["-d", heads, "-n", 12, "-t", 0.9, "--seed", 3]
    plain, online = (
        run("chat", *options, **talk),
        run("chat", *options, "--observer", f"online:measured=20,out={out}", **talk),
    )
    assert online.exit_code == 0, online.output
    assert plain.stdout == online.stdout and "online: 1 rounds" in online.stderr
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--observer", "online"), "suffix has no weights of its own to learn"),
        (("-d", "early_exit", "--observer", "online"), "give path=FOLDER"),
        (("--observer", "online", "--compare"), "leave one of --compare and --observer out"),
        (("--observer", "online", "--parallel", "draft"), "leave one of --observer and --parallel out"),
        (("-d", "HEADS", "--observer", "online:often=9"), "online has no option 'often'; it has: tokens"),
        (("-d", "HEADS", "--observer", "online:every=x"), "every must be a whole number, not 'x'"),
        (("-d", "HEADS", "--observer", "online:length=4"), "length must be at least 8, not 4"),
        (("--observer", "online:out=."), "out=. exists already"),
        (("--observer", "onlin"), "there is no observer 'onlin'. Did you mean 'online'?"),
        (
            ("-d", "HEADS", "--observer", "online", "--verifier", "rejection", "-t", "1", "--seed", "1"),
            "background",
        ),
    ],
)
def test_mistakes(run: Run, heads: str, options: tuple[str, ...], message: str) -> None:
    given = [heads if option == "HEADS" else option for option in options]
    result = run("generate", "-p", "say", *given)
    assert message in " ".join(result.stderr.split()), result.output
    assert result.exit_code == 2 and "Traceback" not in result.output
