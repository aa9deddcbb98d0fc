"""Recovery of a drafter that learns online after the prompts change their topic.

    python benchmarks/online.py --data DIR --json benchmarks/RESULT.json

DIR contains gsm8k_test*.jsonl (lines with "question") and humaneval.jsonl (lines with "prompt"). Blocks of
requests of the first topic are decoded, then blocks of the second; no prompt is repeated. One draft model is
unchanged, the other learns after each block (outpace.train.Online, stepped explicitly, so that the run is
reproducible). Both must give the same tokens. Printed per block: the mean accepted length (tau) and the share
of drafted tokens accepted. These are counts, not times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.machine import machine
from outpace.core import Generation, SamplingParams
from outpace.engine.engine import Engine
from outpace.train import Learning, Online

TOPICS = ("gsm8k", "humaneval")


@dataclass(frozen=True)
class Block:
    """The counts of one drafter for one block of requests."""

    tau: float
    acceptance: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, found: Sequence[Generation]) -> Block:
        tokens, steps, drafted, accepted = (
            sum(getattr(one.stats, name) for one in found)
            for name in ("tokens", "steps", "drafted", "accepted")
        )
        return cls(tokens / steps, accepted / drafted, tokens, steps, drafted, accepted)


def prompts_of(topic: str, data: Path, tokenizer: Any) -> list[list[int]]:
    pattern = "gsm8k_test*.jsonl" if topic == "gsm8k" else "humaneval.jsonl"
    file = next(iter(sorted(data.glob(pattern))), None)
    if file is None:
        raise SystemExit(f"no {pattern} in {data}")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    texts = [
        f"Question: {line['question']}\nAnswer:" if topic == "gsm8k" else line["prompt"] for line in lines
    ]
    return [list(tokenizer(text).input_ids) for text in texts]


def blocks(
    engines: dict[str, Engine], online: Online, prompts: list[list[list[int]]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Decode block after block with each engine, and yield the counts and the rounds of learning."""
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=options.temperature, seed=1, ignore_eos=True
    )
    for block in prompts:
        calls = [block[at : at + options.batch] for at in range(0, len(block), options.batch)]
        row: dict[str, Any] = {}
        tokens = []
        for name, engine in engines.items():
            found = [one for call in calls for one in engine.generate(call, params)]
            tokens.append([one.tokens for one in found])
            row[name] = asdict(Block.of(found))
        if tokens[0] != tokens[1]:
            raise SystemExit("learning has changed a token")
        rounds = [online.step() for _ in range(options.rounds)]
        row["rounds"] = [asdict(found) for found in rounds if found is not None]
        yield row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--block", type=int, default=16, help="requests in a block")
    parser.add_argument("--before", type=int, default=4, help="blocks of the first topic")
    parser.add_argument("--after", type=int, default=8, help="blocks of the second")
    parser.add_argument("--reverse", action="store_true", help="code first")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of learning after each block")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--drafter", default="draft_model:num_speculative_tokens=4")
    plain = Learning()
    for name in ("tokens", "length", "updates", "rows", "measured", "seed"):
        parser.add_argument(f"--learning-{name}", type=int, default=getattr(plain, name))
    parser.add_argument("--learning-rate", type=float, default=plain.learning_rate)
    parser.add_argument("--places", default=plain.places, choices=("rejected", "all"))
    parser.add_argument("--objective", default=plain.objective)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    learning = Learning(
        learning_rate=options.learning_rate,
        places=options.places,
        objective=options.objective,
        **{
            name: getattr(options, f"learning_{name}")
            for name in ("tokens", "length", "updates", "rows", "measured", "seed")
        },
    )
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32)
    online = Online(model.eval(), options.drafter, learning)
    engines = {
        "fixed": Engine(online.target, options.drafter, adaptive=False, slots=options.batch),
        "online": Engine(online.target, online.drafter, observer=online, slots=options.batch),
    }
    topics = TOPICS[::-1] if options.reverse else TOPICS
    counts = (options.before, options.after)
    named, prompts = [], []
    for topic, count in zip(topics, counts, strict=True):
        found = prompts_of(topic, options.data, tokenizer)
        if len(found) < count * options.block:
            raise SystemExit(f"{topic} has {len(found)} prompts, too few for {count} blocks")
        named += [topic] * count
        prompts += [found[at * options.block : (at + 1) * options.block] for at in range(count)]
    print(f"{'block':>5} {'topic':<10} {'tau fixed':>10} {'online':>7} {'accepted fixed':>15} {'online':>7}")
    rows = []
    for number, row in enumerate(blocks(engines, online, prompts, options), start=1):
        row = {"block": number, "topic": named[number - 1], **row}
        rows.append(row)
        fixed, learner = row["fixed"], row["online"]
        print(
            f"{number:>5} {row['topic']:<10} {fixed['tau']:>10.2f} {learner['tau']:>7.2f} "
            f"{fixed['acceptance']:>15.3f} {learner['acceptance']:>7.3f}  "
            + ", ".join(found["kept"] for found in row["rounds"]),
            flush=True,
        )
    result = {
        "machine": machine("cpu"),
        "command": " ".join(sys.argv),
        "learning": asdict(learning),
        "blocks": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
