"""One interleaved run of outpace's drafters and transformers' own methods on the same model and prompts.

    python benchmarks/table.py --data DIR --out benchmarks/RESULT.json
    python benchmarks/table.py --tasks rewriting retrieval --out benchmarks/RESULT.json

DIR holds gsm8k_test*.jsonl (lines with "question") and humaneval.jsonl (lines with "prompt"). The tasks
rewriting and retrieval come with the package; drafters that read references get theirs. Methods take turns
prompt by prompt, in an order that rotates, and each is warmed up; a ratio is the median over prompts of the
speed against transformers' plain generate() on the same prompt in the same round. What a drafter remembers
of earlier outputs (suffix) is forgotten before each round, so that no prompt is met twice. On gsm8k and
humaneval every output has the same number of tokens: end-of-sequence tokens are ignored by all. On the
other two, where the output is as long as the text, they end it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import outpace
from outpace.bench.tasks import TASKS, load_tasks
from outpace.core import SamplingParams, Stats

PLAIN = "transformers generate"
LOOKUP = "transformers prompt lookup"
ASSISTED = "transformers assisted generation"
DRAFTERS = ["none", "jacobi", "lookahead", "prompt_lookup", "draft_model", "suffix", "reference"]


@dataclass(frozen=True)
class Prompt:
    """A prompt and the texts that its output may repeat, as token ids; whether an end token ends the
    output."""

    ids: list[int]
    references: list[list[int]] = field(default_factory=list)
    ends: bool = False


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


class Stock:
    """transformers' generate(), its steps counted as forwards of the model."""

    def __init__(self, model: PreTrainedModel, new_tokens: int, eos: int | None, **options: Any) -> None:
        self._model = model
        self._options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, **options}
        self._eos = eos
        self._calls = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._calls += 1

    def begin(self) -> None:
        """Nothing is kept from one prompt to the next."""

    def __call__(self, prompt: Prompt) -> tuple[list[int], Stats]:
        self._calls = 0
        eos = {"eos_token_id": self._eos} if prompt.ends else {}
        output = self._model.generate(torch.tensor([prompt.ids]), **self._options, **eos)
        tokens = output[0, len(prompt.ids) :].tolist()
        return tokens, Stats(steps=self._calls, tokens=len(tokens))


class Ours:
    """A drafter of outpace's, which drafts what it is set to, or what the governor finds to pay."""

    def __init__(
        self, target: outpace.targets.TargetModel, spec: str, new_tokens: int, adaptive: bool = False
    ) -> None:
        self._target = target
        self._spec = spec
        self._new_tokens = new_tokens
        self._engine = outpace.Engine(target, spec, adaptive=adaptive)

    def begin(self) -> None:
        """A new engine, which remembers no output. The governor keeps what it has measured."""
        adaptive = self._engine.governor or False
        self._engine = outpace.Engine(self._target, self._spec, adaptive=adaptive)

    def __call__(self, prompt: Prompt) -> tuple[list[int], Stats]:
        params = SamplingParams(max_new_tokens=self._new_tokens, ignore_eos=not prompt.ends)
        references = prompt.references if self._engine.drafter.reads_references else []
        (generation,) = self._engine.generate([prompt.ids], params, [references])
        return generation.tokens, generation.stats


Run = Stock | Ours


def repeated_4grams(tokens: Sequence[int]) -> float:
    """Share of 4-grams that occurred before in the same output."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(runs: Mapping[str, Run], prompts: list[Prompt], rounds: int) -> list[Row]:
    """Time every method on every prompt, in turns."""
    rows = {name: Row(name) for name in runs}
    names = list(runs)
    reference: dict[int, list[int]] = {}
    for run in runs.values():
        for prompt in prompts[:2]:
            run(prompt)
    for turn in range(rounds):
        for name, row in rows.items():
            row.seconds.append([])
            runs[name].begin()
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


def note(row: Row, tokens: list[int], stats: Stats, reference: list[int]) -> None:
    row.equal += tokens == reference
    row.repeated_4grams += repeated_4grams(tokens)
    row.tokens += stats.tokens
    row.steps += stats.steps
    row.drafted += stats.drafted
    row.accepted += stats.accepted


def finish(rows: list[Row], prompts: int, against: str = PLAIN) -> None:
    """Medians over prompts and rounds."""
    plain = next(row for row in rows if row.method == against)
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
    tasks: Sequence[str], data: Path | None, tokenizer: transformers.PreTrainedTokenizerBase, limit: int
) -> dict[str, list[Prompt]]:
    """The first prompts of each task."""
    return {
        task: packaged(task, tokenizer, limit) if task in TASKS else from_data(task, data, tokenizer, limit)
        for task in tasks
    }


def packaged(task: str, tokenizer: transformers.PreTrainedTokenizerBase, limit: int) -> list[Prompt]:
    def reference(text: str) -> list[int]:
        # As the output has it: behind "Corrected:" or "Answer:" a text begins with a space.
        return list(tokenizer(" " + text, add_special_tokens=False).input_ids)

    return [
        Prompt(tokenizer(each.prompt).input_ids, [reference(text) for text in each.references], ends=True)
        for each in load_tasks(task)[:limit]
    ]


def from_data(
    task: str, data: Path | None, tokenizer: transformers.PreTrainedTokenizerBase, limit: int
) -> list[Prompt]:
    if data is None:
        raise SystemExit(f"the task {task} needs --data, a folder that holds its prompts")
    name = "gsm8k_test*.jsonl" if task == "gsm8k" else "humaneval.jsonl"
    path = next(iter(sorted(data.glob(name))), None)
    if path is None:
        raise SystemExit(f"no {name} in {data}")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    texts = [
        f"Question: {line['question']}\nAnswer:" if task == "gsm8k" else line["prompt"] for line in lines
    ]
    return [Prompt(tokenizer(text).input_ids) for text in texts]


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    suites = ["gsm8k", "humaneval", *TASKS]
    parser.add_argument("--tasks", nargs="+", choices=suites, default=suites)
    parser.add_argument("--data", type=Path, help="folder with the prompts of gsm8k and humaneval")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default=str(outpace.nano_path()))
    parser.add_argument("--draft", default=str(outpace.nano_draft_path()), help="for assisted generation")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS)
    parser.add_argument("--adaptive", nargs="*", default=[], help="drafters to run under the governor too")
    return parser.parse_args()


def load(name: str) -> PreTrainedModel:
    """A model that does not end by itself."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True).eval()
    model.generation_config.eos_token_id = None
    return model


def main() -> None:
    options = arguments()
    model, tokenizer = load(options.model), AutoTokenizer.from_pretrained(options.model)
    suites = load_prompts(options.tasks, options.data, tokenizer, options.limit)
    target = outpace.Target(model)
    peers = {
        PLAIN: {},
        LOOKUP: {"prompt_lookup_num_tokens": 10},
        ASSISTED: {"assistant_model": load(options.draft)},
    }
    runs: dict[str, Run] = {
        **{
            name: Stock(model, options.new_tokens, tokenizer.eos_token_id, **own)
            for name, own in peers.items()
        },
        **{spec: Ours(target, spec, options.new_tokens) for spec in options.drafters},
        **{f"{spec}, adaptive": Ours(target, spec, options.new_tokens, True) for spec in options.adaptive},
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
