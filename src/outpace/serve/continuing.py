"""Conversations whose last message, of the assistant, is begun: the answer continues its text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from outpace.serve.errors import Refused
from outpace.serve.service import Service
from outpace.serve.texts import Prompt

_FIELD = "continue_final_message"


class BegunMessage(Protocol):
    """A message of a body that may say that it is begun."""

    prefix: bool
    partial: bool


class Talk(Protocol):
    """A body with a conversation."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None

    @property
    def messages(self) -> Seq[BegunMessage] | None: ...


async def prompt_of(
    service: Service, body: Talk, turns: Seq[dict[str, Any]], options: dict[str, Any]
) -> Prompt:
    """The prompt of a chat: up to the answer, or to the end of the message that the answer continues.

    Raises:
        Refused: a message is to be continued and is not the last one, or the fields exclude each other.
    """
    *before, last = body.messages or ()
    for place, turn in enumerate(before):
        if turn.prefix or turn.partial:
            name = f"messages.{place}.{'prefix' if turn.prefix else 'partial'}"
            raise Refused(400, f"{name}: only the last message can be continued", "messages")
    begun = last.prefix or last.partial
    if begun and body.continue_final_message is False:
        raise Refused(400, f"{_FIELD} is false, but the last message is to be continued", _FIELD)
    if not begun and not body.continue_final_message:
        more = {} if body.add_generation_prompt is not False else {"add_generation_prompt": False}
        return await service.prompts.conversation(turns, **options, **more)
    if body.add_generation_prompt:
        raise Refused(400, f"{_FIELD} and add_generation_prompt exclude each other; leave one out", _FIELD)
    return await continued(service, turns, options)


async def continued(service: Service, turns: Seq[dict[str, Any]], options: dict[str, Any]) -> Prompt:
    """The prompt up to the end of the last turn's text.

    Raises:
        Refused: that turn is not a text of the assistant, or the format of answers does not allow it.
    """
    last = turns[-1]
    if last["role"] != "assistant":
        raise Refused(400, "the last message is not of the assistant, so it is not continued", "messages")
    if last.get("tool_calls"):
        raise Refused(400, "the last message has calls without their results; add them", "messages")
    if not last["content"] and not last.get("reasoning_content"):
        return await service.prompts.conversation(turns[:-1], **options)
    if not last["content"]:
        raise Refused(400, "the last message has reasoning alone, which is not continued", "messages")
    if service.dialogue.harmony:
        told = "this model answers in messages on channels, and continues none; end with one of the user"
        raise Refused(400, told, "messages")
    return await service.prompts.conversation(turns, **options, continue_final_message=True)
