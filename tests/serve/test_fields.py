"""Fields borrowed from OpenAI, vLLM and Anthropic keep their owners' rules, at the edges too."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from serving import STORY, Client, model, run, serving, told

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "Once "}
CONTINUE = "continue_final_message"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": 2.1}, "temperature"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"presence_penalty": 2.1}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -2.1}, "frequency_penalty"),
    (CHAT, {"min_p": 1.1}, "min_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"top_p": 1.1}, "top_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"seed": 0.5}, "seed"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"min_tokens": -1}, "min_tokens"),
    (CHAT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (CHAT, {"min_tokens": 4096}, "min_tokens"),
    (CHAT, {"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a", ""]}, "stop"),
    (CHAT, {"stop": [None]}, "stop"),
    (CHAT, {"stop": 5}, "stop"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": ["5"]}, "stop_token_ids"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": -101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5.0": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"-5": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": [5]}, "logit_bias"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    (CHAT, {"tools": []}, "tools"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"cache_salt": ""}, "cache_salt"),
    (CHAT, {"verbosity": "loud"}, "verbosity"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"prediction": {"type": "content", "content": None}}, "prediction"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"reasoning_effort": "little"}, "reasoning_effort"),
    (CHAT, {"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    (CHAT, {"continue_final_message": True}, "messages"),
    (CHAT, {"messages": [BEGUN], "continue_final_message": True, "add_generation_prompt": True}, CONTINUE),
    (CHAT, {"messages": [{**BEGUN, "prefix": True}], "continue_final_message": False}, CONTINUE),
    (CHAT, {"messages": [{**BEGUN, "prefix": True}, *STORY]}, "messages"),
    (CHAT, {"messages": [*STORY, {**STORY[0], "partial": True}]}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "reasoning_content": "Hm.", "prefix": True}]},
        "messages",
    ),
    (CHAT, {"n_predict": 4}, "n_predict"),
    (TEXT, {"prompt": "a", "best_of": 0}, "best_of"),
    (TEXT, {"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
    (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    (TEXT, {"prompt": "a", "store": True}, "store"),
    ("/v1/responses", {"input": "a", "store": True}, "store"),
    ("/v1/responses", {"input": "a", "truncation": "middle"}, "truncation"),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ("/tokenize", {"messages": STORY, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"temperature": 2, "seed": -1, "top_k": -1, "top_p": 0, "min_p": 1}),
    (CHAT, {"stop": [], "logit_bias": {}, "stop_token_ids": [], "n": None, "seed": None}),
    (CHAT, {"stop": None, "logit_bias": None, "stop_token_ids": None, "tools": None, "tool_choice": None}),
    (CHAT, {"logit_bias": {"5": -100, "6": 100.0}, "presence_penalty": -2, "frequency_penalty": 2.0}),
    (CHAT, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, {"logprobs": None, "top_logprobs": None, "response_format": {"type": "text"}, "store": False}),
    (CHAT, {"tool_choice": "none", "parallel_tool_calls": True}),
    (CHAT, {"user": "x", "service_tier": "priority", "metadata": {"a": "b"}, "prompt_cache_key": "y"}),
    (CHAT, {"min_tokens": 2, "max_tokens": 2.0, "ignore_eos": True}),
    (TEXT, {"prompt": "a", "suffix": "", "best_of": 1, "max_tokens": 0, "logprobs": 0}),
    (TEXT, {"prompt": "a", "suffix": None, "best_of": None, "max_tokens": None, "echo": None}),
    (MESSAGES, {"messages": STORY, "temperature": 1, "top_k": 0, "metadata": {"user_id": "x"}}),
    ("/tokenize", {"messages": STORY, "add_special_tokens": False, "add_generation_prompt": False}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
]


def _send(client: Client, path: str, body: dict[str, Any]) -> Any:
    own = {CHAT: {"messages": STORY, "max_tokens": 2}, MESSAGES: {"max_tokens": 2}}.get(path, {})
    if "max_completion_tokens" not in body and body.get("min_tokens") == 4096:
        own = {"messages": STORY}
    return client.send(path, {**own, **body})


def test_values_at_the_bounds_and_beyond() -> None:
    async def main() -> None:
        async with serving() as client:
            for path, body, param in REFUSED:
                exchange = _send(client, path, body)
                error = (await exchange.json())["error"]
                assert (exchange.status, error["param"]) == (400, param), (body, error)
            ended = [*STORY, {"role": "assistant", "content": "Once "}]
            for body, field in (
                ({"temperature": 1.1}, "temperature"),
                ({"max_tokens": 0}, "max_tokens"),
                ({"stop_sequences": ["a", "\n "]}, "stop_sequences"),
                ({"messages": ended}, "messages: a last one of the assistant ends in whitespace"),
            ):
                exchange = _send(client, MESSAGES, {"messages": STORY, **body})
                assert field in (await exchange.json())["error"]["message"] and exchange.status == 400
            for path, body in TAKEN:
                exchange = _send(client, path, body)
                assert exchange.status == 200 or "error" not in await exchange.json(), body

    run(main)


def test_a_stop_string_before_min_tokens_does_not_count_drafted_and_plain() -> None:
    async def main() -> None:
        whole = told(max_new_tokens=20, ignore_eos=True)
        early, late = (str(model().tokenizer.decode(whole.tokens[at : at + 2])) for at in (2, 15))
        asked = {"max_tokens": 20, "ignore_eos": True, "stop": [early, late], "return_token_ids": True}
        prediction = {"type": "content", "content": whole.text}
        async with serving() as client:
            for least, end in ((0, early), (3, early), (4, late), (16, late), (17, None), (20, None)):
                for how in ({"speculation": "off"}, {"prediction": prediction}):
                    (choice,) = (await client.chat(min_tokens=least, **asked, **how).json())["choices"]
                    text, tokens = choice["message"]["content"], choice["token_ids"]
                    assert whole.tokens[: len(tokens)] == tokens
                    assert text == (whole.text if end is None else whole.text[: whole.text.index(end)]), least
                    assert choice["finish_reason"] == ("length" if end is None else "stop")

    run(main)


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_what_ends_a_text_is_not_in_it_but_in_its_tokens(field: str) -> None:
    async def main() -> None:
        whole = told(max_new_tokens=12)
        word = str(model().tokenizer.decode(whole.tokens[6:7]))
        cut = whole.text[: whole.text.index(word)]
        ends = {field: [whole.tokens[6]] if field == "stop_token_ids" else [word]}
        asked = {"max_tokens": 12, "logprobs": True, "return_token_ids": True, **ends}
        async with serving() as client:
            (choice,) = (await client.chat(**asked).json())["choices"]
            assert choice["message"]["content"] == cut and choice["finish_reason"] == "stop"
            assert choice["token_ids"] == whole.tokens[:7]
            assert len(choice["logprobs"]["content"]) == 7
            *chunks, _ = await client.chat(stream=True, **asked).events()
            deltas = [chunk["choices"][0] for chunk in chunks]
            assert "".join(one["delta"].get("content", "") for one in deltas) == cut
            assert list(chain(*(one.get("token_ids", ()) for one in deltas))) == whole.tokens[:7]

    run(main)
