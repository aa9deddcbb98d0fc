"""A chat's memory: the contents of the prompt, and the turns dropped if it does not fit."""

from __future__ import annotations

import pytest

from folders import CONTEXT
from outpace.cli.chat import Chat
from outpace.cli.interrupt import Interrupt
from outpace.core import OutpaceError, SamplingParams
from outpace.loading import Loaded


def ask(chat: Chat, message: str) -> tuple[str, list[str]]:
    """The text streamed as the answer, and the notices."""
    pieces: list[str] = []
    notices: list[str] = []
    chat.ask(message, pieces.append, Interrupt(), notices.append)
    return "".join(pieces), notices


def test_without_a_template_turns_are_labelled(model: Loaded) -> None:
    chat = Chat(model, model.engine(), SamplingParams(max_new_tokens=4))
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
    chat = Chat(chat_model, chat_model.engine(), SamplingParams(max_new_tokens=4))
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
    chat = Chat(loaded, loaded.engine(), SamplingParams(max_new_tokens=6))
    said = []
    for number in range(8):
        _, notices = ask(chat, f"question {number}")
        said += notices
        assert len(chat.encode()) <= CONTEXT + 6
    assert said and all("oldest turn dropped" in line or "turns dropped" in line for line in said)
    assert chat.messages[0]["role"] == "user" and chat.messages[0]["content"] != "question 0"
    assert chat.messages[-2]["content"] == "question 7"


def test_a_message_too_long_by_itself_is_refused_and_forgotten(model: Loaded) -> None:
    chat = Chat(model, model.engine(), SamplingParams(max_new_tokens=6))
    with pytest.raises(OutpaceError, match=f"does not fit in the model's context of {CONTEXT} tokens"):
        ask(chat, "x" * CONTEXT)
    assert chat.messages == []
    answer, _ = ask(chat, "x" * (CONTEXT - 25))  # room for fewer tokens than asked for
    assert answer


def test_an_interrupted_answer_is_remembered_as_far_as_it_got(model: Loaded) -> None:
    chat = Chat(model, model.engine(), SamplingParams(max_new_tokens=40))
    interrupt = Interrupt()

    def show(text: str) -> None:
        interrupt.raised = True

    generation = chat.ask("hi", show, interrupt)
    assert generation.finish_reason == "removed" and 0 < len(generation.tokens) < 40
    assert chat.messages[-1] == {"role": "assistant", "content": (generation.text or "").strip()}
    assert chat.engine.sequences == []
