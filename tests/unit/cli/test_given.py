"""Commands that take one object of options."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outpace.cli.app import app
from outpace.cli.given import taking

Count = Annotated[int, typer.Option("--count", help="How many.")]


@dataclass(frozen=True, kw_only=True)
class Counting:
    count: Count = 1


@dataclass(frozen=True, kw_only=True)
class Naming:
    name: Annotated[str, typer.Option("--name", help="Whose.")] = "a"


@dataclass(frozen=True, kw_only=True)
class Both(Naming, Counting):
    loud: Annotated[bool, typer.Option("--loud", help="Loudly.")] = False


def test_the_fields_are_the_options_and_their_values_one_object() -> None:
    found: list[tuple[str, Both]] = []
    made = typer.Typer()

    @made.command("say")
    @taking(Both)
    def say(context: typer.Context, given: Both) -> None:
        found.append((str(context.info_name), given))

    assert list(inspect.signature(say).parameters) == ["context", "name", "count", "loud"]
    assert CliRunner().invoke(made, []).exit_code == 0
    assert CliRunner().invoke(made, ["--count", "3", "--loud"]).exit_code == 0
    assert [given for _, given in found] == [Both(), Both(count=3, loud=True)]
    assert CliRunner().invoke(made, ["--count", "x"]).exit_code == 2


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "demo", "env"])
def test_a_command_that_loads_a_model_takes_the_options_of_all_that_do(command: str) -> None:
    known = {name for own in typer.main.get_command(app).commands[command].params for name in own.opts}
    assert known >= {"--model", "--device", "--dtype", "--trust-remote-code", "--backend", "--threads"}
