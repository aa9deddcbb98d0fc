"""A chat's memory: the contents of the prompt, and the turns dropped if it does not fit."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from folders import CONTEXT, save_llama
from outpace.cli import lines
from outpace.cli.chat import ChatSession
from outpace.cli.chat_commands import run_command
from outpace.cli.interrupt import Interrupt
from outpace.core import OutpaceError
from outpace.loading import Loaded, load


def ask(chat: ChatSession, message: str) -> tuple[str, list[str]]:
    """The text streamed as the answer, and the notices."""
    pieces: list[str] = []
    notices: list[str] = []
    chat.ask(message, pieces.append, Interrupt(), notices.append)
    return "".join(pieces), notices


def test_without_a_template_turns_are_labelled(model: Loaded) -> None:
    chat = ChatSession(model, model.engine(), {"max_new_tokens": 4})
    assert chat.params.stop == ("\nUser:",)
    answer, _ = ask(chat, "hi")
    assert chat.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer.strip()},
    ]
    chat.messages.append({"role": "user", "content": "more"})
    text = model.tokenizer.decode(chat.encode())
    assert text == f"User: hi\nAssistant: {answer.strip()}\nUser: more\nAssistant:"


def test_a_template_is_used_where_there_is_one(chat_model: Loaded) -> None:
    chat = ChatSession(chat_model, chat_model.engine(), {"max_new_tokens": 4})
    assert chat.params.stop == ()
    chat.messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "more"},
    ]
    assert chat_model.tokenizer.decode(chat.encode()) == "[user]hi[assistant]ho[user]more[assistant]"
    assert chat_model.tokenizer.decode(chat_model.encode("hi", chat=True)) == "[user]hi[assistant]"


@pytest.mark.parametrize("templated", [True, False])
def test_the_oldest_turns_are_dropped_and_that_is_said(
    model: Loaded, chat_model: Loaded, templated: bool
) -> None:
    loaded = chat_model if templated else model
    chat = ChatSession(loaded, loaded.engine(), {"max_new_tokens": 6})
    said = []
    for number in range(8):
        _, notices = ask(chat, f"question {number}")
        said += notices
        assert len(chat.encode()) <= CONTEXT + 6
    assert said and all("oldest turn dropped" in line or "turns dropped" in line for line in said)
    assert chat.messages[0]["role"] == "user" and chat.messages[0]["content"] != "question 0"
    assert chat.messages[-2]["content"] == "question 7"


def test_a_message_too_long_by_itself_is_refused_and_forgotten(model: Loaded) -> None:
    chat = ChatSession(model, model.engine(), {"max_new_tokens": 6})
    with pytest.raises(OutpaceError, match=f"does not fit in the model's context of {CONTEXT} tokens"):
        ask(chat, "x" * CONTEXT)
    assert chat.messages == []
    answer, _ = ask(chat, "x" * (CONTEXT - 25))  # room for fewer tokens than asked for
    assert answer


def test_an_interrupted_answer_is_remembered_as_far_as_it_got(model: Loaded) -> None:
    chat = ChatSession(model, model.engine(), {"max_new_tokens": 40})
    interrupt = Interrupt()

    def show(text: str) -> None:
        interrupt.raised = True

    generation = chat.ask("hi", show, interrupt)
    assert generation.finish_reason == "removed" and 0 < len(generation.tokens) < 40
    assert chat.messages[-1] == {"role": "assistant", "content": (generation.text or "").strip()}
    assert chat.engine.sequences == []


def test_a_system_message_stays_when_turns_are_dropped(chat_model: Loaded) -> None:
    chat = ChatSession(chat_model, chat_model.engine(), {"max_new_tokens": 6}, "be brief")
    for number in range(6):
        ask(chat, f"question {number}")
        text = chat_model.tokenizer.decode(chat.encode())
        assert text.startswith("[system]be brief[user]question")
    assert len(chat.messages) < 12


def test_a_chat_is_sampled_as_the_model_says_unless_asked(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "own", chat=True)
    (folder / "generation_config.json").write_text('{"top_k": 7, "do_sample": true}', "utf-8")
    model = load(folder, device="cpu")
    chat = ChatSession(model, model.engine(), {"max_new_tokens": 4})
    assert (chat.params.temperature, chat.params.top_k) == (1.0, 7)
    chat.set({"temperature": 0.0})
    assert chat.params.greedy and chat.params.top_k == 0
    with pytest.raises(OutpaceError, match="--top-k has no effect at temperature 0"):
        chat.set({"temperature": 0.0, "top_k": 3})


def said(chat: ChatSession, line: str) -> str:
    name, _, rest = line.partition(" ")
    return run_command(chat, name, rest)


def test_commands_change_save_and_load_a_chat(chat_model: Loaded, tmp_path: Path) -> None:
    chat = ChatSession(chat_model, chat_model.engine(), {"max_new_tokens": 4})
    assert all(f"/{name}" in said(chat, "help") for name in ("clear", "set", "save", "load", "exit"))
    assert "temperature 0.7" in said(chat, "set temperature 0.7") and chat.params.temperature == 0.7
    assert "seed 5" in said(chat, "set seed=5")
    assert "temperature 0.0" in said(chat, "set temperature")  # the model's own again
    assert "max_new_tokens 9" in said(chat, "set max-tokens = 9")
    assert '"talk like a pirate"' in said(chat, "set system talk like a pirate")
    assert '"a = b"' in said(chat, "set system a = b")
    said(chat, "set system talk like a pirate")
    answer, _ = ask(chat, "hi")
    file = tmp_path / "talk.json"
    said(chat, f"save {file}")
    saved = json.loads(file.read_text("utf-8"))
    assert [one["role"] for one in saved] == ["system", "user", "assistant"]
    assert chat.turns == saved and saved[2]["content"] == answer.strip()
    ids = chat.encode()
    said(chat, "clear")
    assert chat.messages == []
    other = ChatSession(chat_model, chat_model.engine(), {})
    said(other, f"load {file}")
    assert other.encode() == ids and other.system == "talk like a pirate"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hlep", "no command /hlep. Did you mean 'help'?"),
        ("set temprature 1", "no setting 'temprature'. Did you mean 'temperature'?"),
        ("set temperature hot", "temperature is a number, not 'hot'"),
        ("set seed 1.5", "seed is a whole number"),
        ("set top_k 5", "no effect at temperature 0"),
        ("set temperature -1", "temperature must be between"),
        ("save", "/save needs a file"),
        ("save there.txt", "exists and would be lost; give another name"),
        ("load none.json", "cannot read none.json"),
        ("load there.txt", "there.txt is not JSON"),
        ("load list.json", "list.json is no conversation"),
    ],
)
def test_mistakes_in_commands_are_told_and_change_nothing(
    chat_model: Loaded, line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.txt").write_text("x", "utf-8")
    Path("list.json").write_text('[{"role": "user"}]', "utf-8")
    chat = ChatSession(chat_model, chat_model.engine(), {"max_new_tokens": 4})
    before = chat.params, chat.system
    with pytest.raises(OutpaceError, match=re.escape(message)):
        said(chat, line)
    assert (chat.params, chat.system, chat.messages) == (*before, [])


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\\\nb\nc\n", ["a\nb", "c"]),
        ("a\\\n", ["a"]),
        ("", []),
    ],
)
def test_a_line_that_ends_in_a_backslash_goes_on(
    typed: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert list(iter(lambda: lines.read(False), None)) == messages


def test_pasted_lines_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\nc\n"))
    there = iter([True, False, False])
    monkeypatch.setattr(lines, "_more", lambda: next(there))
    assert [lines.read(True), lines.read(True)] == ["a\nb", "c"]


def test_what_was_typed_is_found_in_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline: Any = pytest.importorskip("readline")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    readline.clear_history()
    with lines.history():
        readline.add_history("tell me more")
    file = tmp_path / "cache" / "chat-history"
    assert "tell me more" in file.read_text("utf-8") and file.stat().st_mode & 0o077 == 0
    readline.clear_history()
    with lines.history():
        assert readline.get_history_item(readline.get_current_history_length()) == "tell me more"
