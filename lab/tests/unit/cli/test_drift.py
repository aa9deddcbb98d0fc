"""``outpace drift`` from a user's point of view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
# Anything drafted stands, so that the output moves: the copies of prompt lookup are not what is said.
LOSSY = ("--verifier", "bild:threshold=99", "-d", "prompt_lookup:min_ngram=1")


def test_how_far_a_lossy_verifier_moves_the_output(run: Run, folder: Path) -> None:
    args = ("-m", folder, "-p", "abcabcabc", "-n", 24, *LOSSY)
    result = run("drift", *args)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "tokens changed" in said and "loss (nats per token)" in said and "lossy" in said
    drift = json.loads(run("drift", *args, "--json").stdout)
    both = json.loads(run("generate", *args, "--compare", "--repeats", 1, "--json").stdout)
    pairs = list(zip(both["plain"]["tokens"], both["accelerated"]["tokens"], strict=True))
    assert drift["changed"] == sum(a != b for a, b in pairs) > 0 and drift["places"] == 24
    assert drift["share_changed"] == drift["changed"] / 24
    assert drift["loss"] > drift["plain_loss"] > 0


def test_match_moves_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('"aba"\n"bab"\n', "utf-8")
    args = ("-m", folder, "-f", tmp_path / "two.jsonl", "-n", 8, "--verifier", "match", "--json")
    found = json.loads(run("drift", *args).stdout)
    assert found["prompts"] == 2 and found["tokens"] == found["plain_tokens"] == 16
    assert found["changed"] == 0 and found["loss"] == found["plain_loss"]
