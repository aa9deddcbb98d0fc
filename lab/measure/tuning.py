"""Time of `outpace tune`, and the speed of its choice relative to that of an exhaustive grid.

    python lab/measure/tuning.py --suite gsm8k --data DIR --out RESULT.json

The prompts of a suite are shuffled and split into prompts to tune on and held-out ones. The grid decodes each
of the former with every candidate of `outpace tune`, in turns; then the tuner runs within --share of the
grid's time. The choices of both decode the held-out prompts, in turns with plain decoding, --rounds times;
the median of each prompt is used. `paired` is the speed of the tuner's choice relative to the grid's: the
median over prompts, with its 95% interval. `total` is the ratio over all tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from outpace.bench.items import Suite
from outpace.bench.machine import machine
from outpace.bench.methods import split_drafters
from outpace.bench.rows import rows_of
from outpace.bench.run import Settings, measure
from outpace.bench.runs import BASELINE
from outpace.bench.statistics import interval
from outpace.bench.subject import fitting
from outpace.bench.suites import load_suite
from outpace.loading import Loaded, load
from outpace_lab.bench.candidates import candidates
from outpace_lab.bench.tuning import Frugal, Goal, tune
from outpace_lab.cli.tune_run import DRAFTERS


def told(text: str) -> None:
    print(f"\r{text:<100.100}", end="", file=sys.stderr, flush=True)


def grid(model: Loaded, specs: list[str], suite: Suite, settings: Settings) -> tuple[dict[str, float], float]:
    """Run every candidate on every prompt: tokens per second of each, fastest first, and all seconds."""
    began = time.perf_counter()
    methods = [Frugal(model, one.spec, settings.temperature) for one in candidates(specs)]
    advanced = lambda measured: told(f"grid: {len(measured.groups)} of {len(suite.items)} prompts")  # noqa: E731
    rows = rows_of(measure(model, methods, suite, 1, settings, advanced), lambda asked, output: math.nan)
    speeds = {row.drafter: row.speed.tokens_per_second for row in rows if row.speed is not None}
    ranked = dict(sorted(speeds.items(), key=lambda one: -one[1]))
    return ranked, time.perf_counter() - began


def seconds_of(model: Loaded, specs: list[str], suite: Suite, settings: Settings) -> dict[str, list[float]]:
    """Median seconds of each prompt, per spec. Fails if an output differs from plain decoding's."""
    methods = [Frugal(model, spec, settings.temperature) for spec in specs]
    found = measure(model, methods, suite, 1, settings)
    for trace in found.traces:
        if trace.error is not None:
            raise SystemExit(f"{trace.name}: {trace.error}")
    outputs = {
        spec: [[[run.outputs for run in turns] for turns in group] for group in trace.runs]
        for spec, trace in zip(specs, found.traces, strict=True)
    }
    for spec in specs:
        if outputs[spec] != outputs[BASELINE]:
            raise SystemExit(f"{spec}: an output is not plain decoding's")
    return {
        spec: [
            statistics.median(sum(run.seconds for run in turns) for turns in group) for group in trace.runs
        ]
        for spec, trace in zip(specs, found.traces, strict=True)
    }


def compared(model: Loaded, tuned: str, best: str, suite: Suite, settings: Settings) -> dict[str, object]:
    specs = list(dict.fromkeys([BASELINE, best, tuned]))
    found = seconds_of(model, specs, suite, settings)
    ratios = [theirs / mine for mine, theirs in zip(found[tuned], found[best], strict=True)]
    return {
        "paired": statistics.median(ratios),
        "interval": interval(ratios),
        "total": sum(found[best]) / sum(found[tuned]),
        "over_plain": {spec: sum(found[BASELINE]) / sum(found[spec]) for spec in specs},
        "prompts": len(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=40, help="prompts to tune on")
    parser.add_argument("--held-out", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.2, help="share of the grid's time for the tuner")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafters", default=DRAFTERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = Settings(max_new_tokens=options.max_new_tokens)
    model = load()
    prompts = fitting(model, load_suite(options.suite, options.data), options.max_new_tokens)
    items = list(prompts.items)
    random.Random(options.seed).shuffle(items)
    seen = replace(prompts, items=tuple(items[: options.prompts]))
    unseen = replace(prompts, items=tuple(items[options.prompts :][: options.held_out]))
    specs = split_drafters(options.drafters)
    ranked, took = grid(model, specs, seen, settings)
    tuned = tune(model, specs, seen, Goal(), settings, options.share * took, told)
    if tuned is None:
        raise SystemExit("interrupted")
    told("held-out prompts")
    again = replace(settings, repeats=options.rounds)
    result = {
        "machine": machine(model.device),
        "command": " ".join(sys.argv),
        "candidates": len(ranked),
        "prompts": len(seen.items),
        "grid_seconds": took,
        "tune_seconds": tuned.seconds,
        "share": tuned.seconds / took,
        "grid": ranked,
        "tuned": {"spec": tuned.way.spec, "tau": tuned.row.tau, **asdict(tuned.row.speed)},
        "held_out": compared(model, tuned.way.spec, next(iter(ranked)), unseen, again),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
