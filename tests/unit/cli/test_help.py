"""``--help`` of every command, at the widths of terminals and of half of one."""

from __future__ import annotations

import os

import pytest
import torch

from helps import Path, check_help, commands, helped
from outpace.cli.layout import RARE
from outpace.cli.options import _use_threads
from outpace.native.processors import VARIABLE, usual_threads

COMMANDS = commands("outpace")


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_all_that_its_source_says(path: Path, columns: int) -> None:
    check_help(COMMANDS[path], helped(path, columns), columns)


def test_everyday_options_of_serve_come_first() -> None:
    shown = helped(("serve",))
    places = [
        shown.index(word) for word in ("--model", "--drafter", "--host", "--memory", RARE, "--stock", "-h,")
    ]
    assert places == sorted(places)
    assert len(shown.splitlines()) < 105


def test_every_command_that_takes_a_model_takes_threads() -> None:
    for path in COMMANDS:
        shown = helped(path)
        assert ("--threads" in shown) == ("--model" in shown and "--device" in shown), path


def test_threads_are_those_of_steps_torch_and_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for name in (VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    try:
        assert _use_threads(None) is None and os.environ[VARIABLE] == "1"
        assert _use_threads(before + 2) == before + 2 == torch.get_num_threads() == usual_threads().number
        assert os.environ["OMP_NUM_THREADS"] == str(before + 2)
    finally:
        torch.set_num_threads(before)
