"""Learned drafters on prompts that none of them was trained on: what each accepts, and how fast it is.

    python benchmarks/learned.py --data DIR --models DIR --out benchmarks/RESULT.json

--data holds gsm8k_test*.jsonl and humaneval.jsonl. Each folder in --models is a drafter as `outpace train`
writes it (tools/train_drafters.py makes them all), each .json file the layers that self_speculative skips;
without --models the embedded ones are measured. Outputs are greedy and end at their end-of-sequence token, so
that all of the text is the target's answer.

`predicted` is the expected accepted length, the held-out figure of training, on plain decoding's own outputs;
`ratio` is that to tau. Speed is relative to `none` prompt by prompt, methods taking turns (see table.py);
--rounds 0 leaves it out. Tokens are those that training read, minutes those of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from table import Ours, Prompt, Run, finish, from_data, machine, measure

import outpace
from outpace.core import SamplingParams, Stats
from outpace.drafters import LEARNED
from outpace.drafting.learned import CONFIG, Learned
from outpace.targets import TargetModel
from outpace.train.data import Document
from outpace.train.metric import Replay
from outpace.train.provenance import PROVENANCE
from outpace.train.reading import read_batch

SUITES = ("gsm8k", "humaneval")
PLAIN = "none"
PLACES = 4  # of a draft, whose acceptance the table shows


@dataclass(frozen=True)
class Trained:
    """A drafter that was trained.

    Attributes:
        method: its name; the folder's weights are loaded by ``LEARNED[method]``.
        tokens, minutes: of its training, as the provenance says; None where it does not.
    """

    label: str
    method: str
    spec: str
    folder: Path
    objective: str = ""
    tokens: int | None = None
    minutes: float | None = None


@dataclass
class Figures:
    """What a drafter did on one suite.

    Attributes:
        tokens: of all outputs.
        tau: tokens a step.
        acceptance: share of steps that accept each position of the draft.
        predicted: the tau that ``Replay`` expects on the same text; None without weights to ask.
        equal: outputs that are plain decoding's.
        speed: median over prompts and rounds of the speed against plain decoding's; None if not timed.
    """

    label: str
    spec: str
    prompts: int
    tokens: int
    tau: float
    acceptance: list[float]
    predicted: float | None
    equal: int
    speed: float | None = None
    tokens_per_second: float | None = None
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.tau


def embedded() -> list[Trained]:
    """The drafters that come with the package."""
    folders = {name: outpace.nano_drafter_path(name) for name in ("medusa", "eagle")}
    found = [trained(folder, spec=name) for name, folder in folders.items()]
    return [*found, trained(outpace.nano_draft_path(), spec="draft_model")]


def all_in(models: Path) -> list[Trained]:
    """The drafters in the folders of a folder, and files of layers to skip."""
    found = [trained(place.parent) for place in sorted(models.glob(f"*/{CONFIG}"))]
    for file in sorted(models.glob("*.json")):
        spec = f"self_speculative:skip={file}"
        found.append(Trained(file.stem, "self_speculative", spec, file))
    if not found:
        raise SystemExit(f"no folder in {models} has a {CONFIG}; train some: tools/train_drafters.py")
    return found


def trained(folder: Path, spec: str | None = None) -> Trained:
    """A folder that ``outpace train`` wrote, or a draft model that came from elsewhere."""
    file = folder / PROVENANCE
    facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    result = facts.get("result", {})
    # A folder of transformers' own has no method in its config.
    method = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("method", "draft_model")
    option = "model" if method == "draft_model" else "path"
    seconds = result.get("cpu_seconds")
    return Trained(
        folder.name,
        method,
        spec or f"{method}:{option}={folder}",
        folder,
        facts.get("settings", {}).get("objective", ""),
        result.get("tokens_seen"),
        None if seconds is None else seconds / 60,
    )


def decode(target: TargetModel, spec: str, prompts: Sequence[Prompt], params: SamplingParams) -> Any:
    """Outputs, drafting all that a drafter can."""
    return outpace.Engine(target, spec, adaptive=False).generate([prompt.ids for prompt in prompts], params)


def predict(module: Learned, target: TargetModel, texts: Sequence[Document]) -> float:
    """The expected accepted length on texts."""
    replay = Replay()
    for text in texts:
        batch = read_batch(target, [[text]], module.hidden_layers)
        replay.add(batch, module.accepted(batch))
    return replay.expected_length


def count(
    drafter: Trained, target: TargetModel, prompts: Sequence[Prompt], params: SamplingParams, plain: Any
) -> Figures:
    """What a drafter accepts; nothing is timed."""
    found = decode(target, drafter.spec, prompts, params)
    total = Stats()
    for generation in found:
        total.steps += generation.stats.steps
        total.tokens += generation.stats.tokens
        stood = generation.stats.accepted_per_position
        total.accepted_per_position += [0] * (len(stood) - len(total.accepted_per_position))
        for place, number in enumerate(stood):
            total.accepted_per_position[place] += number
    cls = LEARNED.get(drafter.method)
    module = None if cls is None else cls.load(drafter.folder, target)
    texts = [
        Document((*prompt.ids, *generation.tokens), len(prompt.ids))
        for prompt, generation in zip(prompts, plain, strict=True)
    ]
    return Figures(
        drafter.label,
        drafter.spec,
        len(prompts),
        total.tokens,
        total.mean_accepted_length,
        [number / total.steps for number in total.accepted_per_position],
        None if module is None else predict(module, target, texts),
        sum(own.tokens == theirs.tokens for own, theirs in zip(found, plain, strict=True)),
        training={
            "method": drafter.method,
            "objective": drafter.objective,
            "parameters": 0 if module is None else sum(weight.numel() for weight in module.parameters()),
            "tokens": drafter.tokens,
            "minutes": drafter.minutes,
        },
    )


def time(
    found: Sequence[Figures], target: TargetModel, prompts: list[Prompt], new_tokens: int, rounds: int
) -> None:
    """Speeds against plain decoding's, methods taking turns."""
    runs: dict[str, Run] = {PLAIN: Ours(target, PLAIN, new_tokens)}
    runs.update({figures.label: Ours(target, figures.spec, new_tokens) for figures in found})
    rows = measure(runs, prompts, rounds)
    finish(rows, len(prompts), PLAIN)
    by_label = {row.method: row for row in rows}
    for figures in found:
        figures.speed = by_label[figures.label].speedup
        figures.tokens_per_second = by_label[figures.label].tokens_per_second


def table(found: Sequence[Figures]) -> str:
    places = [f"at {place + 1}" for place in range(PLACES)]
    training = ["parameters", "tokens", "minutes"]
    head = ["drafter", "tau", *places, "predicted", "ratio", "speed", *training, "equal"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for figures in found:
        accepted = [f"{share:.2f}" for share in figures.acceptance[:PLACES]]
        training = figures.training
        cells = [
            figures.label,
            f"{figures.tau:.3f}",
            *accepted,
            *[""] * (PLACES - len(accepted)),
            _shown(figures.predicted, ".3f"),
            _shown(figures.ratio, ".3f"),
            _shown(figures.speed, ".2f", " x"),
            _shown(training["parameters"], ","),
            _shown(training["tokens"], ","),
            _shown(training["minutes"], ".0f"),
            f"{figures.equal}/{figures.prompts}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with the prompts")
    parser.add_argument("--models", type=Path, help="folder with a folder for each drafter")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="folders in --models to measure, by name")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default=str(outpace.nano_path()))
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--rounds", type=int, default=3, help="0: nothing is timed")
    parser.add_argument("--new-tokens", type=int, default=128, help="at most")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Trained]:
    """The drafters to measure.

    Raises:
        SystemExit: there is none of a name that was given.
    """
    found = embedded() if options.models is None else all_in(options.models)
    missing = set(options.only or ()) - {drafter.label for drafter in found}
    if missing:
        raise SystemExit(f"no {', '.join(sorted(missing))} in {options.models or 'the package'}")
    return [drafter for drafter in found if not options.only or drafter.label in options.only]


def main() -> None:
    options = arguments()
    transformers.utils.logging.disable_progress_bar()
    drafters = chosen(options)
    target = outpace.Target(
        transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    params = SamplingParams(max_new_tokens=options.new_tokens)
    result: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv), "suites": {}}
    print(json.dumps(result["machine"]))
    for suite in options.suites:
        prompts = [
            replace(prompt, ends=True) for prompt in from_data(suite, options.data, tokenizer, options.limit)
        ]
        plain = decode(target, PLAIN, prompts, params)
        found = []
        for drafter in drafters:
            print(f"{suite}: {drafter.label}", file=sys.stderr)
            found.append(count(drafter, target, prompts, params, plain))
        if options.rounds:
            time(found, target, prompts, options.new_tokens, options.rounds)
        print(f"\n{suite}, {len(prompts)} prompts, {found[0].tokens} tokens\n\n{table(found)}", flush=True)
        result["suites"][suite] = [asdict(figures) | {"ratio": figures.ratio} for figures in found]
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
