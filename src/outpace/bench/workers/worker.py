"""Answers what it is asked on standard input, a JSON object a line; see ``bench/peers.py``.

Run as a script by the Python of another environment, with the name of the module beside it that decodes.
The first line says what to load, each other one what to decode.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


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
                answer({"version": decoder.version})
            else:
                answer(decoder.run(asked))
        except Exception as error:  # told to whoever asked
            lines = str(error).strip().splitlines() or [""]
            answer({"error": f"{type(error).__name__}: {lines[0]}"})


if __name__ == "__main__":
    main()
