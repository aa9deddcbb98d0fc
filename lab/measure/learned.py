"""Acceptance and speed of learned drafters on prompts that none of them was trained on.

    python lab/measure/learned.py --data DIR --models DIR --out RESULT.json

--data contains gsm8k_test*.jsonl and humaneval.jsonl. Each folder in --models is a drafter written by
`outpace train` (lab/tools/train_drafters.py makes them all), each .json file the layers that self_speculative
skips; without --models the embedded ones are measured. --also LABEL=SPEC adds other ways to draft, such as
eagle with a tree or several drafters at once. A drafter whose model was trained with it (--tune) is measured
alone, on that model: --model DIR/NAME/target. Outputs are greedy and end at their end-of-sequence token, so
that all of the text is the target's answer.

`predicted` is the expected accepted length, the held-out figure of training, on plain decoding's own outputs;
`ratio` is its ratio to tau. Speed is relative to `none` prompt by prompt, methods taking turns, as in
`outpace bench`. Tokens are those that training read, minutes those of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.bench.machine import machine
from outpace.bench.ours import Ours
from outpace.bench.rows import Row, rows_of
from outpace.bench.run import Measured, Settings, measure
from outpace.bench.subject import fitting
from outpace.bench.suites import load_suite
from outpace.learned.learned import CONFIG
from outpace.loading import Loaded, load
from outpace.targets import TargetModel
from outpace.targets.ties import margin
from outpace_lab.train.data import Document
from outpace_lab.train.joint import TARGET
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.metric import Replay
from outpace_lab.train.provenance import PROVENANCE
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained as Module

SUITES = ("gsm8k", "humaneval")
PLACES = 4  # places of a draft whose acceptance the table shows


@dataclass(frozen=True)
class Trained:
    """A trained drafter, or a way to draft with several.

    Attributes:
        method: its name; the folder's weights, if it has one, are loaded by ``LEARNED[method]``.
        tokens, minutes: of its training, from its provenance; None if unknown.
    """

    label: str
    method: str
    spec: str
    folder: Path | None = None
    objective: str = ""
    tokens: int | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class Figures:
    """The counts of a drafter on one suite.

    Attributes:
        tau: tokens per step.
        acceptance: share of steps that accept each position of the draft.
        predicted: the tau that ``Replay`` expects on plain decoding's text; None without weights.
        ratio: ``predicted`` divided by ``tau``.
        outputs: number of outputs of all rounds; ``equal`` of them equal plain decoding's.
        speed: median over prompts of the speed relative to plain decoding.
        interval: its 95% interval.
    """

    label: str
    spec: str
    method: str
    objective: str
    prompts: int
    tokens: int
    tau: float
    acceptance: list[float]
    predicted: float | None
    ratio: float | None
    outputs: int
    equal: int
    speed: float
    interval: tuple[float, float] | None
    tokens_per_second: float
    parameters: int | None
    training_tokens: int | None
    training_minutes: float | None


def embedded() -> list[Trained]:
    """The drafters that come with the package."""
    folders = {name: outpace.nano_drafter_path(name) for name in ("medusa", "eagle")}
    found = [trained(folder, spec=name) for name, folder in folders.items()]
    return [*found, trained(outpace.nano_draft_path(), spec="draft_model")]


def all_in(models: Path, model: str | None) -> list[Trained]:
    """The drafters for a model in the folders of a folder, and files of layers to skip."""
    folders = [place.parent for place in sorted(models.glob(f"*/{CONFIG}"))]
    tuned = [folder for folder in folders if (folder / TARGET).is_dir()]
    given = None if model is None else Path(model).resolve()
    own = [folder for folder in tuned if (folder / TARGET).resolve() == given]
    if own:
        return [trained(folder) for folder in own]
    found = [trained(folder) for folder in folders if folder not in tuned]
    for file in sorted(models.glob("*.json")):
        spec = f"self_speculative:skip={file}"
        found.append(Trained(file.stem, "self_speculative", spec, file))
    if not found:
        raise SystemExit(f"no folder in {models} has a {CONFIG}; train some: lab/tools/train_drafters.py")
    return found


def trained(folder: Path, spec: str | None = None) -> Trained:
    """A folder that ``outpace train`` wrote, or a draft model from elsewhere."""
    file = folder / PROVENANCE
    facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    result = facts.get("result", {})
    # A folder in transformers' format has no method in its config.
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


def predict(module: Module, target: TargetModel, texts: Sequence[Document]) -> float:
    """The expected accepted length on texts."""
    replay = Replay()
    for text in texts:
        batch = read_batch(target, [[text]], module.hidden_layers)
        replay.add(batch, module.accepted(batch))
    return replay.expected_length


def texts_of(measured: Measured) -> list[Document]:
    """Prompts, and plain decoding's outputs."""
    runs = [repeats[0][0] for repeats in measured.traces[0].runs]
    asked = [turns[0][0] for turns in measured.prompts]
    return [
        Document((*prompt, *run.outputs[0]), len(prompt)) for prompt, run in zip(asked, runs, strict=True)
    ]


def figures(drafter: Trained, row: Row, target: TargetModel, texts: Sequence[Document]) -> Figures:
    cls = LEARNED.get(drafter.method)
    module = None if cls is None or drafter.folder is None else cls.load(drafter.folder, target)
    predicted = None if module is None else predict(module, target, texts)
    if row.error is not None or row.tau is None or row.speed is None:
        raise SystemExit(f"{drafter.label}: {row.error}")
    return Figures(
        drafter.label,
        drafter.spec,
        drafter.method,
        drafter.objective,
        row.prompts,
        row.tokens,
        row.tau,
        row.acceptance_by_position,
        predicted,
        None if predicted is None else predicted / row.tau,
        row.outputs,
        row.outputs - row.different,
        row.speed.speedup,
        row.speed.interval,
        row.speed.tokens_per_second,
        None if module is None else sum(weight.numel() for weight in module.parameters()),
        drafter.tokens,
        drafter.minutes,
    )


def run(
    subject: Loaded, name: str, drafters: Sequence[Trained], options: argparse.Namespace
) -> list[Figures]:
    """Run one suite with all drafters, in turns."""
    suite = fitting(subject, load_suite(name, options.data), options.new_tokens).first(options.limit)
    settings = Settings(options.new_tokens, repeats=options.rounds, ends=True)
    specs = ["none", *(drafter.spec for drafter in drafters)]
    methods = [Ours(subject.target, spec, adaptive=False) for spec in specs]
    measured = measure(subject, methods, suite, 1, settings)
    rows, texts = rows_of(measured, partial(margin, subject.target)), texts_of(measured)
    return [
        figures(drafter, row, subject.target, texts) for drafter, row in zip(drafters, rows[1:], strict=True)
    ]


def table(found: Sequence[Figures]) -> str:
    places = [f"at {place + 1}" for place in range(PLACES)]
    training = ["parameters", "tokens", "minutes"]
    head = ["drafter", "tau", *places, "predicted", "ratio", "speed", "interval", *training, "equal"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for figures in found:
        accepted = [f"{share:.2f}" for share in figures.acceptance[:PLACES]]
        cells = [
            figures.label,
            f"{figures.tau:.3f}",
            *accepted,
            *[""] * (PLACES - len(accepted)),
            _shown(figures.predicted, ".3f"),
            _shown(figures.ratio, ".3f"),
            f"{figures.speed:.2f} x",
            "" if figures.interval is None else "{:.2f} to {:.2f}".format(*figures.interval),
            _shown(figures.parameters, ","),
            _shown(figures.training_tokens, ","),
            _shown(figures.training_minutes, ".0f"),
            f"{figures.equal}/{figures.outputs}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with the prompts")
    parser.add_argument("--models", type=Path, help="folder with a folder for each drafter")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="folders in --models to measure, by name")
    parser.add_argument(
        "--also",
        nargs="+",
        metavar="LABEL=SPEC",
        default=[],
        help="other ways to draft, to be measured too",
    )
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128, help="maximum per output")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Trained]:
    """The drafters to measure.

    Raises:
        SystemExit: a given name does not exist.
    """
    found = embedded() if options.models is None else all_in(options.models, options.model)
    missing = set(options.only or ()) - {drafter.label for drafter in found}
    if missing:
        raise SystemExit(f"no {', '.join(sorted(missing))} in {options.models or 'the package'}")
    found = [drafter for drafter in found if not options.only or drafter.label in options.only]
    for told in options.also:
        label, _, spec = told.partition("=")
        if not spec:
            raise SystemExit(f"--also takes LABEL=SPEC, not {told}")
        found.append(Trained(label, spec.partition(":")[0], spec))
    return found


def main() -> None:
    options = arguments()
    drafters = chosen(options)
    subject = load(options.model)
    result: dict[str, Any] = {"machine": machine(subject.device), "command": " ".join(sys.argv), "suites": {}}
    for suite in options.suites:
        found = run(subject, suite, drafters, options)
        print(
            f"\n{suite}, {found[0].prompts} prompts, {found[0].tokens} tokens\n\n{table(found)}", flush=True
        )
        result["suites"][suite] = [asdict(figures) for figures in found]
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
