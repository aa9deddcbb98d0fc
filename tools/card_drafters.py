"""Puts a trained drafter where the package keeps its models: in bfloat16, with a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from card_nano import table
from outpace.drafting.learned import CONFIG, WEIGHTS
from outpace.train.provenance import PROVENANCE

TARGET = "outpace-nano"
WIDTH = 110

INTRODUCTIONS = {
    "medusa": """\
Medusa's heads (Cai et al. 2024) for outpace-nano, the embedded model of outpace: a head for each of the
next tokens, residual layers on the target's last hidden state, with the target's own projection to the
vocabulary. The drafter `medusa` reads them where no path is given.""",
    "eagle": """\
An EAGLE-3 (Li et al. 2025) for outpace-nano, the embedded model of outpace: one decoder layer that goes on
with hidden states of three of the target's layers, with the target's own embeddings and head. The drafter
`eagle` reads it where no path is given.""",
}

METHOD = """\
What it learnt are outpace-nano's own answers to prompts out of the training split of its own corpus: half of
them greedy, half drawn at temperature 1. Nothing of GSM8K's test split or of HumanEval was among them. Tokens
are counted with the prompts, which are read but not learnt; time is that of one core."""

LICENCES = """\
- GSM8K's train split (openai/grade-school-math): MIT
- WikiText-2: CC BY-SA 3.0
- `tools/dialogue.txt`: Apache-2.0, as the project
- functions of Python's standard library and of packages with a permissive licence:"""


def ship(folder: Path, place: Path, sources: Mapping[str, Any]) -> None:
    """Write a drafter's weights, config, provenance and card into the package.

    Args:
        folder: as ``outpace train`` wrote it.
        sources: as answers.py wrote them.
    """
    place.mkdir(parents=True, exist_ok=True)
    facts = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    facts["command"][0] = Path(facts["command"][0]).name
    facts["result"]["target"]["name"] = TARGET
    _write(place / PROVENANCE, facts)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: _small(tensor) for name, tensor in tensors.items()}, place / WEIGHTS, {"format": "pt"})
    if facts["result"]["method"] == "draft_model":
        for file in folder.glob("*.json*"):
            if file.name not in (PROVENANCE, "log.jsonl"):
                shutil.copy(file, place / file.name)
    else:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["target"]["name"] = TARGET
        _write(place / CONFIG, config)
    (place / "README.md").write_text(card(place.name, facts, sources), encoding="utf-8")


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def card(name: str, facts: Mapping[str, Any], sources: Mapping[str, Any]) -> str:
    """The text of a model card."""
    result, settings = facts["result"], facts["settings"]
    accepted = " ".join(f"{share:.2f}" for share in result["accepted_per_position"])
    packages = table(
        ("source of Python code", "version", "licence"),
        [(package["name"], package["version"], package["licence"]) for package in sources["packages"]],
    )
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in sources["shares"].items())
    amount = fill(
        f"{result['tokens_seen'] / 1e6:.2f} million tokens in {result['steps']:,} steps, "
        f"{result['cpu_seconds'] / 60:.0f} minutes, in float32, with AdamW; objective: "
        f"{settings['objective']}.",
        WIDTH,
    )
    held_out = fill(
        f"On {result['held_out_documents']} answers that were held out, {result['expected_length']:.2f} "
        "tokens a step are expected of greedy decoding, where plain decoding has 1; the share of steps that "
        f"accept each position of the draft is {accepted}.",
        WIDTH,
    )
    return f"""\
---
license: apache-2.0
language: en
---

# {name}

{INTRODUCTIONS[result["method"]]}

{result["parameters"]:,} parameters, bf16.

## Training

{METHOD}

{amount}

```console
{" ".join(facts["command"])}
```

`python tools/train_drafters.py --data DATA --work WORK --ship src/outpace/models` makes the answers, trains,
and writes this folder.

## Held-out figures

{held_out}

## Data

Kinds of prompts (`tools/corpus.py` says what they are): {kinds}.

Licences of what the prompts were cut out of:

{LICENCES}

{packages}
"""
