"""One interleaved run of outpace's drafters and transformers' own methods on the same model and prompts.

    python benchmarks/table.py --data DIR --out benchmarks/RESULT.json

DIR holds gsm8k_test*.jsonl (lines with "question") and humaneval.jsonl (lines with "prompt"). Methods take
turns prompt by prompt, in an order that rotates, and each is warmed up; a ratio is the median over prompts of
the speed against transformers' plain generate() on the same prompt in the same round. Every output has the
same number of tokens: end-of-sequence tokens are ignored by all.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import outpace
from outpace.core import SamplingParams, Stats

PLAIN = "transformers generate"
LOOKUP = "transformers prompt lookup"


@dataclass
class Row:
    """What one method did: over all prompts, the fastest round of each counted for the speed."""

    method: str
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: list[list[float]] = field(default_factory=list)  # [round][prompt]
    equal: int = 0
    repeated_4grams: float = 0.0
    tokens_per_second: float = 0.0
    speedup: float = 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


Run = Callable[[list[int]], tuple[list[int], Stats | None]]


def stock(model: PreTrainedModel, new_tokens: int, **options: int) -> Run:
    """transformers' generate(), its steps counted as forwards of the model."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_pre_hook(count)

    def run(prompt: list[int]) -> tuple[list[int], Stats | None]:
        nonlocal calls
        calls = 0
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **options
        )
        tokens = output[0, len(prompt) :].tolist()
        return tokens, Stats(steps=calls, tokens=len(tokens))

    return run


def ours(target: outpace.targets.TargetModel, spec: str, new_tokens: int) -> Run:
    engine = outpace.Engine(target, spec)

    def run(prompt: list[int]) -> tuple[list[int], Stats | None]:
        generation = engine.generate([prompt], SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))[0]
        return generation.tokens, generation.stats

    return run


def repeated_4grams(tokens: Sequence[int]) -> float:
    """Share of 4-grams that occurred before in the same output."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(runs: dict[str, Run], prompts: list[list[int]], rounds: int) -> list[Row]:
    """Time every method on every prompt, in turns."""
    rows = {name: Row(name) for name in runs}
    names = list(runs)
    reference: dict[int, list[int]] = {}
    for run in runs.values():
        for prompt in prompts[:2]:
            run(prompt)
    for turn in range(rounds):
        for row in rows.values():
            row.seconds.append([])
        for place, prompt in enumerate(prompts):
            shift = (place + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                began = time.perf_counter()
                tokens, stats = runs[name](prompt)
                rows[name].seconds[-1].append(time.perf_counter() - began)
                reference.setdefault(place, tokens)
                if turn == 0:
                    note(rows[name], tokens, stats, reference[place])
            print(f"\rround {turn + 1}/{rounds}, prompt {place + 1}/{len(prompts)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return list(rows.values())


def note(row: Row, tokens: list[int], stats: Stats | None, reference: list[int]) -> None:
    row.equal += tokens == reference
    row.repeated_4grams += repeated_4grams(tokens)
    if stats is not None:
        row.tokens += stats.tokens
        row.steps += stats.steps
        row.drafted += stats.drafted
        row.accepted += stats.accepted


def finish(rows: list[Row], prompts: int) -> None:
    """Medians over prompts and rounds."""
    plain = next(row for row in rows if row.method == PLAIN)
    for row in rows:
        ratios = [
            theirs / mine
            for mine_round, their_round in zip(row.seconds, plain.seconds, strict=True)
            for mine, theirs in zip(mine_round, their_round, strict=True)
        ]
        row.speedup = statistics.median(ratios)
        typical = [statistics.median(times) for times in zip(*row.seconds, strict=True)]
        row.tokens_per_second = row.tokens / sum(typical)
        row.repeated_4grams /= prompts


def table(rows: list[Row], prompts: int) -> str:
    lines = [
        "| method | tokens/s | speed | steps | tau | acceptance | equal | repeated 4-grams |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        acceptance = f"{row.accepted / row.drafted:.2f}" if row.drafted else ""
        lines.append(
            f"| {row.method} | {row.tokens_per_second:.0f} | {row.speedup:.2f} x | {row.steps} "
            f"| {row.tau:.2f} | {acceptance} | {row.equal}/{prompts} | {row.repeated_4grams:.2f} |"
        )
    return "\n".join(lines)


def load_prompts(
    data: Path, tokenizer: transformers.PreTrainedTokenizerBase, limit: int
) -> dict[str, list[list[int]]]:
    """Token ids of each suite's first prompts."""
    files = {
        "gsm8k": next(iter(sorted(data.glob("gsm8k_test*.jsonl"))), None),
        "humaneval": data / "humaneval.jsonl",
    }
    suites: dict[str, list[list[int]]] = {}
    for suite, path in files.items():
        if path is None or not path.exists():
            raise SystemExit(f"no {suite} file in {data}")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
        texts = [
            # As is usual for models that join a newline and what follows it into one token.
            f"Question: {line['question']}\nAnswer:" if suite == "gsm8k" else str(line["prompt"]).rstrip()
            for line in lines
        ]
        suites[suite] = [tokenizer(text).input_ids for text in texts]
    return suites


def machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    return f"{names[0]}, {len(names)} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default=str(outpace.nano_path()))
    parser.add_argument("--limit", type=int, default=20, help="prompts of each suite")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--drafters", nargs="*", default=["none", "jacobi", "lookahead", "prompt_lookup", "draft_model"]
    )
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, use_safetensors=True
    ).eval()
    model.generation_config.eos_token_id = None
    suites = load_prompts(options.data, AutoTokenizer.from_pretrained(options.model), options.limit)
    target = outpace.Target(model)
    runs: dict[str, Run] = {
        PLAIN: stock(model, options.new_tokens),
        LOOKUP: stock(model, options.new_tokens, prompt_lookup_num_tokens=10),
        **{spec: ours(target, spec, options.new_tokens) for spec in options.drafters},
    }
    result: dict[str, object] = {"machine": machine(), "command": " ".join(sys.argv), "suites": {}}
    print(json.dumps(result["machine"]))
    for suite, prompts in suites.items():
        rows = measure(runs, prompts, options.rounds)
        finish(rows, len(prompts))
        print(f"\n{suite}, {len(prompts)} prompts\n\n{table(rows, len(prompts))}", flush=True)
        suites_found: dict[str, object] = result["suites"]  # type: ignore[assignment]
        suites_found[suite] = [asdict(row) | {"tau": row.tau} for row in rows]
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
