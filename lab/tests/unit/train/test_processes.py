"""Training in two processes, as a launcher starts them: as one with twice the rows, and with one voice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

import one_of_two
from folders import save_llama
from outpace.core import OutpaceError
from outpace_lab.train.processes import Processes, own_device

PROGRAM = Path(one_of_two.__file__)
TESTS = PROGRAM.parent
SECONDS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of two processes."""
    folder = tmp_path_factory.mktemp("processes")
    save_llama(folder / "model")
    prompts = "".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(20))
    (folder / "model" / "prompts.jsonl").write_text(prompts)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(TESTS), *filter(None, sys.path)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment = os.environ | shared | {"PYTHONPATH": os.pathsep.join(paths)}
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAM, folder],
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> list[dict[str, dict[str, torch.Tensor]]]:
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_both_end_with_the_same_weights(weights: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    first, second = weights
    for run, found in first.items():
        assert all(torch.equal(weight, second[run][name]) for name, weight in found.items()), run


@pytest.mark.slow
def test_two_processes_learn_what_one_does_with_twice_the_rows(
    weights: list[dict[str, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    one = one_of_two.weights(tmp_path, rows=2)
    start = one_of_two.draft().state_dict()
    for name, weight in weights[0]["whole"].items():
        assert torch.allclose(weight, one[name], atol=1e-9)
        assert not torch.allclose(weight, start[name], atol=1e-3)


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(
    folder: Path, weights: list[dict[str, dict[str, torch.Tensor]]]
) -> None:
    for whole, parts in (("whole", "parts"), ("own", "own parts")):
        for name, weight in weights[0][whole].items():
            assert torch.equal(weight, weights[0][parts][name])
        logs = [(folder / "shared" / run / "log.jsonl").read_text() for run in (whole, parts)]
        assert logs[0] == logs[1]
        steps = [json.loads(line)["step"] for line in logs[0].splitlines()]
        assert steps == [0, 1, 2, 2, 3, 4, 4]


@pytest.mark.slow
def test_a_checkpoint_is_whole_and_nothing_is_left_beside_it(folder: Path) -> None:
    for run in ("whole", "parts", "command"):
        found = {file.name for file in (folder / "shared" / run / "checkpoint").iterdir()}
        assert {f"random_states_{rank}.pkl" for rank in range(2)} | {"progress.json"} < found
        assert [f.name for f in (folder / "shared" / run).iterdir() if "checkpoint." in f.name] == []


@pytest.mark.slow
def test_both_stop_together_though_they_measure_otherwise(said: list[dict[str, Any]]) -> None:
    assert [found["stopped"] for found in said] == [2, 2]


@pytest.mark.slow
def test_only_the_first_speaks_and_writes(folder: Path, said: list[dict[str, Any]]) -> None:
    first, second = (found["command"] for found in said)
    assert first["code"] == 0 == second["code"], first["error"] + second["error"]
    assert (second["out"], second["error"]) == ("", "")
    found = json.loads(first["out"])
    assert found["processes"] == 2 and found["steps"] == 4
    assert first["error"].count("steps: 4 of 4") == 1
    out = folder / "shared" / "command"
    assert len((out / "answers.jsonl").read_text().splitlines()) == 20
    assert json.loads((out / "answers.json").read_text())["answered"] == 20
    assert json.loads((out / "provenance.json").read_text())["result"]["processes"] == 2
    # 4 steps of a row in each process, of at most 40 tokens and more than half full.
    assert 4 * 2 * 20 < found["tokens_seen"] <= 4 * 2 * 40


@pytest.mark.parametrize(("started", "device", "fits"), [(4, 1, True), (4, 2, False), (1, 2, True)])
def test_a_gpu_of_another_process_is_refused(
    started: int, device: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(
        device=torch.device("cuda", 1) if started > 1 else torch.device("cuda"),
        use_distributed=started > 1,
        process_index=1 if started > 1 else 0,
        num_processes=started,
    )
    monkeypatch.setattr(accelerate, "PartialState", lambda cpu: state)
    with nullcontext() if fits else pytest.raises(OutpaceError, match=r"process cuda:1.*on cuda:2"):
        assert Processes(torch.device("cuda", device)).count == started


def test_each_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [own_device(device) for device in (None, "cuda")] == [None, "cuda"]
    monkeypatch.setenv("LOCAL_RANK", "3")
    given = (None, "cuda", "cuda:1", "cpu")
    assert [own_device(device) for device in given] == ["cuda:3", "cuda:3", "cuda:1", "cpu"]
