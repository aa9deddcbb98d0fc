"""Data sets of the hub: the documents of their rows, and messages if there are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from learning import Letters
from outpace.core import OutpaceError
from outpace_lab.train import hub
from outpace_lab.train.data import Document


def library(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    """Puts a ``datasets`` in place that has these rows, or raises them; what it is called with."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        if isinstance(rows, Exception):
            raise rows
        return rows

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_rows_are_read_as_lines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "p", "answer": "rs", "text": None}, {"question": "q", "answer": None}]
    calls = library(monkeypatch, rows)
    found = hub.read("hub:name=some/set,config=main,split=train[:2],revision=v1", Letters())
    assert found == [Document((1, *map(ord, "prs")), 2), Document((1, ord("q")), 2, open=True)]
    assert calls == [(("some/set", "main"), {"split": "train[:2]", "revision": "v1"})]
    assert hub.read("hub:name=some/set", Letters(), chat=True)[1].tokens == tuple(map(ord, "uqa"))
    assert calls[1] == (("some/set", None), {"split": "train", "revision": None})


@pytest.mark.parametrize(
    ("source", "rows", "message"),
    [
        ("hub:name=a/b", [{"text": "x"}, {"words": "y"}], 'a/b, row 1 of train: no "text"'),
        ("hub:name=a/b,split=test", [], "a/b has no rows in test; give another split"),
        (
            "hub:name=a/b",
            ConnectionError("no route\nto it"),
            r"set a/b \(config None, split train\): no route\. W",
        ),
        ("hub:name=a/b", ValueError(), r"ValueError\. Without a network only the local cache"),
        ("hub:split=test", [], "hub needs name"),
        ("hub:name=a/b,subset=x", [], "hub has no option 'subset'"),
    ],
)
def test_mistakes_are_named(source: str, rows: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, rows)
    with pytest.raises(OutpaceError, match=message):
        hub.read(source, Letters())


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OutpaceError, match=r"needs datasets: pip install .*lab\[train\]"):
        hub.read("hub:name=a/b", Letters())


def test_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "set").mkdir()
    lines = [{"prompt": "p", "answer": "r"}, {"prompt": "q", "answer": None}, {"prompt": "s", "answer": "t"}]
    (tmp_path / "set/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = hub.read(f"hub:name={tmp_path / 'set'},split=train[:2]", Letters())
    assert found == [Document((1, *map(ord, "pr")), 2), Document((1, ord("q")), 2, open=True)]
    with pytest.raises(OutpaceError, match="cannot load the data set nobody/nothing"):
        hub.read("hub:name=nobody/nothing", Letters())
    with pytest.raises(OutpaceError, match="split nowhere"):
        hub.read(f"hub:name={tmp_path / 'set'},split=nowhere", Letters())
