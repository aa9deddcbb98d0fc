"""The record of a GGUF file's self-test: what spares a test, and what does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import gguf_file, quantised, random_file
from llamacpp.choices import SEVEN, THREE, forced
from outpace.core import SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.policy.governor import Governor
from outpace.targets import Target
from outpace.targets.llamacpp.library import library
from outpace.targets.llamacpp.self_test import SelfTest, Widths
from outpace.targets.llamacpp.target import LlamaCppTarget

PARAMS = SamplingParams(max_new_tokens=24, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)
PROMPTS = [[(3 + 7 * place + place * place) % 61 for place in range(71)], [9, 8, 7, 9, 8, 7, 9]]

pytestmark = pytest.mark.skipif(
    library().llama_supports_gpu_offload(), reason="llama.cpp for a GPU has no record"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_TESTED", str(tmp_path / "tested"))
    return tmp_path / "tested"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were tested."""
    found: list[Path] = []
    tested = LlamaCppTarget._tested

    def noted(self: LlamaCppTarget) -> Any:
        found.append(self.path)
        return tested(self)

    monkeypatch.setattr(LlamaCppTarget, "_tested", noted)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of a file, which a test may change."""
    return Path(shutil.copy(gguf_file("q8_0"), tmp_path / "model.gguf"))


def made(path: Path, **options: Any) -> Any:
    return Target(path, **{"threads": 1, **options})


def known(target: Any) -> tuple[Any, ...]:
    """What a target knows from its self-test."""
    found = target.widths, target.repack, target.bit_exact, target.why_inexact
    return *found, target.identity, target.prompts_differ, dict(target.seconds)


@pytest.mark.parametrize("file", ["q4_k_m", "float32", "q8_0"])
def test_what_was_found_is_not_tested_again(file: str, folder: Path, asked: list[Path]) -> None:
    path = quantised(random_file("llama"), file) if file == "q4_k_m" else gguf_file(file)
    options = {"repack": False} if file == "q4_k_m" else {}
    first = made(path, **options)
    assert len(asked) == len(list(folder.iterdir())) == 1
    assert known(made(path, **options)) == known(first) and len(asked) == 1
    made(path, check=True, **options)
    assert len(asked) == 2
    unchecked = made(path, check=False, **options)
    assert len(asked) == 2
    assert unchecked.why_inexact and unchecked.widths == Widths() and not unchecked.seconds


@pytest.mark.parametrize("drafter", ["suffix", "lookahead:window=4,ngram=3,guesses=4"])
def test_drafts_of_a_recorded_target_change_no_bit(drafter: str, folder: Path, asked: list[Path]) -> None:
    """Keys in float32 show differences that other types round away."""
    path = quantised(random_file("llama"), "iq4_nl")
    options = {"repack": False, "type_k": "float32", "type_v": "bfloat16"}
    first = made(path, **options)
    expected = [Engine(first).generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    target = made(path, **options)
    assert len(asked) == 1 and target.bit_exact
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, PARAMS)
    assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in expected]
    assert sum(one.stats.drafted for one in found) > 0


@pytest.mark.parametrize(("seconds", "repack"), [([1.0, 2.0], True), ([1.0, 1.0], False)])
def test_the_recorded_choice_is_taken_whatever_is_measured_later(
    seconds: list[float], repack: bool, folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        loaded = forced(patch, [THREE, SEVEN], seconds)
        patch.setattr(LlamaCppTarget, "_differences", lambda self: (0.0, {}))
        first = made(path)
        assert loaded == [True, False]
    loaded = forced(monkeypatch, [], [2.0, 1.0])
    again = made(path)
    assert loaded == [repack]
    assert (again.repack, again.widths) == (repack, THREE if repack else SEVEN)
    assert known(again) == known(first)
    forced(monkeypatch, [SEVEN, SEVEN], [2.0, 1.0])
    monkeypatch.setattr(LlamaCppTarget, "_differences", lambda self: (0.0, {}))
    assert not made(path, check=True).repack


def test_a_governor_begins_with_the_recorded_seconds(folder: Path, path: Path, asked: list[Path]) -> None:
    first = made(path)
    governor = Engine(made(path), "suffix").governor
    assert len(asked) == 1 and isinstance(governor, Governor)
    assert governor.costs()["verify"]["1"] == [list(pair) for pair in first.seconds.items()]


def test_inexact_is_remembered_with_its_reason(
    folder: Path, path: Path, asked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LlamaCppTarget, "_differences", lambda self: (0.25, {}))
        first = made(path)
    assert first.why_inexact == "rows alone and among others differ by 0.25 of their spread"
    assert made(path).why_inexact == first.why_inexact
    with pytest.raises(UnsupportedModel, match=r"is not bit-exact: rows alone .* leave exact=true out"):
        made(path, exact=True)
    assert len(asked) == 1
    assert (
        made(path, exact=False).bit_exact and len(asked) == 2
    )  # of all rows at once, and without the mistake


def test_another_file_in_its_place_is_tested(folder: Path, path: Path, asked: list[Path]) -> None:
    made(path)
    shutil.copy(gguf_file("q4_0"), path)
    made(path)
    made(path)
    assert len(asked) == 2


@pytest.mark.parametrize("options", [{"repack": False}, {"type_k": "float16"}])
def test_with_other_options_it_is_tested(
    options: dict[str, Any], folder: Path, path: Path, asked: list[Path]
) -> None:
    made(path)
    for _ in range(2):
        made(path, **options)
    assert len(asked) == 2


@pytest.mark.parametrize("answer", ["", "{}", '{"repack": true}'])
def test_findings_that_cannot_be_read_are_found_anew(
    answer: str, folder: Path, path: Path, asked: list[Path]
) -> None:
    made(path)
    (file,) = folder.iterdir()
    right = json.loads(file.read_text())
    file.write_text(json.dumps({**right, "answer": answer}))
    for _ in range(2):
        made(path)
    assert len(asked) == 2
    assert set(json.loads(json.loads(file.read_text())["answer"])) == set(json.loads(right["answer"]))


def test_what_others_may_have_written_is_not_read(folder: Path, path: Path, asked: list[Path]) -> None:
    made(path)
    folder.chmod(0o777)
    made(path)
    assert len(asked) == 2


def test_a_refusal_is_not_recorded(
    folder: Path, path: Path, asked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SelfTest, *_: Any) -> float:
        raise UnsupportedModel("a tree is not its paths")

    monkeypatch.setattr(SelfTest, "tree", refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="a tree is not its paths"):
            made(path)
    assert len(asked) == 2 and not folder.exists()
