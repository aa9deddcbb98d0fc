"""Comparison of two versions of the engine, interleaved in one run.

    python lab/measure/cores.py --old OTHER_CHECKOUT/src --new src --out RESULT.json

Each round starts one process per version, in turn, on the embedded model in float32 and one thread. A case
is run once to warm up and then timed; the ratio of two versions is taken per round, and medians are reported.

- one: batch 1, greedy, seconds per token, by drafter.
- sampled: batch 16 at temperature 0.8, top-p 0.9, a repetition and a frequency penalty, seconds per token.
- joining: 15 sequences decode, then a prompt of 4,000 tokens joins: the longest time between two tokens of
  a neighbour while it joins, the time of that step's chunk (its rows, after as many rows of the prompt, in a
  forward that has nothing else), and the median time of a step before.
- memory: 15 requests of 200 rows and one of 8,000: peak bytes of keys and values.

The run fails unless the tokens of the two versions are equal.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DRAFTERS = ("none", "prompt_lookup", "lookahead")
CASES = ("one", "sampled", "joining", "memory")
CONTEXT = 8192  # beyond the embedded model's, which rotary embeddings allow


def median(values: list[float]) -> float:
    return statistics.median(values)


class Worker:
    """The cases, run with the imported version of outpace."""

    def __init__(self, clock: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import outpace

        torch.set_num_threads(1)
        self.clock = {"wall": time.perf_counter, "processor": time.process_time}[clock]
        self.outpace = outpace
        model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32)
        model.config.max_position_embeddings = CONTEXT
        self.tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
        self.target = outpace.Target(model)
        file = Path(outpace.__file__).parent / "bench" / "prompts" / "builtin.jsonl"
        items = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        texts = [item["turns"][0] if "turns" in item else item["prompt"] for item in items[:16]]
        self.prompts = [self.tokenizer(text)["input_ids"] for text in texts]

    def engine(self, drafter: str, **options: Any) -> Any:
        return self.outpace.Engine(self.target, drafter, adaptive=False, **options)

    def generate(self, drafter: str, prompts: list[list[int]], params: Any) -> tuple[float, list[list[int]]]:
        engine = self.engine(drafter)
        engine.generate(prompts, params)
        began = self.clock()
        found = engine.generate(prompts, params)
        seconds = self.clock() - began
        tokens = [list(one.tokens) for one in found]
        return seconds / sum(map(len, tokens)), tokens

    def one(self) -> dict[str, Any]:
        params = self.outpace.SamplingParams(max_new_tokens=96, ignore_eos=True)
        figures, tokens = {}, []
        for drafter in DRAFTERS:
            taken = [self.generate(drafter, [prompt], params) for prompt in self.prompts[:4]]
            figures[drafter] = median([seconds for seconds, _ in taken])
            tokens.append([found for _, found in taken])
        return {"figures": figures, "tokens": tokens}

    def sampled(self) -> dict[str, Any]:
        params = self.outpace.SamplingParams(
            max_new_tokens=64,
            ignore_eos=True,
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            seed=7,
        )
        taken = {drafter: self.generate(drafter, self.prompts, params) for drafter in DRAFTERS}
        return {
            "figures": {drafter: seconds for drafter, (seconds, _) in taken.items()},
            "tokens": [found for _, found in taken.values()],
        }

    def joining(self) -> dict[str, Any]:
        params = self.outpace.SamplingParams(max_new_tokens=400, ignore_eos=True)
        engine = self.engine("none")
        neighbours = [engine.add(prompt, params) for prompt in self.prompts[:15]]
        for _ in range(40):
            engine.step()
        before, after = [], []
        for _ in range(20):
            before.append(self._step(engine))
        text = [token for prompt in self.prompts * 40 for token in prompt][:4000]
        late = engine.add(text, params)
        read = [0]
        while not late.output:
            after.append(self._step(engine))
            read.append(late.place.rows)
        tokens = [list(one.output)[:60] for one in neighbours] + [list(late.output)[:1]]
        for sequence in [*neighbours, late]:
            engine.remove(sequence)
        worst = after.index(max(after))
        chunk = self._chunk(text, read[worst], read[worst + 1])
        figures = {"gap": max(after), "chunk": chunk, "gap / chunk": max(after) / chunk}
        figures |= {"rows": float(read[worst + 1] - read[worst]), "step": median(before)}
        return {"figures": figures | {"steps": float(len(after))}, "tokens": tokens}

    def _chunk(self, text: list[int], start: int, end: int) -> float:
        """Seconds of a forward over rows of a text alone, the median of 5; NaN for the old core's targets."""
        from outpace.targets import Rows

        cache, found = self.target.new_cache(1, len(text)), []
        slot, forward = cache.allocate(), self.target.forward
        if "feeds" not in inspect.signature(forward).parameters:
            return math.nan
        for first in range(0, start, 500):
            rows = text[first : min(first + 500, start)]
            forward(cache, {slot: Rows(rows)}, None)
            cache.keep({slot: range(len(rows))})
        for _ in range(5):
            began = self.clock()
            forward(cache, {slot: Rows(text[start:end])}, None)
            found.append(self.clock() - began)
            cache.keep({slot: ()})
        return median(found)

    def _step(self, engine: Any) -> float:
        began = self.clock()
        engine.step()
        return self.clock() - began

    def memory(self) -> dict[str, Any]:
        params = self.outpace.SamplingParams(max_new_tokens=100, ignore_eos=True)
        engine = self.engine("none")
        text = [token for prompt in self.prompts * 80 for token in prompt]
        sequences = [engine.add(prompt[:100], params) for prompt in self.prompts[:15]]
        sequences.append(engine.add(text[:7900], params))
        most = 0
        while not sequences[-1].output:
            engine.step()
            cache = engine._batch.cache if hasattr(engine, "_batch") else engine._cache  # the old core's name
            held = getattr(cache, "bytes", None)
            if held is None:
                held = sum(buffer.nbytes for buffer in cache._buffers.values())
            most = max(most, held)
        for sequence in sequences:
            engine.remove(sequence)
        return {"figures": {"bytes": float(most)}, "tokens": []}


def run(source: Path, cases: list[str], clock: str) -> dict[str, Any]:
    """Run one process with one version."""
    command = [sys.executable, __file__, "--worker", ",".join(cases), "--clock", clock]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker = Worker(options.clock)
        print(json.dumps({case: getattr(worker, case)() for case in options.worker.split(",")}))
        return
    if not options.old or not options.new:
        parser.error("--old and --new are needed")
    rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for turn in range(options.rounds):
        sources = [options.old, options.new]
        found = [
            run(source, options.only, options.clock) for source in (sources[::-1] if turn % 2 else sources)
        ]
        rounds.append((found[1], found[0]) if turn % 2 else (found[0], found[1]))
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "clock": options.clock, "rounds": options.rounds}
    for case in options.only:
        for old, new in rounds:
            if old[case]["tokens"] != new[case]["tokens"]:
                raise SystemExit(f"{case}: the two versions emit different tokens")
        result[case] = {
            name: {
                "old": median([old[case]["figures"][name] for old, _ in rounds]),
                "new": median([new[case]["figures"][name] for _, new in rounds]),
                "old / new": median(
                    [old[case]["figures"][name] / new[case]["figures"][name] for old, new in rounds]
                ),
            }
            for name in rounds[0][0][case]["figures"]
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
