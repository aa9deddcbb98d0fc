"""One model on several devices or in several processes, from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from typer.testing import CliRunner

from outpace.cli.app import app
from outpace.embedded import nano_drafter_path

ROOT = Path(__file__).parents[3]
PROMPT = "Question: What is 2 + 3? Answer:"
SAMPLED = ["--temperature", "0.7", "--seed", "5"]
LAYERS = '{"model.embed_tokens": "cpu", "": "cpu"}'


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def started(*command: str, processes: int = 1) -> subprocess.Popen[str]:
    """``outpace`` in a process, or by torchrun in several."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [sys.executable, *(several if processes > 1 else []), "-m", "outpace", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def generated(*options: str, processes: int = 1) -> tuple[list[str], str]:
    """The texts of one greedy and one sampled run over two prompts, and what was noted of them."""
    texts, notes = [], ""
    for more in ([], SAMPLED):
        process = started(
            "generate", "--dtype", "float64", "--prompt", PROMPT, "-n", "24", "--json", *more, *options,
            processes=processes,
        )  # fmt: skip
        out, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors[-2000:]
        texts.append(json.loads(out)["text"])
        notes += errors
    return texts, notes


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["draft", "tensor"])
def test_torchrun_decodes_as_one_process(mode: str) -> None:
    expected, _ = generated("--no-adaptive")
    texts, notes = generated("--no-adaptive", "--parallel", mode, processes=2)
    assert texts == expected
    assert "2 ranks" in notes
    assert ("rows per step" in notes) == (mode == "draft")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["draft", "tensor"])
def test_a_learned_drafter_is_refused_on_ranks(mode: str) -> None:
    process = started(
        "generate", "--parallel", mode, "--prompt", PROMPT,
        "--drafter", f"medusa:path={nano_drafter_path('medusa')}", processes=2,
    )  # fmt: skip
    out, errors = process.communicate(timeout=280)
    assert process.returncode != 0 and not out
    assert len(re.findall("use a drafter without trained parts", errors)) == 1, errors[-2000:]


@contextmanager
def served(mode: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two processes, and its address."""
    process = started(
        "serve", "--parallel", mode, "--parallel-timeout", "15", "--port", "0", "--dtype", "float64",
        "--memory", "0.2", processes=2,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if "ready after" in said:
                address = re.search(r"API +(http://\S+)/v1", said)
                assert address is not None
                yield process, address[1]
                return
        raise AssertionError(said)
    finally:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["draft", "tensor"])
def test_a_server_of_two_processes(mode: str) -> None:
    """Its texts are those of one process; when a process is killed, all of it ends with an error."""
    expected, _ = generated("--no-adaptive")
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": 24, "temperature": 0},
        {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.7, "seed": 5},
    ]
    with served(mode) as (process, address), httpx2.Client(base_url=address, timeout=120) as http:
        for body, text in zip(bodies, expected, strict=True):
            answer = http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == text
        refused = http.post("/v1/completions", json={**bodies[0], "logprobs": 1})
        assert (refused.status_code == 400) == (mode == "draft"), refused.text
        ranks = psutil.Process(process.pid).children(recursive=True)
        second = next(one for one in ranks if one.environ().get("RANK") == "1")
        second.send_signal(signal.SIGKILL)
        assert process.wait(60) != 0


@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_command_takes_a_device_map(command: str) -> None:
    pytest.importorskip("accelerate")
    options = {
        "generate": ["--prompt", PROMPT],
        "bench": ["--suite", "builtin", "--limit", "1", "--drafters", "none", "--peers", "none"],
        "serve": ["--port", "0"],
    }[command]
    found = CliRunner().invoke(app, [command, *options, "--device-map", '{"": 977}'])
    assert found.exit_code == 2
    assert "'cuda:977' cannot be used here" in found.stderr.replace("\n", " ")
    if command != "serve":  # which does not end
        options += ["-n", "4"] if command == "generate" else ["--max-new-tokens", "4"]
        for layers in ("auto", LAYERS):
            found = CliRunner().invoke(app, [command, *options, "--device-map", layers])
            assert found.exit_code == 0, found.stderr
