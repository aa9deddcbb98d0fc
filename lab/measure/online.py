"""Recovery of a drafter that learns online after the prompts change their topic.

    python lab/measure/online.py --data DIR --json RESULT.json

DIR contains gsm8k_test*.jsonl (lines with "question") and humaneval.jsonl (lines with "prompt"). Blocks of
requests of the first topic are decoded, then blocks of the second, and so on for --turns; no prompt is
repeated. `fixed` is unchanged, `online` learns after each block (``train.Online``, stepped explicitly, so
that the run is reproducible); with --topics also `topics`, a drafter per topic that a router picks
(``train.Topics``), and with --on-policy also `mixed`, which learns from its own text in that share of
updates. All must give the same tokens. Printed per block: the mean accepted length (tau). These are counts,
not times.

With --server the blocks are sent over HTTP, in turn, to running servers, which learn in the background:

    outpace serve --port 8001 --drafter draft_model --no-adaptive &
    outpace serve --port 8002 --drafter draft_model --no-adaptive \
        --observer topics:files=maths.jsonl+code.jsonl &
    python lab/measure/online.py --data DIR --json RESULT.json \
        --server fixed=http://127.0.0.1:8001 --server topics=http://127.0.0.1:8002
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.machine import machine
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace_lab.drafters.routed import TopicRouter
from outpace_lab.train import Learning, Online, Topics

TOPICS = ("gsm8k", "humaneval")
EXAMPLES = 8  # prompts of each topic, from the end of the data, that the router is made of


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
    def of(cls, tokens: int, steps: int, drafted: int, accepted: int) -> Block:
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


Decoder = Callable[[list[list[int]]], tuple[list[list[int]], Block]]
"""The tokens that answer a block's prompts, and the counts."""


def by_engine(engine: Engine, options: argparse.Namespace) -> Decoder:
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=options.temperature, seed=1, ignore_eos=True
    )

    def decode(block: list[list[int]]) -> tuple[list[list[int]], Block]:
        calls = [block[at : at + options.batch] for at in range(0, len(block), options.batch)]
        found = [one for call in calls for one in engine.generate(call, params)]
        names = ("tokens", "steps", "drafted", "accepted")
        counts = (sum(getattr(one.stats, name) for one in found) for name in names)
        return [one.tokens for one in found], Block.of(*counts)

    return decode


def by_server(url: str, options: argparse.Namespace) -> Decoder:
    asked = {
        "max_tokens": options.new_tokens,
        "temperature": options.temperature,
        "seed": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "speculation_metrics": True,
    }

    def ask(prompt: list[int]) -> dict[str, Any]:
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": prompt, **asked}, timeout=600)
        answer.raise_for_status()
        return answer.json()

    def decode(block: list[list[int]]) -> tuple[list[list[int]], Block]:
        with ThreadPoolExecutor(options.batch) as clients:
            found = list(clients.map(ask, block))
        tokens = [one["choices"][0]["token_ids"] for one in found]
        counts = [one["metrics"]["speculative_decoding"] for one in found]
        steps, drafted, accepted = (
            sum(one[f"num_{name}"] for one in counts)
            for name in ("spec_steps", "draft_tokens", "accepted_draft_tokens")
        )
        return tokens, Block.of(sum(map(len, tokens)), steps, drafted, accepted)

    return decode


def rounds_of(learner: Online | Topics, count: int) -> list[dict[str, Any]]:
    """Let a drafter learn for some rounds, and return those that there was enough text for."""
    learners = learner.learners if isinstance(learner, Topics) else [learner]
    found = [one.step() for _ in range(count) for one in learners]
    return [asdict(one) for one in found if one is not None]


def blocks(
    decoders: dict[str, Decoder],
    learners: dict[str, Online | Topics],
    prompts: list[list[list[int]]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Decode block after block with each decoder, and yield the counts and the rounds of learning."""
    for block in prompts:
        row: dict[str, Any] = {}
        tokens = []
        for name, decode in decoders.items():
            found, counts = decode(block)
            tokens.append(found)
            row[name] = asdict(counts)
        if any(one != tokens[0] for one in tokens):
            raise SystemExit("learning has changed a token")
        row["rounds"] = {name: rounds_of(learner, options.rounds) for name, learner in learners.items()}
        yield row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--block", type=int, default=16, help="requests in a block")
    parser.add_argument("--before", type=int, default=4, help="blocks of the first topic")
    parser.add_argument("--after", type=int, default=8, help="blocks of the second")
    parser.add_argument("--turns", type=int, default=1, help="how often the topics come, one after the other")
    parser.add_argument("--reverse", action="store_true", help="code first")
    parser.add_argument("--topics", action="store_true", help="measure a drafter per topic too")
    parser.add_argument(
        "--on-policy", type=float, default=0, help="measure mixed sampling too, with this share"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="decode by this server; options of drafting and learning are then the server's",
    )
    parser.add_argument("--model", default=outpace.nano_path(), help="folder of the target")
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


def in_process(
    options: argparse.Namespace, learning: Learning, router: TopicRouter
) -> tuple[dict[str, Decoder], dict[str, Online | Topics]]:
    """Engines in this process by name, and what learns in them."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    target = outpace.Target(model.eval())
    learners: dict[str, Online | Topics] = {"online": Online(target, options.drafter, learning)}
    if options.on_policy:
        mixed = replace(learning, on_policy=options.on_policy)
        learners["mixed"] = Online(target, options.drafter, mixed)
    if options.topics:
        learners["topics"] = Topics(target, options.drafter, router, len(TOPICS), learning)
    engines = {"fixed": Engine(target, options.drafter, adaptive=False, slots=options.batch)}
    for name, learner in learners.items():
        engines[name] = Engine(target, learner.drafter, adaptive=False, observer=learner, slots=options.batch)
    return {name: by_engine(engine, options) for name, engine in engines.items()}, learners


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
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    topics = TOPICS[::-1] if options.reverse else TOPICS
    found = {topic: prompts_of(topic, options.data, tokenizer) for topic in topics}
    learners: dict[str, Online | Topics] = {}
    if options.server:
        servers = dict(one.split("=", 1) for one in options.server)
        decoders = {name: by_server(url, options) for name, url in servers.items()}
    else:
        router = TopicRouter([found[topic][-EXAMPLES:] for topic in topics])
        decoders, learners = in_process(options, learning, router)
    named, prompts = [], []
    for turn in range(options.turns):
        for topic, count in zip(topics, (options.before, options.after), strict=True):
            first, last = turn * count * options.block, (turn + 1) * count * options.block
            if last > len(found[topic]) - EXAMPLES:
                raise SystemExit(f"{topic} has {len(found[topic])} prompts, too few for these blocks")
            named += [topic] * count
            prompts += [found[topic][at : at + options.block] for at in range(first, last, options.block)]
    print(f"{'block':>5} {'topic':<10} " + " ".join(f"{name:>7}" for name in decoders))
    rows = []
    for number, row in enumerate(blocks(decoders, learners, prompts, options), start=1):
        row = {"block": number, "topic": named[number - 1], **row}
        rows.append(row)
        taus = " ".join(f"{row[name]['tau']:>7.2f}" for name in decoders)
        kept = {name: [one["kept"] for one in made] for name, made in row["rounds"].items()}
        print(f"{number:>5} {row['topic']:<10} {taus}  {kept}", flush=True)
    result = {
        "machine": machine("cpu"),
        "command": " ".join(sys.argv),
        "learning": None if options.server else asdict(learning),
        "blocks": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
