"""Fill in the middle as editors ask for it: drafts of `suffix` against plain decoding.

    python lab/measure/infill.py --model FOLDER --data humaneval.jsonl [--prompts N] [--tokens N]

From each problem of HumanEval two files with a gap are made, and what is around the gap is what there is to
copy: `body` leaves out the second half of a solution, below the same function of the next problem; `tests`
leaves out the assertions in the middle of a test. The two ways take turns on each prompt, after a round that
is not counted; the ratio is that of the times of decoding, after the prompt, by the median over prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path

from outpace import load
from outpace.core import DEFAULT_DRAFTER, Generation, SamplingParams
from outpace.engine.engine import Engine
from outpace.reading import unmarked_ids
from outpace.serve.fim import Middle

Problem = dict[str, str]


def halves(text: str, first: float, last: float) -> tuple[str, str]:
    """A text without the lines between two shares of it."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: int(len(lines) * first)]), "".join(lines[int(len(lines) * last) :])


def body(one: Problem, other: Problem) -> tuple[str, str]:
    before, behind = halves(one["canonical_solution"], 0.5, 1.0)
    return one["prompt"] + before, f"{behind}\n\n{other['prompt']}{other['canonical_solution']}{one['test']}"


def tests(one: Problem, other: Problem) -> tuple[str, str]:
    before, behind = halves(one["test"], 0.6, 0.9)
    return one["prompt"] + one["canonical_solution"] + before, behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3, help="the first is not counted")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    problems: list[Problem] = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    loaded = load(args.model)
    middle = Middle.of(loaded.tokenizer, loaded.tokens(""))
    if middle is None:
        raise SystemExit(f"{args.model} has no marks for filling in the middle")
    marks = middle.marks

    async def read(text: str, begins: bool) -> list[int]:
        return unmarked_ids(loaded.tokenizer, text, marks, begins)

    ways = {
        "none": loaded.engine("none"),
        "suffix": loaded.engine(DEFAULT_DRAFTER, adaptive="auto" if args.adaptive else False),
    }
    params = SamplingParams(max_new_tokens=args.tokens, stop_token_ids=middle.ends)
    for kind in (body, tests):
        found, equal = list[tuple[float, float]](), 0
        for one, other in pairwise(problems[: args.prompts + 1]):
            prompt = asyncio.run(middle.prompt(read, *kind(one, other)))
            times, outputs = measured(ways, prompt, params, args.rounds)
            equal += outputs["none"].tokens == outputs["suffix"].tokens
            stats = outputs["suffix"].stats
            found.append((times["none"] / times["suffix"], stats.tokens / max(1, stats.steps)))
            print(
                kind.__name__,
                len(prompt),
                stats.tokens,
                *(f"{value:.2f}" for value in found[-1]),
                file=sys.stderr,
            )
        ratio, tau = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"| {kind.__name__} | {len(found)} | {ratio:.2f} | {tau:.2f} | {equal} |")


def measured(
    ways: dict[str, Engine], prompt: list[int], params: SamplingParams, rounds: int
) -> tuple[dict[str, float], dict[str, Generation]]:
    """Seconds of decoding of each way, and its output."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    outputs = dict[str, Generation]()
    for _ in range(rounds):
        for name, engine in ways.items():
            (outputs[name],) = engine.generate([prompt], params)
            times[name].append(outputs[name].stats.seconds_decode)
    return {name: min(taken[1:]) for name, taken in times.items()}, outputs


if __name__ == "__main__":
    main()
