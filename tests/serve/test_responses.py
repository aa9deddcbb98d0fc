"""OpenAI's responses: answers whole and as events, tools over two turns."""

from __future__ import annotations

import json
from typing import Any

from calling import (
    HERMES,
    RESPONSES,
    SCHEMA,
    counted,
    with_template,
)
from outpace.serve.tools import LEFT_OUT
from serving import PERSON, STORY, model, run, serving


def test_a_response_in_one_piece_and_as_events() -> None:
    async def main() -> None:
        async with serving() as client:
            text = (await client.chat(max_tokens=12).json())["choices"][0]["message"]["content"]
            asked = {"input": STORY[0]["content"], "max_output_tokens": 12, "temperature": 0}
            found = await client.send("/v1/responses", asked).json()
            assert found["output"][0]["content"][0]["text"] == text and found["status"] == "incomplete"
            assert found["usage"]["output_tokens"] == 12
            events = await client.send("/v1/responses", {**asked, "input": STORY, "stream": True}).events()
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.incomplete"
            deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == text
            assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
            form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
            obeyed = await client.send(
                "/v1/responses", {**asked, "text": form, "max_output_tokens": 80}
            ).json()
            assert obeyed["status"] == "completed"
            assert set(json.loads(obeyed["output"][0]["content"][0]["text"])) == set(PERSON["properties"])
            stored = client.send("/v1/responses", {**asked, "store": True})
            assert (await stored.json())["error"]["param"] == "store"

    run(main)


def test_codex_over_two_turns() -> None:
    """What Codex sends, with all of its fields, and the calls' results in the next request."""
    inner = {"type": "function", "name": "weather", "strict": False, "parameters": SCHEMA}
    own = {**inner, "name": "now", "parameters": {"type": "object", "properties": {}}}
    asked: dict[str, Any] = {
        "model": "nano",
        "instructions": "You are terse.",
        "input": [
            {
                "type": "message",
                "id": "m1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Dev."}],
            },
            {
                "type": "message",
                "id": "m2",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hi."}],
            },
        ],
        "tools": [
            own,
            {"type": "namespace", "name": "mcp__sky__", "description": "the sky", "tools": [inner]},
            {"type": "custom", "name": "patch", "description": "a patch", "format": {"type": "text"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
    }

    async def main() -> None:
        for loaded in (model(), with_template(HERMES)):
            async with serving(loaded=loaded) as client:
                items = []
                for name in ("now", "mcp__sky__weather", "patch"):
                    forced = {
                        **asked,
                        "tool_choice": {"type": "function", "name": name},
                        "max_output_tokens": 90,
                        "reasoning": {**asked["reasoning"], "max_tokens": 4},
                    }
                    exchange = client.send(RESPONSES, forced)
                    events = await exchange.events()
                    assert exchange.headers[LEFT_OUT] == "web_search"
                    items.append(events[-1]["response"]["output"][-1])
                kinds = [(item["type"], item["name"], item.get("namespace")) for item in items]
                assert kinds == [
                    ("function_call", "now", None),
                    ("function_call", "weather", "mcp__sky__"),
                    ("custom_tool_call", "patch", None),
                ]
                assert isinstance(items[2]["input"], str) and "arguments" not in items[2]
                results = [
                    {
                        "type": f"{item['type']}_output",
                        "call_id": item["call_id"],
                        "output": f"qz{place} done",
                    }
                    for place, item in enumerate(items)
                ]
                thought = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None}
                history = [*asked["input"], thought, *items, *results]
                second = {**asked, "input": history, "tool_choice": "auto", "stream": False}
                found = await client.send(RESPONSES, {**second, "max_output_tokens": 4}).json()
                assert found["status"] in ("incomplete", "completed"), found
                none = {**second, "max_output_tokens": 4, "input": history[:-1]}
                assert counted(RESPONSES, found) > counted(
                    RESPONSES, await client.send(RESPONSES, none).json()
                )

    run(main)
