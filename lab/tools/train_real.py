"""Train every learned drafter for SmolLM2-135M-Instruct, on the model's own answers.

    make real
    python lab/tools/train_real.py --data DATA --work WORK

Writes prompts (drafter_prompts.py) to WORK, then runs `outpace train` for each of RUNS, in WORK. The first
answers the prompts; all share these answers and the target's states. Finished runs are skipped, and
interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import drafter_prompts
from outpace_lab.train.provenance import PROVENANCE

OWN = 10000  # requests that the model writes itself
COMMON = "--model smollm2 --dtype bfloat16 --bf16 --rows 2 --length 512 --held-out 0.03 --states states"
HARD, SOFT = "--objective ground_truth", "--objective forward_kl"
SMALL = "draft_vocabulary=4096"
FEW = "--held-out 0.01"  # where a measurement runs the whole target
FIRST = "hydra"

RUNS = {
    FIRST: f"hydra:{SMALL} --max-new-tokens 128 --steps 3200 --evaluate-every 800 {SOFT}",
    "medusa": f"medusa:{SMALL} --steps 1600 --evaluate-every 800 {SOFT}",
    "medusa-2": f"medusa:{SMALL} --tune lora:rank=8 {FEW} --steps 320 --evaluate-every 160 {SOFT}",
    "eagle": (
        f"eagle:steps=3,{SMALL},own_head=false,layers=5+12+20+-1,fc_norm=true,norm_before_residual=true,"
        f"norm_output=true,heads=9,kv_heads=3 --steps 5000 --evaluate-every 1000 {SOFT}"
    ),
    "eagle-1": (
        f"eagle:version=1,linear_start=true,{SMALL},heads=9,kv_heads=3,steps=3,classification=1 "
        f"--learning-rate 6e-4 --steps 1200 --evaluate-every 600 {SOFT}"
    ),
    "blockwise": f"blockwise:{SMALL},width=2 --steps 400 --evaluate-every 200 {HARD}",
    "early_exit": (
        f"early_exit:layers=5,adapter=attention,heads=9,num_speculative_tokens=3,min_confidence=0.3,{SMALL} "
        f"--steps 3000 --evaluate-every 750 {SOFT}"
    ),
    "layer_skip": (
        f"early_exit:layers=8,width=1,num_speculative_tokens=3,min_confidence=0.3,{SMALL} "
        f"--tune lora:rank=8 {FEW} --steps 240 --evaluate-every 240 {SOFT}"
    ),
    "dflash": (
        f"dflash:tokens=4,depth=2,heads=9,kv_heads=3,anchors=96,layers=5+12+20+-1,{SMALL} --steps 1500 "
        f"--evaluate-every 500 {SOFT}"
    ),
    "spec_drafter": (
        "spec_drafter:hidden_size=192,depth=2,heads=3,kv_heads=3,tokens=3,anchors=64 --learning-rate 3e-3 "
        f"{FEW} --steps 100 --evaluate-every 100 {HARD}"
    ),
    "parallel_tokens": (
        "parallel_tokens:num_speculative_tokens=2,places=96 --rows 1 --learning-rate 5e-3 "
        f"{FEW} --steps 400 --evaluate-every 200 {HARD}"
    ),
    "draft": f"draft_model:hidden_size=256,depth=3,heads=4 --steps 1600 --evaluate-every 800 {HARD}",
    "draft-part": (
        f"draft_model:hidden_size=256,depth=3,heads=4,{SMALL} --steps 5000 --evaluate-every 1250 {HARD}"
    ),
    "draft-wide": (
        f"draft_model:hidden_size=576,depth=2,heads=9,kv_heads=3,{SMALL} --steps 2000 --evaluate-every 1000 "
        f"{HARD}"
    ),
    "draft-off": f"draft_model --draft draft --learning-rate 5e-4 --steps 80 --evaluate-every 80 {SOFT}",
    "draft-on": (
        "draft_model --draft draft --on-policy 0.5 --learning-rate 5e-4 --steps 80 --evaluate-every 80 "
        f"{SOFT}"
    ),
}
"""Name of the folder -> arguments of `outpace train`."""


def main() -> None:
    """Write the prompts, and train what is not trained yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the sources of drafter_prompts.py"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for prompts, answers and drafters")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        help=f"these, and {FIRST}, whose answers they learn",
    )
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    prompts = given.work / "prompts.jsonl"
    if not prompts.is_file():
        drafter_prompts.write(given.data, "smollm2", OWN, prompts)
    for name in [FIRST, *given.only]:
        if not (given.work / name / PROVENANCE).is_file():
            train(name, given.work)


def train(name: str, work: Path) -> None:
    """Run one training with paths relative to ``work``, so that its provenance has no local paths."""
    data = "prompts.jsonl" if name == FIRST else f"{FIRST}/answers.jsonl"
    arguments = f"{COMMON} {RUNS[name]} --data {data} --out {name}"
    print(f"outpace train {arguments}", flush=True)
    command = [Path(sys.executable).with_name("outpace"), "train", *arguments.split()]
    done = subprocess.run(command, cwd=work, check=False)
    if done.returncode:  # the command has said why
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
