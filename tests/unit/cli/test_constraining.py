"""The option --constrain of `outpace generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outpace.cli.app import app
from outpace.cli.generate import constraint_of
from outpace.core import OutpaceError, StructuredOutputs


def test_values_are_texts_or_files(tmp_path: Path) -> None:
    file = tmp_path / "person.json"
    file.write_text('{"type": "object"}\n', "utf-8")
    for value in (str(file), '{"type": "object"}'):
        assert constraint_of([f"json={value}"]) == StructuredOutputs(json={"type": "object"})
    assert constraint_of(["regex=a=b"]) == StructuredOutputs(regex="a=b")
    assert constraint_of(["choice=red", "choice=green"]) == StructuredOutputs(choice=["red", "green"])
    assert constraint_of([]) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["red"], "takes KIND=VALUE"),
        (["shape=a"], "takes KIND=VALUE"),
        (["regex="], "takes KIND=VALUE"),
        (["regex=a", "regex=b"], "two values of regex"),
        (["regex=a", "choice=b"], "regex and choice"),
        (["json=nope"], "no JSON object"),
    ],
)
def test_what_is_wrong_is_named(given: list[str], said: str) -> None:
    with pytest.raises(OutpaceError, match=said):
        constraint_of(given)


def test_generate_constrains_drafted_and_plain() -> None:
    asked = [
        "generate",
        "-p",
        "Once",
        "-n",
        "40",
        "--json",
        "--constrain",
        'grammar=root ::= "(" root ")" | "a"+ "."',
    ]
    texts = []
    for drafter in ("none", "suffix"):
        result = CliRunner().invoke(app, [*asked, "--drafter", drafter])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert texts[0] == texts[1] and texts[0].strip("()a") == "."
