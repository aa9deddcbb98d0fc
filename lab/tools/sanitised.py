"""Run tests with compiled functions under the sanitisers of addresses and of undefined behaviour.

    python lab/tools/sanitised.py [ARGS]

ARGS are passed to pytest; without any, the unit tests of targets, of the cache and of drawing. It needs gcc
(or the compiler in ``$CC``) with its libasan. The compiler is called by a script that adds the sanitisers,
and libasan is loaded first, so that it sees the memory of torch and NumPy too. Leaks are not looked for:
Python and torch leave much to the end of a process.

A sanitiser ends the process at the first fault and reports the function; ``-v`` shows the test.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = [
    "tests/unit/targets",
    "tests/unit/draws",
    *(f"tests/unit/native/test_{name}.py" for name in ("build", "layers", "pointers", "shared")),
    "tests/unit/test_cache.py",
]
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Reads a tensor, and then one number behind it, which a sanitiser has to report.
BEYOND = """
import torch
from outpace.native import layers
found = layers.functions(torch.float32)
assert not isinstance(found, str), found
given, scores, totals, places = (torch.zeros(size) for size in (64, 1, 1, 2))
for size in (64, 65):
    found.best(1, size, 1, *(one.data_ptr() for one in (given, scores, places, totals)))
    print("read", size, flush=True)
"""


def main(arguments: list[str]) -> int:
    compiler = shlex.split(os.environ.get("CC", "")) or ["gcc"]
    libraries = []
    for name in ("libasan.so", "libstdc++.so.6"):  # of which libasan needs the throwing of exceptions
        command = [*compiler, f"-print-file-name={name}"]
        found = Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip())
        if not found.is_absolute():
            print(f"{shlex.join(compiler)} has no {name}; set CC to a gcc that has one", file=sys.stderr)
            return 2
        libraries.append(str(found.resolve()))
    with tempfile.TemporaryDirectory(prefix="outpace-sanitised-") as folder:
        script = Path(folder) / "cc"
        script.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {shlex.join(compiler)} "$@" {FLAGS}\n')
        script.chmod(0o700)
        environment = {
            **os.environ,
            "CC": str(script),
            "OUTPACE_CACHE": str(Path(folder) / "cache"),
            "LD_PRELOAD": ":".join(libraries),
            # To files: pytest keeps what a process writes before it dies.
            "ASAN_OPTIONS": f"detect_leaks=0:log_path={folder}/report",
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={folder}/report",
        }
        if why := unguarded(environment, Path(folder)):
            print(why, file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", *(arguments or TESTS)]
        status = subprocess.run(command, env=environment, check=False).returncode
        print(reports(Path(folder)), end="", file=sys.stderr)
        return status


def reports(folder: Path) -> str:
    """The reports of the sanitisers since the last call."""
    found = sorted(folder.glob("report*"))
    texts = [file.read_text("utf-8", errors="replace") for file in found]
    for file in found:
        file.unlink()
    return "".join(texts)


def unguarded(environment: dict[str, str], folder: Path) -> str:
    """The reason why a fault would not be reported; empty if it would."""
    command = [sys.executable, "-c", BEYOND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reported = reports(folder)
    if done.stdout == "read 64\n" and "AddressSanitizer: heap-buffer-overflow" in reported:
        return ""
    return f"the sanitisers do not work here:\n{done.stdout}{done.stderr}{reported}"


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("functions are compiled under Linux alone")
    sys.exit(main(sys.argv[1:]))
