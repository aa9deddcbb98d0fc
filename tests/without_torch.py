"""Command lines run where torch, transformers and an extra are as if they were not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

_CHILD = """
import json, sys
from typer.testing import CliRunner

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "opentelemetry"):
            raise ModuleNotFoundError(f"no {name}", name=name)

sys.meta_path.insert(0, Without())
from outpace.cli.app import app
import outpace.cli
found = {words: CliRunner().invoke(app, words.split()) for words in json.loads(sys.argv[1])}
print(json.dumps({words: [one.exit_code, one.output] for words, one in found.items()}))
"""


def check_mistakes(mistakes: Mapping[str, str]) -> None:
    """Each command line ends as a user's mistake does, and says what belongs to it."""
    for words, (code, output) in _outputs(mistakes).items():
        assert code == 2 and mistakes[words] in output, (words, output)


def check_answers(answers: Mapping[str, str]) -> None:
    """Each command line does its work, and says what belongs to it."""
    for words, (code, output) in _outputs(answers).items():
        assert code == 0 and answers[words] in output, (words, output)


def check_beginnings(beginnings: Mapping[str, str]) -> None:
    """Each command line says this much before it imports torch, which ends it here."""
    for words, (code, output) in _outputs(beginnings).items():
        assert code == 1 and beginnings[words] in output, (words, output)


def _outputs(lines: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each command line."""
    command = [sys.executable, "-c", _CHILD, json.dumps(list(lines))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found
