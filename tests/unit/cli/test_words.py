"""What users of other programs type: their commands, words without options, short names; and cut answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.loading import Loaded
from without_torch import check_mistakes

PROMPT = "abcabcabc"
MISTAKES = {
    "generate hi --profile nope.json": "there is no profile at nope.json",
    "chat --profile nope.json": "there is no profile at nope.json",
    "chat smollm2 hi": "for one answer: outpace generate smollm2",
    "chat nope/x/y": "no such folder: nope/x/y",
    "serve nope/x/y": "no such folder: nope/x/y",
    "generate a b c": "unexpected extra argument",
    "chat a --model b": "give 'a' or --model, not both",
    "generate hi --dtype fp17": "unknown dtype 'fp17'",
    "chat --top-k 4 -t 0": "--top-k has no effect at temperature 0",
    "generat": "Did you mean 'generate'?",
    "drafters lokahead": "Did you mean 'lookahead'?",
}
Run = Callable[..., Any]


def test_words_are_taken_for_the_model_and_the_prompt(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, "utf-8")
    expected = run("generate", "--model", folder, "--prompt", PROMPT, "-n", 5)
    assert expected.exit_code == 0 and expected.stdout
    for args in (
        (folder, PROMPT, "-n", 5),
        ("-n", 5, PROMPT, "-m", folder),
        ("--max-tokens", 5, "--dtype", "fp32", folder, "--", PROMPT),
        (folder, "-n", 5, "-p", PROMPT),
        ("-f", file, folder, "-n", 5),
    ):
        assert run("generate", *args).stdout == expected.stdout, args
    assert run("generate", folder, "-n", 5, stdin=PROMPT).stdout == expected.stdout  # a pipe's text
    assert "give 'a' or --model, not both" in run("generate", "a", "b", "-m", folder).stderr


def test_other_programs_names_of_commands_are_known(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: type("None", (), {"repos": ()}))
    assert run("list").stdout == run("ls").stdout == run("models").stdout != ""
    expected = run("chat", "--model", folder, "-n", 3, "--system", "brief")
    assert run("run", folder, "-n", 3, "--system", "brief").exit_code == expected.exit_code == 0


def test_mistakes_are_told_before_torch_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_mistakes(MISTAKES | {f"serve --port {port}": "choose another --port or --host"})


@pytest.fixture
def chat_run(run: Run, chat_folder: Path) -> Run:
    return lambda *args: run("generate", "-m", chat_folder, "-p", PROMPT, "-n", 5, *args)


def test_a_prompt_is_a_turn_of_a_model_with_a_template(chat_run: Run, chat_model: Loaded) -> None:
    def text(prompt: list[int]) -> str:
        (found,) = chat_model.engine().generate([prompt], outpace.SamplingParams(max_tokens=5))
        return f"{found.text}\n"

    turn, raw = text(chat_model.encode(PROMPT, chat=True)), text(chat_model.tokens(PROMPT))
    assert turn != raw
    assert [chat_run(*args).stdout for args in ((), ("--chat",), ("--raw",))] == [turn, turn, raw]


def test_a_cut_answer_says_so(chat_run: Run, run: Run, chat_folder: Path, tmp_path: Path) -> None:
    assert "cut at 5 tokens (--max-new-tokens)" in chat_run().stderr
    assert "1 token in 1 step," in (one := chat_run("-n", 1).stderr) and "cut at 1 token (" in one
    file = tmp_path / "prompts.jsonl"
    file.write_text('"ab"\n"cd"\n', "utf-8")
    assert (
        "2 cut at --max-new-tokens 3"
        in run("generate", "-m", chat_folder, "-f", file, "-n", 3, "--ignore-eos").stderr
    )
    stopped = chat_run("--json")
    stop = json.loads(stopped.stdout)["text"][2]
    assert "cut" not in chat_run("--stop", stop).stderr


def test_a_pipe_that_is_closed_ends_well() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "outpace", "generate", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.stderr == ""
