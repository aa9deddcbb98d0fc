"""Publish a drafter that train_real.py trained: in bfloat16, without local paths, with a card.

python lab/tools/publish_drafter.py WORK/hydra drafters/hydra --target HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from card_drafters import amount, held_out, small
from outpace.learned.folder import CONFIG, WEIGHTS, write_folder
from outpace_lab.train.provenance import PROVENANCE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of `outpace train`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True, help="the model's public name")
    given = parser.parse_args()
    described: dict[str, Any] = json.loads((given.source / CONFIG).read_text("utf-8"))
    described["target"]["name"] = given.target
    tensors = load_file(given.source / WEIGHTS)
    write_folder(given.out, described, {name: small(tensor) for name, tensor in tensors.items()})
    facts = json.loads((given.source / PROVENANCE).read_text("utf-8"))
    (given.out / "README.md").write_text(card(described["method"], given.target, given.out, facts), "utf-8")


def card(method: str, target: str, folder: Path, facts: dict[str, Any]) -> str:
    """The text of a card: what it is, how to use it, and how it was made."""
    return f"""\
---
license: apache-2.0
base_model: {target}
language: en
---

# {method} for {target}

It drafts for that model, whose embeddings and head it uses; it is no model by itself.
{facts["result"]["parameters"]:,} parameters, bf16.

```console
outpace generate --model smollm2 --chat --drafter {method}:path={folder} --prompt "..." --compare
```

## Training

What it learnt are the model's own greedy answers: to questions of GSM8K's train split (MIT), problems 84 to
163 of HumanEval (MIT), requests to write about a topic, and requests that the model wrote itself
(`lab/tools/drafter_prompts.py`). Nothing of GSM8K's test split, of Spec-Bench or of HumanEval's first 84
problems was among them.

{amount(facts)}

```console
outpace {" ".join(facts["command"][1:])}
```

{held_out(facts["result"])}
"""


if __name__ == "__main__":
    main()
