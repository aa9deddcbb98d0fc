"""Losses of GGUF files by outpace's own functions and by llama.cpp, on the same text.

    OMP_NUM_THREADS=1 PYTHONPATH=lab/tools python lab/measure/gguf_loss.py TEXT MODEL.gguf ...

Run in the environment of `make test-llamacpp`. TEXT is a file whose first 8,192 tokens are scored, in nats
per token, over windows of 512.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rounded import loss

from outpace.loading import load
from outpace.targets import Target

_TOKENS = 8192


def main(text: Path, files: list[str]) -> None:
    torch.set_num_threads(1)
    print("| file | outpace | llama.cpp | difference |\n| --- | ---: | ---: | ---: |")
    for file in files:
        own = load(file, backend="native")
        tokens = own.tokens(text.read_text("utf-8")[: 8 * _TOKENS])[:_TOKENS]
        ours = loss(own.target, tokens)
        theirs = loss(Target(file, threads=1, exact=False, check=False), tokens)
        print(f"| {Path(file).stem} | {ours:.4f} | {theirs:.4f} | {ours - theirs:+.4f} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
