"""``outpace generate --reference``, from the command line to the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.core import SamplingParams
from outpace.loading import load

PROMPT = "Text: A smal boat croses the lake every evning.\nCorrected:"
TOKENS = 40
OPTIONS = ("--raw", "--max-new-tokens", TOKENS, "--device", "cpu")


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, (*args, *OPTIONS))])


@pytest.fixture(scope="module")
def said() -> str:
    """The embedded model's plain output, cut to a text that is tokenised to the same tokens again."""
    model = load(device="cpu")
    params = SamplingParams(max_new_tokens=TOKENS)
    (generation,) = model.engine().generate([model.tokens(PROMPT)], params)
    assert generation.finish_reason == "eos"
    assert model.plain_tokens(generation.text or "") == generation.tokens[:-1]
    assert len(generation.tokens) > 10
    return generation.text or ""


def test_a_reference_makes_it_faster(tmp_path: Path, said: str) -> None:
    (tmp_path / "said.txt").write_text(said, "utf-8")
    args = ("--prompt", PROMPT, "--drafter", "reference:prompt=false", "--no-adaptive", "--json")
    without = json.loads(run(*args).stdout)
    with_it = json.loads(run(*args, "--reference", tmp_path / "said.txt").stdout)
    assert with_it["text"] == without["text"] == said
    assert without["stats"]["steps"] == len(without["tokens"])
    assert with_it["stats"]["steps"] <= 2
    # The plain side of a comparison needs none.
    compared = run(*args[:-1], "--reference", tmp_path / "said.txt", "--compare", "--repeats", 1)
    assert compared.exit_code == 0, compared.output
    assert "equal: yes" in compared.stdout


def test_references_of_lines(tmp_path: Path, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT, "references": [said]}, {"prompt": PROMPT}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    args = ("--file", file, "--json", "--batch", 2)
    result = run(*args, "--drafter", "reference:prompt=false", "--no-adaptive")
    found = {row["index"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert found[0]["stats"]["steps"] <= 2
    assert found[1]["stats"]["steps"] == len(found[1]["tokens"])
    refused = run(*args, "--drafter", "lookahead")
    assert refused.exit_code == 2
    assert "reads no references; use --drafter reference" in " ".join(refused.stderr.split())
