"""Tokens per step of several drafters on the same prompts, with intervals of their ratios.

    python lab/measure/acceptance.py --data DIR --over plain plain=draft_model:model=A kd=draft_model:model=B

Counts only, no times, so the machine may be busy. The embedded model decodes greedily in float32; `equal`
counts the outputs equal to plain decoding's. `over` is the number of steps of the drafter named by --over
divided by the drafter's own, over all prompts, with its 95% interval by a bootstrap over prompts (4,000
resamples): above 1, the drafter takes fewer steps for the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.bench.subject import encode, fitting
from outpace.bench.suites import load_suite
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import load

Steps = NDArray[np.int64]


def steps_of(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, batch: int
) -> tuple[list[list[int]], Steps, int]:
    """The outputs, the steps of each prompt, and the total number of tokens."""
    outputs, steps, tokens = [], [], 0
    for first in range(0, len(prompts), batch):
        for found in engine.generate(prompts[first : first + batch], params):
            outputs.append(found.tokens)
            steps.append(found.stats.steps)
            tokens += found.stats.tokens
        print(f"\r{first + batch} prompts", end="", file=sys.stderr)
    return outputs, np.array(steps), tokens


def over(mine: Steps, theirs: Steps, seed: int = 0) -> dict[str, Any]:
    """The ratio of their steps to mine, and its interval."""
    drawn = np.random.default_rng(seed).integers(len(mine), size=(4000, len(mine)))
    ratios = theirs[drawn].sum(axis=1) / mine[drawn].sum(axis=1)
    return {
        "ratio": float(theirs.sum() / mine.sum()),
        "interval": [float(value) for value in np.quantile(ratios, [0.025, 0.975])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("drafters", nargs="+", help="label=spec")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--suites", nargs="*", default=["gsm8k", "humaneval"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--over", required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    specs = dict(drafter.split("=", 1) for drafter in options.drafters)
    if options.over not in specs:
        raise SystemExit(f"--over must be one of {', '.join(specs)}")
    model = load()
    params = SamplingParams(max_new_tokens=options.new_tokens)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "suites": {}}
    for name in options.suites:
        suite = fitting(model, load_suite(name, options.data), options.new_tokens).first(options.limit)
        prompts = [encode(model, item) for item in suite.items]
        plain, _, _ = steps_of(Engine(model.target), prompts, params, options.batch)
        found: dict[str, tuple[Steps, int, int]] = {}
        for label, spec in specs.items():
            print(f"\n{name}, {label}", file=sys.stderr)
            engine = Engine(model.target, spec, adaptive=False)
            outputs, steps, tokens = steps_of(engine, prompts, params, options.batch)
            equal = sum(mine == theirs for mine, theirs in zip(outputs, plain, strict=True))
            found[label] = (steps, tokens, equal)
        base = found[options.over][0]
        result["suites"][name] = {
            "prompts": len(prompts),
            **{
                label: {"tau": tokens / int(steps.sum()), "equal": equal, "over": over(steps, base)}
                for label, (steps, tokens, equal) in found.items()
            },
        }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
