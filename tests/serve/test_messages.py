"""Anthropic's messages: answers whole and as events, stop sequences, turns, tools over two turns."""

from __future__ import annotations

import json
from typing import Any

from calling import (
    ALTERNATING,
    HERMES,
    MESSAGES,
    SCHEMA,
    counted,
    prompt_of,
    with_template,
)
from outpace.serve.tools import LEFT_OUT
from serving import STORY, model, run, serving, told


def test_a_message_in_one_piece_and_as_events() -> None:
    async def main() -> None:
        async with serving() as client:
            chat = await client.chat(max_tokens=12).json()
            text = chat["choices"][0]["message"]["content"]
            asked = {"messages": STORY, "max_tokens": 12, "temperature": 0}
            found = await client.send("/v1/messages", asked).json()
            assert found["content"] == [{"type": "text", "text": text}]
            assert found["type"] == "message" and found["role"] == "assistant"
            assert found["stop_reason"] == "max_tokens"
            assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
            assert found["usage"]["output_tokens"] == 12
            word = text.split()[2]
            stopped = await client.send("/v1/messages", {**asked, "stop_sequences": ["xyz", word]}).json()
            assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == word
            events = await client.send("/v1/messages", {**asked, "stream": True}).events()
            kinds = [event["type"] for event in events]
            assert kinds[:2] == ["message_start", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
            assert events[-2]["delta"]["stop_reason"] == "max_tokens"
            counted = await client.send(
                "/v1/messages/count_tokens", {"messages": STORY, "system": "x"}
            ).json()
            turns = [{"role": "system", "content": "x"}, *STORY]
            assert counted == {"input_tokens": len(model().encode_chat(turns))}

    run(main)


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    async def main() -> None:
        said = [{"role": "user", "content": text} for text in ("Tell me a story.", "About a dog.")]
        joined = [{"role": "user", "content": "Tell me a story.\nAbout a dog."}]
        async with serving() as client:
            found = await client.send(f"{MESSAGES}/count_tokens", {"messages": said}).json()
            assert found == {"input_tokens": len(model().encode_chat(joined))}
            assert (
                len(model().encode_chat(said)) > found["input_tokens"]
            )  # the template would tell them apart

    run(main)


def test_the_stop_sequence_that_was_complete_first_is_named() -> None:
    async def main() -> None:
        text = told(max_new_tokens=12).text
        place = text.index(" ", 4)
        first, longer = text[place : place + 2], text[place : place + 3]
        async with serving() as client:
            asked = {"messages": STORY, "max_tokens": 12, "temperature": 0}
            stopped = await client.send(MESSAGES, {**asked, "stop_sequences": [longer, first]}).json()
            assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == first
            assert stopped["content"][0]["text"] == text[:place]

    run(main)


def test_a_stop_sequence_inside_a_text_with_a_schema_is_named() -> None:
    async def main() -> None:
        form = {"format": {"type": "json_schema", "schema": {"const": "text"}}}
        async with serving() as client:
            for word, text, found in (("x", '"te', "stop_sequence"), ("z", '"text"', "end_turn")):
                asked = {"messages": STORY, "max_tokens": 20, "output_config": form, "stop_sequences": [word]}
                one = await client.send(MESSAGES, asked).json()
                told = (one["stop_reason"], one["stop_sequence"], one["content"][0]["text"])
                assert told == (found, word if found == "stop_sequence" else None, text)

    run(main)


def test_claude_code_over_two_turns() -> None:
    """What Claude Code sends, with all of its fields, and the call's result in the next request."""
    betas = "claude-code-20250219,context-management-2025-06-27,interleaved-thinking-2025-05-14"
    kept = {"cache_control": {"type": "ephemeral"}}
    asked: dict[str, Any] = {
        "model": "nano",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi.", **kept}]},
            {"role": "system", "content": "A reminder."},
        ],
        "system": [
            {"type": "text", "text": "You are terse."},
            {"type": "text", "text": "Use tools.", **kept},
        ],
        "tools": [
            {
                "name": "weather",
                "description": "of a day",
                "input_schema": SCHEMA,
                "eager_input_streaming": True,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "x"},
        "max_tokens": 32000,
        "temperature": 0,
        "stream": True,
    }

    async def main() -> None:
        for loaded in (model(), with_template(HERMES), with_template(ALTERNATING)):
            async with serving(loaded=loaded) as client:
                exchange = client.send(
                    f"{MESSAGES}", asked, anthropic_beta=betas, anthropic_version="2023-06-01"
                )
                events = await exchange.events()
                assert exchange.headers[LEFT_OUT] == "web_search_20250305"
                (block,) = [e["content_block"] for e in events if e["type"] == "content_block_start"]
                deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
                given = json.loads("".join(delta["partial_json"] for delta in deltas))
                call = {**block, "input": given, **kept}
                result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": True, **kept}
                told = {**result, "content": [{"type": "text", "text": "qz7 is down"}]}
                thought = {"type": "thinking", "thinking": "zq9", "signature": ""}
                more = [
                    {"role": "assistant", "content": [thought, call]},
                    {"role": "user", "content": [told, {"type": "text", "text": "Go on."}]},
                ]
                second = {**asked, "messages": [*asked["messages"], *more], "tool_choice": {"type": "auto"}}
                found = await client.send(MESSAGES, {**second, "stream": False, "max_tokens": 4}).json()
                assert found["stop_reason"] in ("max_tokens", "end_turn"), found
                count = {key: second[key] for key in ("messages", "system", "tools", "thinking")}
                tokens = await client.send(f"{MESSAGES}/count_tokens", count).json()
                assert tokens["input_tokens"] == counted(MESSAGES, found)
                shown = client.service.model.tokenizer.decode(prompt_of(client, second))
                for word in (
                    "You are terse.",
                    "Use tools.",
                    "A reminder.",
                    "Error: qz7 is down",
                    "Go on.",
                    "of a day",
                ):
                    assert shown.count(word) == 1, (word, shown)
                assert shown.index("A reminder.") < shown.index("qz7") < shown.index("Go on.")

    run(main)
