"""The prompts that drafters of a real model are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

import drafter_prompts
import train_real
from outpace.cli.app import app
from outpace.core import SamplingParams
from outpace.spec import load
from outpace_lab.bench.public import load_public
from outpace_lab.train.methods import LEARNED


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_no_prompt_is_one_that_is_reported_and_each_has_its_form(tmp_path: Path) -> None:
    questions = [{"question": f"How many are {number}?", "answer": "1"} for number in range(5600)]
    _write(tmp_path / "gsm8k_train.jsonl", questions)
    _write(tmp_path / "gsm8k_test.jsonl", questions)  # for the form alone
    _write(tmp_path / "humaneval.jsonl", [{"task_id": n, "prompt": f"def f{n}():\n"} for n in range(164)])
    prose = "Once upon a time there was a model. " * 10
    (tmp_path / "wikitext2_prose.txt").write_text(f"{prose}\nToo short.\n", encoding="utf-8")
    found = list(drafter_prompts.prompts(tmp_path))
    plain = [line["prompt"] for line in found if "prompt" in line]
    chats = [line["messages"][0]["content"] for line in found if "messages" in line]
    asked = [item.turns[0] for item in load_public("gsm8k", tmp_path).items]
    assert plain == [*asked[:4000], *(f"def f{number}():\n" for number in range(84, 164))]
    assert chats[:1500] == [f"How many are {number}?" for number in range(4000, 5500)]
    assert chats[1500:] == ["Write about Once upon a time."]


class Writer:
    """A model that is asked for requests, and what it writes."""

    def __init__(self, written: list[tuple[str, str]]) -> None:
        self.written = written
        self.asked: list[list[int]] = []
        self.seeds: list[int | None] = []

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return f"<user>{messages[0]['content']}<end>" + "<assistant>" * add_generation_prompt

    def plain_tokens(self, text: str) -> list[int]:
        return list(map(ord, text))

    def engine(self, drafter: str, max_running: int) -> Writer:
        return self

    def generate(self, asked: list[list[int]], params: list[SamplingParams]) -> list[SimpleNamespace]:
        self.asked, self.seeds = asked, [own.seed for own in params]
        return [SimpleNamespace(text=text, finish_reason=reason) for text, reason in self.written]


def test_a_model_writes_where_its_user_would(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = " Write a poem about rain.\n"
    writer = Writer([(whole, "eos"), (whole, "eos"), ("Too short", "eos"), ("Never ends and ends", "length")])
    monkeypatch.setattr(drafter_prompts, "load", lambda *_: writer)
    assert drafter_prompts.own_requests("any", 4) == ["Write a poem about rain."]
    assert writer.asked == [list(map(ord, "<user>"))] * 4
    assert writer.seeds == [0, 1, 2, 3]


def test_every_training_is_of_a_method_and_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, check: bool) -> SimpleNamespace:
        commands.append(command[1:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(train_real.subprocess, "run", run)
    for name in train_real.RUNS:
        train_real.train(name, tmp_path)
    parser = get_command(app).commands["train"]  # type: ignore[attr-defined]
    for name, (_, *given) in zip(train_real.RUNS, commands, strict=True):
        read = parser.make_context("train", given).params  # refuses unknown options
        load("method", {key: cls.config_type for key, cls in LEARNED.items()}, read["method"])
        assert Path(read["out"]) == Path(name) and read["steps"] > 0
        assert (read["data"] == "prompts.jsonl") == (name == train_real.FIRST)
