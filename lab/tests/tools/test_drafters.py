"""The training of the embedded drafters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import card_drafters
import publish_drafter
import train_drafters
from answers import PROMPT_TOKENS, SHARES, cut, encode, signature
from corpus import END_OF_TEXT, Corpus
from outpace.drafters.heads.medusa import MedusaConfig
from outpace.spec import load
from outpace.testing import ToyTarget
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.modules.heads import TrainedMedusa

CODE = 'def double(x):\n    """Twice x.\n\n    Of any number.\n    """\n    return 2 * x\n'
CORPUS = Corpus(
    train={
        "gsm8k": [f"Question: {n} and 1?\nAnswer: {n + 1}" for n in range(40)],
        "function": [CODE, "    def broken(x):\n  y"],
        "correction": ["Text: teh cat\nCorrected: the cat"],
        "retrieval": ["Document: A.\nQuestion: What?\nAnswer: A."],
        "dialogue": [f"User: Hi\nAssistant: Hello{END_OF_TEXT}User: Bye\nAssistant: Bye{END_OF_TEXT}"],
    }
)
RESULT = {
    "method": "medusa",
    "target": {"name": "/home/someone/outpace-nano"},
    "parameters": 12,
    "tokens_seen": 2_000_000,
    "steps": 300,
    "cpu_seconds": 120.0,
    "held_out_documents": 7,
    "expected_length": 2.125,
    "accepted_per_position": [0.5, 0.25],
}
SOURCES = {"packages": [{"name": "rich", "version": "15", "licence": "MIT"}], "shares": SHARES}


class Words:
    """Each character is a token."""

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    plain_tokens = tokens


def test_prompts_end_where_an_answer_begins() -> None:
    pairs = dict(cut(CORPUS, 100, seed=0))
    assert sum(prompt.startswith("Question") for prompt in pairs) == 40
    assert pairs[signature(CODE)] == "    return 2 * x\n" + END_OF_TEXT
    assert pairs["Text: teh cat\nCorrected:"] == " the cat" + END_OF_TEXT
    assert pairs["User: Hi\nAssistant:"] == " Hello" + END_OF_TEXT
    assert not any("broken" in prompt for prompt in pairs)
    assert cut(CORPUS, 100, seed=0) == cut(CORPUS, 100, seed=0) != cut(CORPUS, 100, seed=1)


def test_texts_are_cut_and_long_prompts_left_out() -> None:
    pairs = [("ab", "cdef"), ("x" * (PROMPT_TOKENS + 1), "y")]
    (document,) = encode(Words(), pairs, new_tokens=3)  # type: ignore[arg-type]
    assert document.tokens == tuple(map(ord, "abcde"))
    assert document.prompt == 2


def test_a_quick_run_takes_a_few_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        train_drafters.subprocess, "run", lambda command, cwd, check: commands.append(command[1:])
    )
    for quick in (False, True):
        train_drafters.train("medusa", tmp_path, quick)
    slow, fast = (dict(zip(own[2::2], own[3::2], strict=True)) for own in commands)
    assert commands[0][:2] == commands[1][:2] == ["train", "medusa:heads=4,layers=2"]
    assert (slow["--steps"], slow["--length"]) == ("300", "512")
    assert (fast["--steps"], fast["--length"], fast["--data"]) == ("2", "128", "answers")


def test_what_is_of_no_use_is_not_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = ["train_drafters.py", "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    package = str(train_drafters.nano_draft_path().parent)
    for more, message in (
        (["--quick", "--ship", package], "2"),
        ([], "is distilled already"),
    ):
        monkeypatch.setattr(sys, "argv", [*own, *more])
        with pytest.raises(SystemExit, match=message):
            train_drafters.main()
        assert not (tmp_path / "work").exists()


def test_every_run_is_of_a_method_and_its_options() -> None:
    table = {name: cls.config_type for name, cls in LEARNED.items()}
    for name, arguments in train_drafters.RUNS.items():
        method = arguments.split()[0]
        load("method", table, method)
        assert name.partition("-")[0] == method.partition(":")[0]
    assert {train_drafters.ON_TEXTS, train_drafters.SHIPPED_DRAFT} <= train_drafters.RUNS.keys()
    assert set(train_drafters.SHIPPED.values()) <= train_drafters.RUNS.keys()


FACTS = {
    "command": ["/home/someone/bin/outpace", "train", "medusa"],
    "settings": {"objective": "ground_truth"},
    "result": RESULT,
}


def test_what_is_shipped_is_small_and_says_where_it_came_from(tmp_path: Path) -> None:
    target = ToyTarget()
    heads = TrainedMedusa.new(MedusaConfig(heads=2), target)
    heads.save(tmp_path / "from")
    (tmp_path / "from" / "provenance.json").write_text(json.dumps(FACTS), "utf-8")
    card_drafters.ship(tmp_path / "from", tmp_path / "to", SOURCES)
    weights = load_file(tmp_path / "to" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    again = TrainedMedusa.load(tmp_path / "to", target)
    assert torch.allclose(again.accuracies.float(), heads.accuracies, rtol=2**-8)
    assert again.fit.name == "outpace-nano"
    card = (tmp_path / "to" / "README.md").read_text("utf-8")
    assert "outpace train medusa" in card
    assert "2.12 tokens a step" in card.replace("\n", " ")
    assert "| rich | 15 | MIT |" in card
    for file in (tmp_path / "to").glob("*.*"):
        assert "/home" not in file.read_text("utf-8", errors="replace"), file.name


def test_a_published_drafter_names_a_public_model_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, out = ToyTarget(), tmp_path / "from", tmp_path / "to"
    heads = TrainedMedusa.new(MedusaConfig(heads=2), target)
    heads.save(source)
    (source / "provenance.json").write_text(json.dumps(FACTS), "utf-8")
    arguments = ["publish_drafter.py", str(source), str(out), "--target", "someone/model"]
    monkeypatch.setattr(sys, "argv", arguments)
    publish_drafter.main()
    again = TrainedMedusa.load(out, target)
    assert again.fit.name == "someone/model"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    card = (out / "README.md").read_text("utf-8")
    assert "base_model: someone/model" in card and "outpace train medusa" in card
    assert f"medusa:path={out} " in card and "2.12 tokens a step" in card.replace("\n", " ")
    assert not any("/home" in file.read_text("utf-8", errors="replace") for file in out.iterdir())


def test_a_draft_model_takes_the_place_of_the_one_it_was(tmp_path: Path) -> None:
    trained, place = tmp_path / "from", tmp_path / "to"
    for folder in (trained, place):
        folder.mkdir()
    weights = {"weight": torch.rand(3, 2)}
    save_file(weights, trained / "model.safetensors")
    (trained / "provenance.json").write_text(json.dumps(FACTS), "utf-8")
    card = "# name\n\n## Training\n\nlong\n{}\n## Data\n\nmuch\n"
    (place / "README.md").write_text(card.format(""), "utf-8")
    card_drafters.ship_draft(trained, place)
    first = (place / "README.md").read_text("utf-8")
    card_drafters.ship_draft(trained, place)
    assert (place / "README.md").read_text("utf-8") == first
    training, distillation, data = first.split("\n## ")[1:]
    assert training == "Training\n\nlong\n" and data == "Data\n\nmuch\n"
    assert distillation.startswith("Distillation\n") and "outpace train medusa" in distillation
    found = load_file(place / "model.safetensors")["weight"]
    assert torch.equal(found, weights["weight"].to(torch.bfloat16))
