"""The prompts that drafters of a real model are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drafter_prompts
from outpace.bench.public import load_public


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_no_prompt_is_one_that_is_reported_and_each_has_its_form(tmp_path: Path) -> None:
    questions = [{"question": f"How many are {number}?", "answer": "1"} for number in range(700)]
    _write(tmp_path / "gsm8k_train.jsonl", questions)
    _write(tmp_path / "gsm8k_test.jsonl", questions)  # for the form alone
    _write(tmp_path / "humaneval.jsonl", [{"task_id": n, "prompt": f"def f{n}():\n"} for n in range(164)])
    _write(
        tmp_path / "spec_bench.jsonl",
        [
            {"question_id": number, "category": category, "turns": [f"{category} {number}", "And then?"]}
            for number, category in enumerate(("writing", "roleplay", "coding", "qa", "translation", "rag"))
        ],
    )
    prose = "Once upon a time there was a model. " * 10
    (tmp_path / "wikitext2_prose.txt").write_text(f"{prose}\nToo short.\n", encoding="utf-8")
    found = list(drafter_prompts.prompts(tmp_path))
    plain = [line["prompt"] for line in found if "prompt" in line]
    chats = [line["messages"][0]["content"] for line in found if "messages" in line]
    asked = [item.turns[0] for item in load_public("gsm8k", tmp_path).items]
    assert plain == [*asked[:500], *(f"def f{number}():\n" for number in range(84, 164))]
    assert chats[:150] == [f"How many are {number}?" for number in range(500, 650)]
    assert chats[150:] == ["qa 3", "translation 4", "Write about Once upon a time."]
    reported = {item.turns[0] for item in load_public("mt_bench", tmp_path).items}
    assert len(reported) == 3 and not reported & set(chats)
