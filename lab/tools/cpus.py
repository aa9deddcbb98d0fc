"""Run tests once per instruction set that this processor can be limited to: python lab/tools/cpus.py [ARGS]

ARGS are passed to pytest; without any, those of steps: self-test, bits, and a part of the matrix of drafters.
"""

from __future__ import annotations

import os
import subprocess
import sys

from outpace.native.instructions import LIMITS, NATIVE, VARIABLE, instructions, limits
from outpace.native.systems import machine

TESTS = [
    *(f"tests/unit/targets/test_{name}.py" for name in ("self_test", "native", "exact", "causal")),
    *(f"tests/unit/native/test_{name}.py" for name in ("layers", "instructions")),
    *("tests/lossless/test_bit_exact.py", "tests/lossless/test_joins.py"),
]


def main(arguments: list[str]) -> int:
    own = {name: value for name, value in os.environ.items() if name not in limited()}
    names = [*limits(machine(), instructions()), NATIVE]
    codes = {}
    for name in names:
        variables = LIMITS[name].variables if name in LIMITS else {}
        print("==", name, *(f"{key}={value}" for key, value in variables.items()), flush=True)
        command = [sys.executable, "-m", "pytest", *(arguments or TESTS)]
        codes[name] = subprocess.run(
            command, env={**own, **variables, VARIABLE: name}, check=False
        ).returncode
    for name in LIMITS:
        state = "not here" if name not in codes else "failed" if codes[name] else "passed"
        print(f"{name:12} {state}")
    print(f"{NATIVE:12} {'failed' if codes[NATIVE] else 'passed'}")
    return max(codes.values())


def limited() -> set[str]:
    """Variables that limit a library, to be set for each run anew."""
    return {name for one in LIMITS.values() for name in one.variables}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
