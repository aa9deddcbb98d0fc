"""Where each option of a target can be set: what the guide's table says, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import outpace
from models import tiny_llama
from outpace.cli import app
from outpace.core import OutpaceError, TargetOptions
from outpace.targets.gpu.graphs import Eager

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "generate.md"
ROW = re.compile(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|$", re.MULTILINE)
TABLE = {name: places for name, *places in ROW.findall(GUIDE.read_text("utf-8"))}
# A value of each that asks for something else than the usual; and what it needs besides.
VALUES: dict[str, dict[str, Any]] = {
    "static": {"static": True},
    "check": {"check": False},
    "runner": {"runner": Eager(), "static": True},
    "exact": {"exact": False},
    "plan": {"plan": "stock"},
    "quantise": {"quantise": "int8"},
    "stock": {"stock": True},
}


def test_the_table_has_every_option() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(TABLE)
    assert list(TABLE) == [field.name for field in fields(TargetOptions)] == list(VALUES)


TOGETHER = (
    ("static", "check", "runner", "exact", "plan"),
    ("quantise",),
    ("stock",),
)


@pytest.mark.parametrize("names", TOGETHER)
def test_load(names: tuple[str, ...]) -> None:
    given = {name: value for one in names for name, value in VALUES[one].items()}
    dtype = "bfloat16" if "quantise" in names else "float32"
    target: Any = outpace.load(dtype=dtype, device="cpu", **{"check": False, **given}).target
    assert {name: getattr(target.options, name) for name in given} == given
    assert {TABLE[name][0] for name in names} == {"yes"}


@pytest.mark.parametrize("name", TABLE)
def test_accelerate(name: str) -> None:
    said, given = TABLE[name][1], VALUES[name]
    if said == "`False`":
        outpace.accelerate(tiny_llama(), "none", **{name: False})
    if said == "yes":
        dtype = torch.bfloat16 if name == "quantise" else torch.float32
        outpace.accelerate(tiny_llama(dtype=dtype), "none", **given)
    else:
        with pytest.raises(OutpaceError, match="leave it out"):
            outpace.accelerate(tiny_llama(), "none", **given)


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "serve"])
def test_commands(command: str) -> None:
    options = {option for parameter in get_command(app).commands[command].params for option in parameter.opts}  # type: ignore[attr-defined]
    settable = {name for name in TABLE if f"--{name}" in options}
    assert settable == {name for name, places in TABLE.items() if places[2] == "yes"}
