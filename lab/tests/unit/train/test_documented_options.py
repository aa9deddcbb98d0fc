"""The options of training and of online learning are in their pages, with their defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from outpace.spec import load
from outpace_lab.train import Learning
from outpace_lab.train.methods import LEARNED

PAGES = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("method", LEARNED)
def test_options_of_training_are_listed_with_their_defaults(method: str) -> None:
    text = (PAGES / "training.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `?([a-z_ ]+)`? \| (.*) \|$", text, re.MULTILINE))
    cls = LEARNED[method].config_type
    named = re.findall(r"`([a-z_]+)(?:=([^`]+))?`", rows[method])
    if rows[method].count("and the size"):
        own = {name for name, _ in named}
        size = re.findall(r"`([a-z_]+)(?:=([^`]+))?`", rows["the size"])
        named += [(name, value) for name, value in size if name not in own | {"rope_parameters"}]
    assert {name for name, _ in named} == {field.name for field in fields(cls)}
    given = dict(reversed([(name, value) for name, value in named if value]))  # the first is the default
    assert load("method", {method: cls}, f"{method}:" + ",".join(map("=".join, given.items()))) == cls()
    # Those without a value are chosen for the target.
    assert all(not getattr(cls(), name) or name == "rope" for name, value in named if name not in given)


def test_options_of_online_learning_are_listed_with_their_defaults() -> None:
    text = (PAGES / "online.md").read_text("utf-8")
    (table,) = re.findall(r"^\| option \| meaning \|\n(?:\|.*\n)*", text, re.MULTILINE)
    given = dict(re.findall(r"`([a-z_]+)=([^`]+)`", table))
    assert set(given) == {field.name for field in fields(Learning)}
    options = ",".join(map("=".join, given.items()))
    assert load("way to learn", {"online": Learning}, f"online:{options}") == Learning()
