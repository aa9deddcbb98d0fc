"""Names of the laboratory are checked before torch is imported, and are those of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.catalogue import described, entry_of, outline
from outpace.plugins import installed
from outpace.spec import hints_of
from outpace.testing import gguf
from outpace_lab import names
from outpace_lab.cli.train_run import way_of
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.objectives import OBJECTIVES
from without_torch import check_answers, check_mistakes

MISTAKES = {
    "generate -p x --drafter retrieval:path=./no/store": "no such file: ./no/store",
    "datastore build texts --out x --model ./no/such/folder": "no such folder",
    "datastore info nope": "no such file: nope",
    "train medsa --data x --out y": "Did you mean 'medusa'?",
    'train {"method":"medsa"} --data x --out y': "Did you mean 'medusa'?",
    "train assistant --data x --out y": "assistant is not trained: it is published with its target",
    "train self_speculative --data x --out y": "`outpace search` finds the layers to skip",
    "train medusa --objective forward --data x --out y": "Did you mean 'forward_kl'?",
    "train medusa --tune lra --data x --out y": "Did you mean 'lora'?",
    "train eagle --data nope.jsonl --out y": "cannot read nope.jsonl: no such file or folder",
    "search --data nope.jsonl": "cannot read nope.jsonl: no such file or folder",
    "train medusa --model ./no/such/folder --data x --out y": "no such folder",
    "tune --objective troughput": "Did you mean 'throughput'?",
    "tune --suite bultin": "Did you mean 'builtin'?",
    "tune --drafters sufix": "Did you mean 'suffix'?",
    "tune --quantise int3": "Did you mean 'int8'?",
    "tune --like llama-2b": "Did you mean 'llama-",
    "tune --model ./no/such/folder": "no such folder",
    "search --data x --measure second": "Did you mean 'seconds'?",
    "search --data x --model ./no/such/folder": "no such folder",
    "grow --like llama-2b --out x": "Did you mean 'llama-",
    "grow --like llama-1b --out x --dtype bfloat": "Did you mean 'bfloat16'?",
    "grow --like llama-1b --out x --model ./no/such/folder": "no such folder",
    "gguf --out x.gguf --dtype q8": "Did you mean 'q8_0'?",
    "gguf --out x.gguf --model ./no/such/folder": "no such folder",
    "bench lab --peers vlm=VENV": "Did you mean 'vllm'?",
    "bench lab --quantise int3": "Did you mean 'int8'?",
    "bench lab --like llama-2b": "Did you mean 'llama-",
    "bench scaling --suite bultin": "Did you mean 'builtin'?",
    "bench scaling --windows two": "--windows takes numbers",
    "bench scaling --model ./no/such/folder": "no such folder",
    "drift -p x --verifier typcal": "Did you mean 'typical'?",
    "drift -p x --verifier typical:epsilo=1": "Did you mean 'epsilon'?",
    "generate -p x --drafter cascade:(sufix)+(lookahead)": "Did you mean 'suffix'?",
    "generate -p x --drafter windowed:sinc=4": "Did you mean 'sink",
    "generate -p x --drafter combined:(suffix)+(early_exit:path=./no/adapter)": "no folder ./no/adapter",
    "generate -p x --observer onlin": "Did you mean 'online'?",
    "serve --observer online:rate=1": "online has no option 'rate'",
    "chat --observer online:learningrate=1": "Did you mean 'learning_rate'?",
}


def test_mistakes_are_found_without_torch() -> None:
    check_mistakes(MISTAKES)


def test_answers_that_need_no_torch(tmp_path: Path) -> None:
    with DatastoreWriter(tmp_path / "store", 300) as writer:
        writer.add(range(300))
    check_answers({f"datastore info {tmp_path / 'store'}": "300 in 1 documents"})


@pytest.mark.parametrize("kind", ["drafter", "verifier", "observer"])
def test_the_table_is_that_of_the_classes(kind: str) -> None:
    for point in installed(f"{kind}s").values():
        cls, entry = point.load(), entry_of(kind, point)
        assert entry == described(point.name, cls), "run: python tools/reference.py"
        assert list(hints_of(outline(entry))) == list(hints_of(cls))


def test_names_are_those_of_the_tables() -> None:
    assert set(names.METHODS) == set(LEARNED)
    assert set(names.OBJECTIVES) == set(OBJECTIVES)
    assert set(names.GGUF_DTYPES) == set(gguf._DTYPES)
    for way in names.WAYS:
        way_of(way)
