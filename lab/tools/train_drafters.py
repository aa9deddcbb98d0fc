"""Train drafters for outpace-nano: those of the package, and those of lab/measure/learned.py.

    python lab/tools/train_drafters.py --data DATA --work WORK --before DRAFT
    python lab/tools/train_drafters.py --data DATA --work WORK --before DRAFT --ship src/outpace/models

outpace-nano answers prompts (answers.py), then `outpace train` trains each drafter of RUNS on them, in
WORK/models. DRAFT is the draft model that train_nano.py wrote; the package's is distilled already. Finished
runs are skipped, and interrupted ones resumed. --ship writes those of SHIPPED, in bfloat16 and with their
cards, to the package's models. --quick runs everything in minutes, with a few prompts and steps, as a test;
its drafters are useless.

    python lab/tools/train_drafters.py --data DATA --work SCRATCH --ship SCRATCH/shipped --quick
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import answers
import card_drafters
from outpace import nano_draft_path
from outpace.core import SamplingParams
from outpace.loading import load
from outpace_lab.train.data import read
from outpace_lab.train.provenance import PROVENANCE
from outpace_lab.train.skipping import find_skipped_layers

BEFORE = "draft_model-before"

COMMON = "--length 512 --held-out 0.02"
DRAFT = f"draft_model --draft models/{BEFORE} --rows 2 --steps 120 --learning-rate 3e-4 --evaluate-every 60"
SHORT = "--rows 2 --steps 120 --learning-rate 2e-3 --evaluate-every 60"
SOFT = "--objective forward_kl"

RUNS = {
    "medusa": "medusa:heads=4,layers=2 --rows 4 --steps 300 --learning-rate 2e-3",
    "eagle": (
        f"eagle:own_head=false,steps=4 --rows 2 --steps 200 --learning-rate 2e-3 --evaluate-every 50 {SOFT}"
    ),
    "draft_model": f"draft_model --draft models/{BEFORE} --rows 4 --steps 300 --learning-rate 5e-4 {SOFT}",
    "draft_model-plain": DRAFT,
    "draft_model-seq_kd": DRAFT,
    "draft_model-forward_kl": f"{DRAFT} {SOFT}",
    "draft_model-reverse_kl": f"{DRAFT} --objective reverse_kl",
    "draft_model-jensen_shannon": f"{DRAFT} --objective jensen_shannon",
    "draft_model-total_variation": f"{DRAFT} --objective total_variation",
    "draft_model-on_policy": f"{DRAFT} {SOFT} --on-policy 0.5",
    "draft_model-second": f"{DRAFT} --seed 1",
    "draft_model-boosted": f"{DRAFT} --seed 1 --boost-after models/draft_model-seq_kd",
    "medusa-1": f"medusa:heads=4,layers=2 {SHORT}",
    "medusa-2": f"medusa:heads=4,layers=2 --tune lora:rank=8 {SHORT}",
    "eagle-3": f"eagle:own_head=false,steps=4 {SHORT} {SOFT}",
    "eagle-1": f"eagle:version=1,own_head=false {SHORT} {SOFT}",
    "hydra": f"hydra {SHORT}",
    "blockwise": f"blockwise {SHORT}",
    "early_exit": f"early_exit {SHORT}",
    "early_exit-attention": f"early_exit:adapter=attention {SHORT}",
    "parallel_tokens": f"parallel_tokens {SHORT}",
    "dflash": f"dflash {SHORT}",
    "spec_drafter": f"spec_drafter {SHORT}",
}
"""Name of the folder -> arguments of `outpace train`. All learn the target's answers but one."""

ON_TEXTS = "draft_model-plain"
"""Learns the corpus's own answers to the same prompts: the baseline of distillation."""

SEARCHED = "self_speculative"
"""Has no weights; the layers to skip are searched."""

PROMPTS_OF_SEARCH = 16
TRIALS = 30

QUICK_ANSWERS = ("--prompts", "400", "--new-tokens", "16")
QUICK = "--length 128 --held-out 0.1 --rows 1 --steps 2 --evaluate-every 1"
QUICK_TRIALS = 2

SHIPPED = {"outpace-nano-medusa": "medusa", "outpace-nano-eagle": "eagle"}
SHIPPED_DRAFT = "draft_model"


def train(name: str, work: Path, quick: bool) -> None:
    """Run one training with paths relative to ``work``, so that its provenance has no local paths."""
    source = "texts" if name == ON_TEXTS else "answers"
    method, *rest = f"{RUNS[name]} {QUICK if quick else ''}".split()
    command = ["train", method, "--data", source, "--out", f"models/{name}", *COMMON.split(), *rest]
    print(f"outpace {' '.join(command)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("outpace"), *command], cwd=work, check=True)


def search(work: Path, trials: int) -> None:
    """Search for the best layers for self_speculative to skip, on answered prompts."""
    model = load()
    documents = read(work / "answers" / "000.jsonl", model)[:PROMPTS_OF_SEARCH]
    prompts = [document.tokens[: document.prompt] for document in documents]
    params = SamplingParams(max_new_tokens=64)
    found = find_skipped_layers(model.target, prompts, params, trials=trials)
    print(f"{SEARCHED}: {found}", flush=True)
    found.save(work / "models" / f"{SEARCHED}.json")


def begin(options: argparse.Namespace) -> Path:
    """Prepare the answers and the initial draft model, and return the folder of the drafters."""
    models: Path = options.work / "models"
    before = models / BEFORE
    wanted = options.ship or any(BEFORE in RUNS.get(name, "") for name in options.only)
    distilled = (options.before / PROVENANCE).is_file()
    if wanted and distilled and not before.is_dir() and not options.quick:
        raise SystemExit(
            f"{options.before} is distilled already, so its gain could not be measured; give "
            "the one that train_nano.py wrote: --before"
        )
    options.work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, answers.__file__, "--data", options.data, "--out", options.work]
    subprocess.run([*command, *(QUICK_ANSWERS if options.quick else ())], check=True)
    if not before.is_dir():
        shutil.copytree(options.before, before)
    return models


def ship(models: Path, sources: Path, place: Path) -> None:
    """Write the shipped drafters to the package's models or another folder."""
    draft = place / nano_draft_path().name
    if not draft.is_dir():
        shutil.copytree(models / BEFORE, draft)  # whose card is added to
    for folder, name in SHIPPED.items():
        facts = json.loads(sources.read_text(encoding="utf-8"))
        card_drafters.ship(models / name, place / folder, facts)
    card_drafters.ship_draft(models / SHIPPED_DRAFT, draft)


def main() -> None:
    """Answer, train, and ship as requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sources of corpus.py")
    parser.add_argument("--work", type=Path, required=True, help="folder for answers and drafters")
    parser.add_argument(
        "--before", type=Path, default=nano_draft_path(), help="the draft model that train_nano.py wrote"
    )
    parser.add_argument("--only", nargs="+", choices=[*RUNS, SEARCHED], default=[*RUNS, SEARCHED])
    parser.add_argument("--ship", type=Path, metavar="MODELS", help="folder for the shipped drafters")
    parser.add_argument("--quick", action="store_true", help="a few prompts and steps, as a test")
    options = parser.parse_args()
    if options.quick and options.ship and options.ship.resolve() == nano_draft_path().parent.resolve():
        parser.error("--quick drafters are useless: give another folder to --ship")
    models = begin(options)
    for name in options.only:
        if name == SEARCHED:
            if not (models / f"{SEARCHED}.json").is_file():
                search(options.work, QUICK_TRIALS if options.quick else TRIALS)
        elif not (models / name / PROVENANCE).is_file():
            train(name, options.work, options.quick)
    if options.ship:
        ship(models, options.work / "sources.json", options.ship)


if __name__ == "__main__":
    main()
