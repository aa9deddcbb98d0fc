"""Server of requests on standard input, one JSON object per line; see ``bench/peers.py``.

Run as a script by the Python of another environment. Its argument is the name of a module in the same folder,
whose ``Decoder`` adapts a library:

- ``packages``: names of the packages whose versions are reported.
- ``Decoder(load)``: loads the model of the first line.
- ``begin(asked)``: prepares the request of each further line; its time is not measured.
- ``decode()``: decodes; returns the outputs' token ids, and the seconds to the first tokens.
- ``counts(outputs)``: forwards, steps, drafted and accepted tokens of that run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_LONGEST = 300  # characters of an error


def main() -> None:
    # Libraries print to standard output, which must contain only the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    decoder: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            if decoder is None:
                decoder = import_module(sys.argv[1]).Decoder(asked)
                answer = {"versions": versions(decoder.packages)}
            else:
                answer = run(decoder, asked)
        except Exception as error:  # reported to the asking process
            answer = {"error": reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run(decoder: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Decode one request: the fields of ``outpace.bench.runs.Run``."""
    decoder.begin(asked)
    began = time.perf_counter()
    outputs, first = decoder.decode()
    seconds = time.perf_counter() - began
    return {
        "outputs": outputs,
        "seconds": seconds,
        "first_seconds": min(first, seconds),
        "first_tokens": len(outputs),
        **decoder.counts(outputs),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Look up the versions of Python and of the installed ones of these packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def reason(error: Exception) -> str:
    """Format an error on one line; all its lines are joined, since the reason may be in a later one."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:_LONGEST]}" + ("..." if len(words) > _LONGEST else "")


if __name__ == "__main__":
    main()
