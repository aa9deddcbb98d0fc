"""Public sets of prompts, from a user's folder or the Hugging Face hub; none is shipped.

- ``spec_bench``: Spec-Bench, Xia et al. 2024, arXiv 2401.07851.
- ``mt_bench``: MT-Bench, Zheng et al. 2023, arXiv 2306.05685; Spec-Bench's file contains it too.
- ``humaneval``: HumanEval, Chen et al. 2021, arXiv 2107.03374.
- ``gsm8k``: GSM8K's test split, Cobbe et al. 2021, arXiv 2110.14168.
- ``speed_bench``: SPEED-Bench's qualitative split, arXiv 2604.09557. Some of its prompts are placeholders,
  which its own script fetches from other sets: those are omitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from outpace.bench.items import Expected, Item, Suite, read_values
from outpace.core import OutpaceError, first_line, install

Value = Mapping[str, Any]

DATA = "OUTPACE_DATA"

_SPEC_BENCH_FILE = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
# Spec-Bench's file contains MT-Bench's categories besides its own five.
_SPEC_BENCH_OWN = ("translation", "summarization", "qa", "math_reasoning", "rag")
_GRADED: Mapping[str, Literal["number", "overlap"]] = {
    "translation": "overlap",
    "summarization": "overlap",
    "math_reasoning": "number",
}
_NOT_THERE = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class PublicSet:
    """Location of a set, and the parser of its lines.

    Attributes:
        files: patterns of its file in a folder; the first one that matches is used.
        hub: arguments of ``datasets.load_dataset``.
        item: maps a line and its number to a prompt; None for a line of another set.
    """

    files: tuple[str, ...]
    hub: Mapping[str, str]
    item: Callable[[Value, int], Item | None]


def _spec_bench(value: Value, number: int) -> Item:
    category = value["category"] if value["category"] in _SPEC_BENCH_OWN else "mt_bench"
    expected = None
    if category in _GRADED and value.get("reference"):
        expected = Expected(_GRADED[category], str(value["reference"][0]))
    name = str(value.get("question_id", number))
    return Item(name, category, tuple(value["turns"]), chat=True, expected=expected)


def _mt_bench(value: Value, number: int) -> Item | None:
    if value["category"] in _SPEC_BENCH_OWN:
        return None
    turns = value["turns"] if "turns" in value else value["prompt"]
    name = value.get("question_id", value.get("prompt_id", number))
    return Item(str(name), value["category"], tuple(turns), chat=True)


def _humaneval(value: Value, number: int) -> Item:
    expected = None
    if "test" in value:
        expected = Expected("program", f"{value['test']}\ncheck({value['entry_point']})")
    return Item(str(value.get("task_id", number)), "code", (value["prompt"],), expected=expected)


def _gsm8k(value: Value, number: int) -> Item:
    expected = Expected("number", value["answer"]) if "answer" in value else None
    return Item(str(number), "math", (f"Question: {value['question']}\nAnswer:",), expected=expected)


def _speed_bench(value: Value, number: int) -> Item | None:
    turns = [turn["content"] if isinstance(turn, Mapping) else turn for turn in value["turns"]]
    if any(_NOT_THERE in turn for turn in turns):
        return None
    return Item(str(value.get("question_id", number)), value["category"], tuple(turns), chat=True)


PUBLIC = {
    "spec_bench": PublicSet(
        ("spec_bench*.jsonl", "spec_bench/question.jsonl"),
        {"path": "json", "data_files": _SPEC_BENCH_FILE, "split": "train"},
        _spec_bench,
    ),
    "mt_bench": PublicSet(
        ("mt_bench*.jsonl", "mt_bench/question.jsonl", "spec_bench*.jsonl", "spec_bench/question.jsonl"),
        {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
        _mt_bench,
    ),
    "humaneval": PublicSet(
        ("humaneval*.jsonl", "HumanEval*.jsonl", "humaneval*.jsonl.gz", "HumanEval*.jsonl.gz"),
        {"path": "openai/openai_humaneval", "split": "test"},
        _humaneval,
    ),
    "gsm8k": PublicSet(
        ("gsm8k_test*.jsonl", "gsm8k/test.jsonl"),
        {"path": "openai/gsm8k", "name": "main", "split": "test"},
        _gsm8k,
    ),
    "speed_bench": PublicSet(
        ("speed_bench*.jsonl", "speed-bench*.jsonl", "qualitative.jsonl"),
        {"path": "nvidia/SPEED-Bench", "name": "qualitative", "split": "test"},
        _speed_bench,
    ),
}


def load_public(name: str, data: Path | None) -> Suite:
    """Load a public set from ``data``, otherwise from the folder in OUTPACE_DATA, otherwise from the hub.

    Raises:
        OutpaceError: it is not found there, or not in its published format.
    """
    wanted = PUBLIC[name]
    given = data or (Path(os.environ[DATA]) if os.environ.get(DATA) else None)
    if given is None:
        return _read(name, wanted, _from_hub(name, wanted), str(wanted.hub["path"]))
    folder = given.expanduser()
    if not folder.is_dir():
        raise OutpaceError(f"no such folder: {folder}; it should contain the prompts of {name}")
    found = next((file for pattern in wanted.files for file in sorted(folder.glob(pattern))), None)
    if found is None:
        raise OutpaceError(
            f"the suite {name} is not in {folder}: no {' or '.join(wanted.files)}; put it there, or leave "
            f"--data and {DATA} out to fetch it from the Hugging Face hub"
        )
    return _read(name, wanted, read_values(found), str(found))


# Entry points of the group ``outpace.suites``.
spec_bench = partial(load_public, "spec_bench")
mt_bench = partial(load_public, "mt_bench")
humaneval = partial(load_public, "humaneval")
gsm8k = partial(load_public, "gsm8k")
speed_bench = partial(load_public, "speed_bench")


def _read(name: str, wanted: PublicSet, values: Iterable[Value], source: str) -> Suite:
    """Read the prompts; count the placeholders."""
    try:
        found = [wanted.item(value, number) for number, value in enumerate(values, start=1)]
    except (KeyError, TypeError, AttributeError) as error:
        raise OutpaceError(f"{source} is not {name} as it is published: {first_line(error)}") from None
    items = tuple(item for item in found if item is not None)
    if not items:
        raise OutpaceError(
            f"{source} contains no prompt of {name}; prompts that are only named there are fetched with the "
            "script of its makers"
        )
    return Suite(name, items, source, left_out=len(found) - len(items) if name == "speed_bench" else 0)


def _from_hub(name: str, wanted: PublicSet) -> Iterable[Value]:
    remedy = f"give --data DIR or {DATA}, a folder with {wanted.files[0]}"
    if find_spec("datasets") is None:
        raise OutpaceError(
            f"the suite {name} is not available: {remedy}; or, to fetch it from the Hugging Face hub: "
            f"{install('datasets', 'outpace-lab')}"
        )
    from datasets import load_dataset

    try:
        found: Iterable[Value] = load_dataset(**wanted.hub)
    except Exception as error:  # the hub, the network and the loader may raise any error
        raise OutpaceError(
            f"the suite {name} cannot be fetched from the Hugging Face hub ({first_line(error)}); {remedy}"
        ) from error
    return found
