"""Install a trained drafter among the package's models: in bfloat16, with a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from card_nano import table
from outpace.learned.folder import write_folder
from outpace.learned.learned import CONFIG, WEIGHTS
from outpace_lab.train.provenance import PROVENANCE

TARGET = "outpace-nano"
WIDTH = 110
DISTILLATION = "\n## Distillation\n\n"

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
- `lab/tools/dialogue.txt`: Apache-2.0, as the project
- functions of Python's standard library and of packages with a permissive licence:"""


def ship(folder: Path, place: Path, sources: Mapping[str, Any]) -> None:
    """Write a drafter's weights, config, provenance and card into the package.

    Args:
        folder: a folder that ``outpace train`` wrote.
        sources: the sources that answers.py wrote.
    """
    facts = _ship_weights(folder, place)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["target"]["name"] = TARGET
    write_folder(place, config, load_file(place / WEIGHTS))
    (place / "README.md").write_text(card(place.name, facts, sources), encoding="utf-8")


def ship_draft(folder: Path, place: Path) -> None:
    """Replace a draft model's weights and provenance by the distilled ones, and extend its card.

    Args:
        place: the model's folder, written by train_nano.py and card_nano.py or by this function.
    """
    facts = _ship_weights(folder, place)
    file = place / "README.md"
    before, rest = file.read_text(encoding="utf-8").split("\n## Data\n", 1)
    before = before.split(DISTILLATION)[0]
    file.write_text(f"{before}{DISTILLATION}{_distillation(facts)}\n## Data\n{rest}", encoding="utf-8")


def _ship_weights(folder: Path, place: Path) -> dict[str, Any]:
    """Write weights and provenance, and return the latter."""
    place.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    facts["command"][0] = Path(facts["command"][0]).name
    facts["result"]["target"]["name"] = TARGET
    _write(place / PROVENANCE, facts)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: small(tensor) for name, tensor in tensors.items()}, place / WEIGHTS, {"format": "pt"})
    return facts


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def _distillation(facts: Mapping[str, Any]) -> str:
    """The section of a draft model's card about its distillation."""
    return f"""\
{METHOD}

{amount(facts)}
It began with the weights that the training above left, of which the figures and samples below are.

```console
{" ".join(facts["command"])}
```

{held_out(facts["result"])}
"""


def amount(facts: Mapping[str, Any]) -> str:
    """The section about training: tokens, steps and settings."""
    result, settings = facts["result"], facts["settings"]
    return fill(
        f"{result['tokens_seen'] / 1e6:.2f} million tokens in {result['steps']:,} steps, "
        f"{result['cpu_seconds'] / 60:.0f} minutes, in {'bfloat16' if settings.get('bf16') else 'float32'}, "
        f"with AdamW; objective: {settings['objective']}.",
        WIDTH,
    )


def held_out(result: Mapping[str, Any]) -> str:
    """The section about the expected accepted length."""
    accepted = " ".join(f"{share:.2f}" for share in result["accepted_per_position"])
    return fill(
        f"On {result['held_out_documents']} answers that were held out, {result['expected_length']:.2f} "
        "tokens a step are expected of greedy decoding, where plain decoding has 1; the share of steps that "
        f"accept each position of the draft is {accepted}.",
        WIDTH,
    )


def card(name: str, facts: Mapping[str, Any], sources: Mapping[str, Any]) -> str:
    """The text of a model card."""
    result = facts["result"]
    packages = table(
        ("source of Python code", "version", "licence"),
        [(package["name"], package["version"], package["licence"]) for package in sources["packages"]],
    )
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in sources["shares"].items())
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

{amount(facts)}

```console
{" ".join(facts["command"])}
```

`python lab/tools/train_drafters.py --data DATA --work WORK --before DRAFT --ship src/outpace/models`, DRAFT
being the draft model before its distillation, makes the answers, trains, and writes this folder.

## Held-out figures

{held_out(result)}

## Data

Kinds of prompts (`lab/tools/corpus.py` says what they are): {kinds}.

Licences of what the prompts were cut out of:

{LICENCES}

{packages}
"""
