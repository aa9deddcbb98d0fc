"""The record of self-tests: what spares a test, and what does not."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox

from outpace import Target
from outpace.core import UnsupportedModel
from outpace.files import sealed
from outpace.targets.step import record, self_test
from outpace.targets.step.record import Record
from outpace.targets.stock import causal
from zoo.families import FAMILIES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_TESTED", str(tmp_path / "tested"))
    return tmp_path / "tested"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that were not answered by the record."""
    found: list[str] = []

    def noted(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.append(name)
            return ask(*args)

        return run

    for name in ("why_bits_differ", "tested", "why_not_flat"):
        monkeypatch.setattr(causal, name, noted(name, getattr(causal, name)))
    return found


def half(name: str = "gpt-neox") -> Any:
    return FAMILIES[name].build(torch.bfloat16)


def test_what_passed_is_not_tested_again(folder: Path, asked: list[str]) -> None:
    first = Target(half())
    questions = ["why_bits_differ", "tested", "why_not_flat"]
    assert asked == questions and len(list(folder.iterdir())) == 3
    again = Target(half())
    assert asked == questions and again.mixes
    assert (again.bit_exact, again.why_inexact) == (first.bit_exact, first.why_inexact)
    Target(half(), check=True)
    assert len(asked) == 6
    Target(half(), check=False)
    assert len(asked) == 7  # bits, since they choose the modules


def test_inexact_is_remembered_with_its_reason(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "why_bits_differ", lambda *_: "sums in any order")
    first = Target(half())
    monkeypatch.setattr(causal, "why_bits_differ", lambda *_: None)
    for target in (first, Target(half())):
        assert (target.bit_exact, target.why_inexact) == (False, "sums in any order")
    assert asked == ["tested"]


def change_weight(model: Any) -> None:
    model.get_output_embeddings().weight[0, 0] += 1


def change_config(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5e4


def change_class(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {"__module__": type(model).__module__})


def change_number(model: Any) -> None:
    model.base_model.layers[0].attention.scaling *= 2


CHANGES = [change_weight, change_config, change_class, change_number]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_tested(folder: Path, asked: list[str], change: Callable[[Any], None]) -> None:
    Target(half(), exact=False)
    model = half()
    with torch.no_grad():
        change(model)
    Target(model, exact=False)
    assert asked == ["tested"] * 2


def replaced(right: Any) -> Any:
    """What a package puts in the place of a function or a class: one of the same name and signature."""
    if isinstance(right, type):
        return type(right.__name__, (right,), {})

    @functools.wraps(right)
    def run(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_gpt_neox.GPTNeoXAttention, "forward"),
        (modeling_gpt_neox.GPTNeoXForCausalLM, "forward"),
        (modeling_gpt_neox, "apply_rotary_pos_emb"),
        (modeling_gpt_neox, "GPTNeoXMLP"),
        (torch.nn.Linear, "forward"),
        (PreTrainedModel, "get_input_embeddings"),
    ],
)
def test_code_that_was_replaced_in_this_process_is_tested(
    folder: Path, asked: list[str], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some packages put faster functions into transformers' classes and modules."""
    model = half()
    Target(model, exact=False)
    monkeypatch.setattr(owner, name, replaced(getattr(owner, name)))
    Target(model, exact=False)
    assert asked == ["tested"] * 2


def test_attention_that_was_replaced_in_this_process_is_tested(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Target(half(), exact=False)
    attention = replaced(ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention)
    Target(half(), exact=False)
    assert asked == ["tested"] * 2


@pytest.mark.parametrize("name", ["__version__", "_own_source", "_instructions", "hardware", "_precisions"])
def test_another_version_or_machine_is_tested(
    folder: Path, asked: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Target(half(), exact=False)
    monkeypatch.setattr(record, name, "other" if name == "__version__" else lambda *_: "other")
    Target(half(), exact=False)
    assert asked == ["tested"] * 2


def test_other_options_and_settings_are_tested(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Target(half(), exact=False)
    Target(half(), exact=False, static=True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    Target(half(), exact=False)
    assert [question for question in asked if question != "why_not_flat"] == ["tested"] * 3


def test_a_model_with_hooks_is_tested_each_time(folder: Path, asked: list[str]) -> None:
    for _ in range(2):
        model = half()
        model.get_decoder().register_forward_hook(lambda *_: None)
        Target(model, exact=False)
    assert asked == ["tested"] * 2 and not folder.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"answer": ""}', '{"key": {}, "answer": ""}', "[" * 10**5, "\xff"]
)
def test_a_corrupted_record_is_ignored(folder: Path, asked: list[str], text: str) -> None:
    Target(half(), exact=False)
    (file,) = folder.iterdir()
    file.write_bytes(text.encode("latin-1"))
    Target(half(), exact=False)
    Target(half(), exact=False)
    assert asked == ["tested"] * 2  # and the new answer is kept


def test_an_answer_to_something_else_is_ignored(folder: Path, asked: list[str]) -> None:
    """One under the right name whose key differs, and one that is not a text."""
    Target(half(), exact=False)
    (file,) = folder.iterdir()
    found = json.loads(file.read_text())
    for other in (
        {"key": {**found["key"], "torch": "0"}, "answer": ""},
        {"key": found["key"], "answer": True},
    ):
        file.write_text(json.dumps(sealed(other)))
        Target(half(), exact=False)
    assert asked == ["tested"] * 3


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("harm", ["", "owner", "mode", "folder's mode"])
def test_what_others_may_have_written_is_ignored(
    folder: Path, asked: list[str], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    if harm == "owner" and os.geteuid():
        pytest.skip("only root gives files away")
    before = os.umask(0)  # which must not open the files to others
    try:
        Target(half(), exact=False)
    finally:
        os.umask(before)
    [file] = folder.iterdir()
    if harm == "owner":
        os.chown(file, 65534, 65534)
    elif harm:
        (folder if "folder" in harm else file).chmod(0o720)
    record._warn.cache_clear()
    for _ in range(2):
        with caplog.at_level("WARNING"):
            assert Record.of_model(half(), {})._folder == (None if "folder" in harm else folder)
    assert caplog.text.count(f"{folder} is not read, since others may write to it") == ("folder" in harm)
    Target(half(), exact=False)
    assert asked == ["tested"] * (2 if harm else 1)


def test_a_folder_that_cannot_be_written(folder: Path, asked: list[str]) -> None:
    folder.write_text("a file")
    for _ in range(2):
        Target(half(), exact=False)
    assert asked == ["tested"] * 2


def test_a_refusal_is_not_recorded(folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedModel("no")

    monkeypatch.setattr(self_test, "self_test", refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="no"):
            Target(half(), exact=False)
    assert asked == ["tested"] * 2 and not folder.exists()


def test_the_number_of_files_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_MOST", 3)
    model = half()
    kept = Record.of_model(model, {})
    for question in range(5):
        assert kept.answer(str(question), model, lambda: "yes") == "yes"
    assert len(list(folder.iterdir())) == 3
    assert kept.answer("4", model, lambda: "no") == "yes"
