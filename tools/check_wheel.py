"""Check an installed platform wheel where nothing can be compiled: python tools/check_wheel.py

The functions in C must come from the package, the embedded model must run on them, and the command must
answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from ctypes import CDLL
from pathlib import Path


def main() -> None:
    """Exit with a message if something is amiss."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(OUTPACE_CACHE=cache, CC="no-such-compiler", HF_HUB_OFFLINE="1")
        check()
        if made := list(Path(cache).rglob("native/*")):
            raise SystemExit(f"compiled although the package has libraries: {made}")


def check() -> None:
    """Check functions, plan and command."""
    import torch

    import outpace
    from outpace.native import draw, layers, move, packaged

    for found in (draw.functions(), move.functions(), *map(layers.functions, sorted(layers.DTYPES, key=str))):
        if not isinstance(found, CDLL):
            raise SystemExit(f"no functions: {found}")
        if Path(found._name).parent != packaged.LIBRARIES:
            raise SystemExit(f"{found._name} is not of the package in {packaged.LIBRARIES}")
        print(Path(found._name).name)
    plan = outpace.load(dtype="bfloat16").target.plan
    print(plan)
    if not plan.native:
        raise SystemExit(f"the layers are not compiled: {plan.why_not('native')}")
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, outpace {outpace.__version__}")
    prompt = ["--prompt", "def add(a, b):", "--max-new-tokens", "16"]
    subprocess.run([sys.executable, "-m", "outpace", "generate", *prompt], check=True)


if __name__ == "__main__":
    main()
