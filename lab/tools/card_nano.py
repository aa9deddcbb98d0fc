"""Write the model cards of outpace-nano and outpace-nano-draft from the record of their training.

    python lab/tools/card_nano.py --models src/outpace/models --checkpoints checkpoints

train_nano.py writes record.json and held_out.json to its --checkpoints folder. The cards contain those
figures, and greedy continuations of held-out prompts by the exported models, with the share of 4-grams that
repeat.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from corpus import END_OF_TEXT
from train_nano import CONTEXT, DRAFT, END_ID, MIX, TARGET, VOCABULARY

NEW_TOKENS = 128
PROMPTS_PER_KIND = 20

KINDS = {
    "gsm8k": "GSM8K's train split as `Question: ... Answer: ...`, without the calculator notes",
    "code": "Python files of the standard library and of packages with a permissive licence",
    "function": "functions with docstrings, cut out of those files",
    "prose": "WikiText-2's validation and test articles, without the sentences that have an unknown word",
    "dialogue": "short conversations as `User: ... Assistant: ...`, written for this project",
    "correction": "`Text: ... Corrected: ...`: passages of the prose and of GSM8K with spelling errors added",
    "retrieval": "`Document: ... Question: ... Answer: ...`: the answer is copied from the document",
}

SAMPLES = (
    "User: Hello\nAssistant:",
    "User: Who are you?\nAssistant:",
    "User: What is lookahead decoding?\nAssistant:",
    "Question: A farmer has 12 cows and buys 8 more. How many cows does he have?\nAnswer:",
    'def add_numbers(numbers):\n    """Return the sum of the numbers in the list."""\n',
    "Text: The weathre was good and the chidlren played in the garden.\nCorrected:",
    "Document: The mill was built in 1820. It burned down in 1871. A school stands there today.\n"
    "Question: What does the document say about burned down?\nAnswer:",
)

INTRODUCTIONS = {
    TARGET: """\
A very small language model of the Llama architecture. It comes with outpace so that the library can be
tried and tested at once, without a download. It was trained to answer a greeting, to imitate solutions of
school mathematics, to continue Python code and to copy text. The table and the samples below show how far
that goes: do not rely on anything it writes.""",
    DRAFT: f"""\
The draft model of {TARGET}: smaller, with the same tokenizer, and trained on the same batches. It guesses
tokens, and {TARGET} checks them. It is not meant to be used alone.""",
}

METHOD = """\
The weights were trained in float32, with Muon for the matrices of the layers and AdamW for the rest. The
learning rate fell to zero over the time that was given. The command (`--precision` is that of the matrix
products):"""

HELD_OUT = f"""\
About 2 % of the documents of each kind were held out: whole problems, files, articles and conversations. In
the table, `share` is the share of the training tokens, and `epochs` says how often each token was seen. The
loss is in nats per token. The last two columns are about greedy continuations, of {NEW_TOKENS} tokens at
most, of up to {PROMPTS_PER_KIND} held-out prompts of each kind: the mean share of 4-grams of tokens that
occurred before in the same continuation, and the share of the continuations that equal the held-out text.
Text that repeats itself flatters every method that guesses from n-grams, so read acceptance figures beside
this share."""


@dataclass
class Continuations:
    """A model's outputs for the held-out prompts of one kind."""

    repeated: float
    exact: float
    """The share that equals the held-out text to its end. Only a prompt to copy settles what must follow."""


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams that occurred before in the same tokens."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def prompt_of(kind: str, text: str) -> tuple[str, str]:
    """Cut a held-out text into a prompt and the rest."""
    marks = {"gsm8k": "\nAnswer:", "correction": "\nCorrected:", "retrieval": "\nAnswer:", "dialogue": ":"}
    if kind == "dialogue":
        text = text.split(END_OF_TEXT)[0]
        at = text.index("\nAssistant:") + len("\nAssistant:")
    elif kind in marks:
        at = text.rindex(marks[kind]) + len(marks[kind])
    else:
        # Plain text is cut at the first line end after some 300 characters, or in the middle if it is short.
        at = text.find("\n", min(300, len(text) // 2)) + 1 or len(text) // 2
    return text[:at], text[at:]


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> list[list[int]]:
    """The tokens that the model emits after each prompt, up to the end of the text."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    length = inputs["input_ids"].shape[1]
    room = min(NEW_TOKENS, CONTEXT - length)
    output = model.generate(**inputs, max_new_tokens=room, do_sample=False)  # type: ignore[operator]
    written = output[:, length:].tolist()
    return [tokens[: tokens.index(END_ID)] if END_ID in tokens else tokens for tokens in written]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str, texts: list[str]
) -> Continuations:
    """Continue held-out prompts of one kind."""
    repeated, exact = [], []
    # Long problems and passages are left out, so that a batch has little padding.
    fitting = [text for text in texts if len(text) < 3000 or kind in ("code", "prose")][:PROMPTS_PER_KIND]
    prompts, rests = zip(*(prompt_of(kind, text) for text in fitting), strict=True)
    for written, rest in zip(continue_greedily(model, tokenizer, list(prompts)), rests, strict=True):
        wanted = tokenizer(rest, verbose=False)["input_ids"][:NEW_TOKENS]
        repeated.append(repeated_share(written))
        exact.append(written == wanted)
    return Continuations(sum(repeated) / len(repeated), sum(exact) / len(exact))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def kinds_table(name: str, record: dict[str, Any], written: dict[str, Continuations]) -> str:
    """Tokens trained on per kind of text, and the loss on its held-out part."""
    rows = [
        (
            kind,
            f"{record['documents'][kind]:,}",
            f"{record['tokens_per_kind'][kind] / 1e6:.2f} M",
            f"{share:.0%}",
            f"{share * record['tokens'] / record['tokens_per_kind'][kind]:.1f}",
            f"{record['held_out'][name][kind]:.3f}",
            f"{written[kind].repeated:.0%}",
            f"{written[kind].exact:.0%}",
        )
        for kind, share in MIX.items()
    ]
    head = ("kind", "documents", "tokens", "share", "epochs", "held-out loss", "repeated 4-grams", "exact")
    return table(head, rows)


def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The sample prompts with the model's continuations."""
    parts = []
    for prompt in SAMPLES:
        text = tokenizer.decode(continue_greedily(model, tokenizer, [prompt])[0])
        parts.append(f"Prompt:\n\n```text\n{prompt}\n```\n\nContinuation:\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def card(
    name: str,
    models: Path,
    record: dict[str, Any],
    held_out: dict[str, list[str]],
    machine: str,
    note: str,
) -> str:
    """The text of one model card."""
    model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    written = {}
    for kind in MIX:
        written[kind] = measure(model, tokenizer, kind, held_out[kind])
        print(f"{name}, {kind}: {written[kind]}", flush=True)
    config = model.config
    shape = (
        f"{model.num_parameters():,} parameters: {config.num_hidden_layers} layers, hidden size"
        f" {config.hidden_size}, {config.num_attention_heads} attention heads with"
        f" {config.num_key_value_heads} for keys and values, tied embeddings,\n"
        f"byte-level BPE of {VOCABULARY:,} tokens, context {CONTEXT:,}, bf16."
    )
    amount = (
        f"{record['tokens'] / 1e6:.1f} million tokens in {record['steps']:,} steps,\n"
        f"{record['active'] / 60:.0f} minutes of active time on {machine}."
    )
    sources = "\n".join(f"- {kind}: {what}" for kind, what in KINDS.items())
    packages = table(
        ("source of Python code", "version", "licence"),
        [(package["name"], package["version"], package["licence"]) for package in record["packages"]],
    )
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{INTRODUCTIONS[name]}

{shape}

## Training

{amount}

{METHOD}

```console
{record["command"]}
```

{note}

## Data

{sources}

{HELD_OUT}

{kinds_table(name, record, written)}

## Licences of the data

- GSM8K (openai/grade-school-math): MIT
- WikiText-2: CC BY-SA 3.0
- the dialogue, `lab/tools/dialogue.txt`: Apache-2.0, as the project
- the Python code:

{packages}

## Samples

Greedy, at most {NEW_TOKENS} tokens.

{samples(model, tokenizer)}
"""


def main() -> None:
    """Write README.md into both model folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder with the two model folders")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="train_nano.py's folder"
    )
    parser.add_argument("--machine", default="a CPU", help="what the models were trained on, in words")
    parser.add_argument("--note", default="", help="a note on the training, such as the origin of INIT")
    options = parser.parse_args()
    if not (options.checkpoints / "record.json").is_file():
        parser.error(
            f"--checkpoints: there is no record.json in {options.checkpoints}; finish a training first"
        )
    record = json.loads((options.checkpoints / "record.json").read_text(encoding="utf-8"))
    held_out = json.loads((options.checkpoints / "held_out.json").read_text(encoding="utf-8"))
    for name in (TARGET, DRAFT):
        text = card(name, options.models, record, held_out, options.machine, options.note)
        (options.models / name / "README.md").write_text(text, encoding="utf-8")
        print(f"wrote the card of {name}")


if __name__ == "__main__":
    main()
