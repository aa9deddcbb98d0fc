"""Speed under the governor, relative to plain decoding and to the best fixed number of nodes.

    python lab/measure/governor.py --data DIR --out RESULT.json

DIR contains gsm8k_test*.jsonl (lines with "question" and "answer"). Three measurements, each interleaved in a
rotating order after a warm-up; `speed` is the median over rounds, `speed_total` the ratio of total seconds:

- random: a model of random weights and the embedded model's shape, sampled at temperature 1, where nothing
  can be guessed (greedy, it would loop and flatter every n-gram method). Speed of each drafter under the
  governor, relative to plain decoding.
- batch: the same with 16 sequences at a time, each replaced when it ends, on random weights and on the
  embedded model, until fewer are left: seconds per token at that load.
- dictated: a logits processor forces a text on the embedded model: a quarter GSM8K, half random tokens, a
  quarter GSM8K. Total seconds under the governor, relative to the sum of the best fixed choices for each
  part: chosen in every other round, timed in the rounds between, and vice versa.

--clock processor counts processor time, with one thread, and is fair beside other work. The result is printed
as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.machine import machine
from outpace.core import SamplingParams
from outpace.drafters import load_drafter
from outpace.engine.engine import Engine
from outpace.policy.governor import Pinned
from outpace.targets import TargetModel

PLAIN = "none"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
PARTS = ("random", "batch", "dictated")

Clock = Callable[[], float]


class Dictate:
    """Logits processor that forces a text: it allows one token at each place of the output."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int]) -> None:
        self._prompt, self._text = len(prompt), text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._text[input_ids.shape[1] - self._prompt]] = 0.0
        return forced


def interleaved(runs: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each run, [round][part]; the first round is a warm-up and is not counted."""
    names = list(runs)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = runs[name]()
            if turn:
                found[name].append(seconds)
        print(f"\rround {turn}/{rounds}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def each(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, clock: Clock
) -> Callable[[], list[float]]:
    """Decode prompts one by one; the seconds of each."""

    def run() -> list[float]:
        seconds = []
        for prompt in prompts:
            began = clock()
            engine.generate([prompt], params)
            seconds.append(clock() - began)
        return seconds

    return run


def in_flight(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, batch: int, clock: Clock
) -> Callable[[], list[float]]:
    """Decode N prompts at a time, replacing each that ends; seconds per token until none is left.

    Outputs have half to all of the tokens that ``params`` allows, so that they end at different times.
    """
    allowed = params.max_new_tokens
    assert allowed is not None

    def run() -> list[float]:
        waiting = [
            (prompt, replace(params, max_new_tokens=allowed // 2 + place * 37 % (allowed // 2 + 1)))
            for place, prompt in enumerate(prompts)
        ][::-1]
        tokens, began = 0, clock()
        for _ in range(batch):
            engine.add(*waiting.pop())
        while len(engine.sequences) == batch:
            for ended in [sequence for sequence in engine.step() if sequence.finish_reason]:
                tokens += ended.output_length
                if waiting:
                    engine.add(*waiting.pop())
        seconds = clock() - began
        for sequence in engine.sequences:
            tokens += sequence.output_length
            engine.remove(sequence)
        return [seconds / tokens]

    return run


def against_plain(
    target: TargetModel,
    drafters: Sequence[str],
    rounds: int,
    clock: Clock,
    measure: Callable[[Engine], Callable[[], list[float]]],
) -> dict[str, dict[str, object]]:
    """Speed of each drafter under the governor relative to plain decoding in the same round."""
    engines = {
        PLAIN: Engine(target),
        **{name: Engine(target, name, adaptive=True, clock=clock) for name in drafters},
    }
    found = interleaved({name: measure(engine) for name, engine in engines.items()}, rounds)
    plain = found.pop(PLAIN)
    return {name: over_plain(rows, plain) for name, rows in found.items()}


def over_plain(rows: list[list[float]], plain: list[list[float]]) -> dict[str, object]:
    """The median speed over calls and rounds, the speed over all seconds, and each round's median."""
    calls = [
        [theirs / mine for mine, theirs in zip(*pair, strict=True)] for pair in zip(rows, plain, strict=True)
    ]
    return {
        "speed": statistics.median(itertools.chain.from_iterable(calls)),
        "speed_total": sum(map(sum, plain)) / sum(map(sum, rows)),
        "rounds": [round(statistics.median(ratios), 3) for ratios in calls],
    }


def buffer_layouts(
    engine: Engine, prompt: list[int], text: list[int], ends: list[int], clock: Clock
) -> Callable[[], list[float]]:
    """Decode a dictated text; the seconds of each part, which ends with the step that reaches its end."""

    def run() -> list[float]:
        params = SamplingParams(
            max_new_tokens=len(text), ignore_eos=True, logits_processors=[Dictate(prompt, text)]
        )
        sequence = engine.add(prompt, params)
        marks, began = [], clock()
        for end in ends:
            while sequence.output_length < end:
                engine.step()
            marks.append(clock())
        if sequence.output != text:
            raise SystemExit("the output is not the dictated text")
        return [mark - before for before, mark in zip([began, *marks], marks, strict=False)]

    return run


def dictated(
    target: TargetModel,
    prompt: list[int],
    text: list[int],
    ends: list[int],
    spec: str,
    rounds: int,
    clock: Clock,
) -> dict[str, object]:
    """The governor's total time relative to the best fixed choice of each part."""
    widths = load_drafter(spec).widths or FIXED
    engines = {
        "adaptive": Engine(target, spec, adaptive=True, clock=clock),
        PLAIN: Engine(target),
        "all": Engine(target, spec, adaptive=False),
        **{str(nodes): Engine(target, spec, adaptive=Pinned(nodes)) for nodes in widths},
    }
    found = interleaved(
        {name: buffer_layouts(e, prompt, text, ends, clock) for name, e in engines.items()}, max(2, rounds)
    )
    parts = {name: medians(rows) for name, rows in found.items()}
    best = best_choices(found)
    return {
        "ratio": statistics.mean(over_best(found, half) for half in (0, 1)),
        "ratio_same_rounds": sum(parts["adaptive"])
        / sum(parts[name][part] for part, name in enumerate(best)),
        "best": best,
        "seconds": parts,
    }


def medians(rows: list[list[float]]) -> list[float]:
    """Median of each part over rounds."""
    return [statistics.median(part) for part in zip(*rows, strict=True)]


def best_choices(found: dict[str, list[list[float]]]) -> list[str]:
    """The fastest fixed choice of each part."""
    fixed = {name: medians(rows) for name, rows in found.items() if name != "adaptive"}
    count = len(next(iter(fixed.values())))
    return [min(fixed, key=lambda name, part=part: fixed[name][part]) for part in range(count)]


def over_best(found: dict[str, list[list[float]]], half: int) -> float:
    """The governor's time relative to the best choices', in every other round; they are chosen in the others.

    The minimum of ten medians is biased downwards, so a choice must not be timed in the rounds in which it
    was chosen.
    """
    best = best_choices({name: rows[1 - half :: 2] for name, rows in found.items()})
    judged = {name: medians(rows[half::2]) for name, rows in found.items()}
    return sum(judged["adaptive"]) / sum(judged[name][part] for part, name in enumerate(best))


def texts(data: Path) -> list[tuple[str, str]]:
    file = next(iter(sorted(data.glob("gsm8k_test*.jsonl"))), None)
    if file is None:
        raise SystemExit(f"no gsm8k_test*.jsonl in {data}")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [(f"Question: {line['question']}\nAnswer:", str(line["answer"])) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of the random measurement")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dictated-tokens", type=int, default=512)
    parser.add_argument("--drafters", nargs="*", default=["lookahead", "prompt_lookup", "draft_model"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: for one thread on a busy machine"
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    if options.clock == "processor":
        torch.set_num_threads(1)
    path = outpace.nano_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    blank = outpace.Target(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).float().eval())
    nano = outpace.Target(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True).eval()
    )
    pairs = texts(options.data)
    prompts = [tokenizer(question).input_ids for question, _ in pairs]
    sampled = SamplingParams(max_new_tokens=options.new_tokens, temperature=1.0, seed=1, ignore_eos=True)
    greedy = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    names, rounds = options.drafters, options.rounds
    # A garbage collection over all imported modules takes a tenth of a round, at an arbitrary time.
    gc.collect()
    gc.freeze()
    result: dict[str, object] = {"machine": machine("cpu"), "command": " ".join(sys.argv)}
    if "random" in options.only:
        few = prompts[: options.prompts]
        result["random"] = against_plain(
            blank, names, rounds, clock, lambda engine: each(engine, few, sampled, clock)
        )
    if "batch" in options.only:
        many = prompts[: 4 * options.batch]
        if len(many) < options.batch:
            raise SystemExit(f"a batch of {options.batch} takes as many prompts; there are {len(many)}")
        result["batch"] = {
            model: against_plain(
                target,
                names,
                rounds,
                clock,
                lambda engine, p=params: in_flight(engine, many, p, options.batch, clock),
            )
            for model, target, params in (("random", blank, sampled), ("embedded", nano, greedy))
        }
    if "dictated" in options.only:
        quarter = options.dictated_tokens // 4
        told = tokenizer("\n\n".join(f"{question}{answer}" for question, answer in pairs[1:])).input_ids
        noise = torch.randint(0, nano.vocabulary, (2 * quarter,), generator=torch.Generator().manual_seed(0))
        text = told[:quarter] + noise.tolist() + told[quarter : 2 * quarter]
        ends = [quarter, 3 * quarter, 4 * quarter]
        result["dictated"] = {
            name: dictated(nano, prompts[0], text, ends, name, rounds, clock) for name in names
        }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
