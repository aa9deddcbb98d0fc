"""Grammars and tools, and the APIs beside OpenAI's older two: Anthropic's messages, responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import FORM, PERSON, STORY, model, run, serving

WEATHER = {"type": "object", "properties": {"day": {"$ref": "#/$defs/day"}}, "required": ["day"]}
WEATHER |= {"additionalProperties": False, "$defs": {"day": {"enum": ["today", "tomorrow"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a day", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]


def test_a_schema_is_obeyed_and_what_it_forces_is_drafted() -> None:
    async def main() -> None:
        async with serving("none") as client:
            asked = {"response_format": FORM, "max_tokens": 80, "return_token_ids": True}
            plain = await client.chat(speculation="off", speculation_metrics=True, **asked).json()
            found = await client.chat(speculation_metrics=True, **asked).json()
            assert plain["choices"] == found["choices"]
            person = json.loads(found["choices"][0]["message"]["content"])
            assert set(person) == set(PERSON["properties"])
            assert found["choices"][0]["finish_reason"] == "stop"
            measured = [one["metrics"]["speculative_decoding"] for one in (plain, found)]
            assert measured[0]["num_draft_tokens"] == 0
            assert measured[1]["num_spec_steps"] < measured[0]["num_spec_steps"] * 0.8
            *chunks, _ = await client.chat(stream=True, **asked).events()
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == found["choices"][0]["message"]["content"]

    run(main)


def test_each_choice_has_a_grammar_of_its_own_and_sampling_obeys() -> None:
    async def main() -> None:
        async with serving() as client:
            found = await client.chat(
                response_format=FORM, n=3, temperature=1.5, seed=1, max_tokens=80, ignore_eos=True
            ).json()
            people = [json.loads(choice["message"]["content"]) for choice in found["choices"]]
            assert all(person["favourite_colour"] in ("red", "green") for person in people)
            assert len({json.dumps(person) for person in people}) > 1

    run(main)


def test_any_object() -> None:
    async def main() -> None:
        async with serving() as client:
            form = {"type": "json_object"}
            found = await client.chat(response_format=form, max_tokens=6, return_token_ids=True).json()
            assert found["choices"][0]["message"]["content"].startswith("{")

    run(main)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called_is(choice: Any) -> None:
    async def main() -> None:
        async with serving() as client:
            asked = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 60}
            (found,) = (await client.chat(**asked).json())["choices"]
            (call,) = found["message"]["tool_calls"]
            assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"
            assert call["type"] == "function" and call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["day"] in ("today", "tomorrow")
            *chunks, _ = await client.chat(stream=True, **asked).events()
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            assert calls[0]["function"]["name"] == "weather" and calls[0]["id"].startswith("call_")
            assert "".join(one["function"]["arguments"] for one in calls) == call["function"]["arguments"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(main)


def test_tools_are_read_by_the_tokenizers_own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tokenizer = model().tokenizer
        calls = [
            {"type": "function", "function": {"name": "time", "arguments": {"zone": zone}}}
            for zone in ("utc", "cet")
        ]
        parsed = {"role": "assistant", "content": "Well.", "tool_calls": calls}
        seen = []

        def parse(ids: list[int], prefix: list[int], tools: Any) -> Any:
            seen.append(
                (len(ids), prefix[-9:] == model().encode_chat(STORY)[-9:], tools[0]["function"]["name"])
            )
            return parsed

        monkeypatch.setattr(tokenizer, "response_template", {"x": 1}, raising=False)
        monkeypatch.setattr(tokenizer, "parse_response", parse, raising=False)
        async with serving() as client:
            asked = {"tools": TOOLS, "max_tokens": 5}
            (found,) = (await client.chat(**asked).json())["choices"]
            assert found["message"]["content"] == "Well." and found["finish_reason"] == "length"
            assert json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]) == {"zone": "utc"}
            assert len(found["message"]["tool_calls"]) == 2
            (alone,) = (await client.chat(parallel_tool_calls=False, **asked).json())["choices"]
            assert len(alone["message"]["tool_calls"]) == 1
            *chunks, _ = await client.chat(stream=True, **asked).events()
            _, text, *calls = [c["choices"][0]["delta"] for c in chunks[:-1]]
            assert text["content"] == "Well." and len(calls) == 2
            assert [call["tool_calls"][0]["function"]["name"] for call in calls] == ["time", "time"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            text = (await client.chat(tool_choice="none", **asked).json())["choices"][0]
            assert text["finish_reason"] == "length"
        assert seen == [(5, True, "weather")] * 3

    run(main)


# -- Anthropic's messages --------------------------------------------------------------------------------


def test_messages() -> None:
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


# -- responses -------------------------------------------------------------------------------------------


def test_responses() -> None:
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
