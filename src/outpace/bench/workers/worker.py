"""Answers what it is asked on standard input, a JSON object a line; see ``bench/peers.py``.

Run as a script by the Python of another environment, with the name of the module beside it that decodes.
The first line says what to load, each other one what to decode.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_LONGEST = 300  # characters of an error


def main() -> None:
    # Libraries print to standard output; the answers must not be among it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    decoder: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if decoder is None:
                decoder = import_module(sys.argv[1]).Decoder(asked)
                answer({"versions": versions(decoder.packages)})
            else:
                answer(decoder.run(asked))
        except Exception as error:  # told to whoever asked
            answer({"error": said(error)})


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Python's version, and those of the packages that are installed here."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def said(error: Exception) -> str:
    """What an error says, on one line: where a library checks options, the first one is not the reason."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:_LONGEST]}" + ("..." if len(words) > _LONGEST else "")


if __name__ == "__main__":
    main()
