"""One of two processes that train together: a program that ``test_processes.py`` starts twice.

    RANK=0 WORLD_SIZE=2 ... python one_of_two.py FOLDER

It leaves its weights, and what the command line wrote, in the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from learning import METHODS, new
from models import tiny_llama
from outpace.cli import app
from outpace.targets import Target
from outpace_lab.train import loop
from outpace_lab.train.data import Document
from outpace_lab.train.loop import Training, train
from outpace_lab.train.metric import Replay
from outpace_lab.train.modules.draft_model import DraftConfig, TrainedDraft

TARGET = Target(tiny_llama(vocabulary=41, context=64, layers=3))
SETTINGS = Training(
    steps=4, rows=1, accumulate=2, learning_rate=0.02, evaluate_every=2, objective="forward_kl"
)
# Of different lengths, so that the processes do not have as many places to learn.
ROWS = [[Document(tuple((7 * p + r) % 40 + 1 for p in range(6 + 3 * (r % 4))), 2)] for r in range(8)]


def draft() -> TrainedDraft:
    torch.manual_seed(0)
    return TrainedDraft.new(DraftConfig(hidden_size=16, depth=1, num_speculative_tokens=3), TARGET).double()


def weights(out: Path, stop: int | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    """Weights of a draft model after training; interrupted after the step ``stop``."""
    module = draft()

    def report(entry: Mapping[str, Any]) -> None:
        if entry["step"] == stop and "loss" in entry:
            raise KeyboardInterrupt

    train(module, ROWS, ROWS[:2], replace(SETTINGS, **changes), out, report)
    return dict(module.state_dict())


def interrupted(out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights of a run that was interrupted and resumed."""
    try:
        weights(out, stop=3, **changes)
    except KeyboardInterrupt:
        return weights(out, **changes)
    raise AssertionError("the run was not interrupted")


def of_every_method(out: Path) -> dict[str, torch.Tensor]:
    found = {}
    for method in METHODS:
        torch.manual_seed(0)
        module = new(method, Target(tiny_llama(dtype=torch.float32, layers=3)))
        rows = [[Document(tuple((7 * p + r) % 90 + 1 for p in range(20)), 3)] for r in range(7)]
        settings = Training(steps=2, rows=2, evaluate_every=2, learning_rate=0.01)
        train(module, rows[3:], rows[:2], settings, out / method, calibration=rows[2:3])
        found |= {f"{method} {name}": weight for name, weight in module.state_dict().items()}
    return found


def stopped_early(out: Path, rank: int) -> int:
    """Steps until training stops, where the second process measures a gain that the first does not see."""
    measured = loop.evaluate

    def evaluate(*given: Any) -> tuple[Replay, float]:
        found, loss = measured(*given)
        return (Replay(1, measures.__next__()) if rank else found), loss

    measures = iter(range(1, 100))
    loop.evaluate = evaluate  # type: ignore[assignment]
    settings = replace(SETTINGS, steps=20, patience=1, learning_rate=1e-12)
    reached = train(draft(), ROWS, ROWS[:2], settings, out)
    loop.evaluate = measured
    return reached.step


def command(model: Path, out: Path) -> dict[str, Any]:
    """The files that ``outpace train`` writes."""
    small = "--steps 4 --evaluate-every 2 --rows 1 --length 40 --held-out 0.3 -n 10 --device cpu --json"
    where = ["-m", str(model), "--data", str(model / "prompts.jsonl"), "--out", str(out)]
    result = CliRunner().invoke(app, ["train", "medusa:heads=2,max_nodes=4", *where, *small.split()])
    return {"code": result.exit_code, "out": result.stdout, "error": result.stderr}


def main(folder: Path) -> None:
    """Train in every way."""
    rank = int(os.environ["RANK"])
    out = folder / "shared"
    found = {
        "whole": weights(out / "whole"),
        "parts": interrupted(out / "parts"),
        "own": weights(out / "own", on_policy=0.5),
        "own parts": interrupted(out / "own parts", on_policy=0.5),
        "bf16": weights(out / "bf16", bf16=True),
        "methods": of_every_method(out),
    }
    torch.save(found, folder / f"weights-{rank}.pt")
    said = {
        "stopped": stopped_early(out / "stopped", rank),
        "command": command(folder / "model", out / "command"),
    }
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
