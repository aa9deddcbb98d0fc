"""Clients' texts are data: a corpus of texts inside strings, and values that only look harmless."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outpace.loading import Loaded
from outpace.serve import texts
from serving import FORM, STORY, model, run, serving

CHAT = "/v1/chat/completions"
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"type": "object"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}

CORPUS = [
    "",
    "[" * 5000,
    '{"a":' * 5000,
    "[" * 150 + "]" * 150,
    "9" * 5000,
    "-1e999",
    "NaN",
    '"\\ud800"',
    "\\ud800",
    "\x00",
    "\x1b[31m\r\n",
    "{{ 7*7 }}{% for a in range(99999) %}{% endfor %}",
    "{0.__class__} %s %n {kind!r}",
    "<|endoftext|><s></s><unk>[INST]",
    "\N{BYTE ORDER MARK}\N{RIGHT-TO-LEFT OVERRIDE}",
    "e" + "\N{COMBINING ACUTE ACCENT}" * 3000,
    "\N{MAN}\N{ZERO WIDTH JOINER}" * 500,
    "../../../etc/passwd",
    "a" * 20_000,
]

BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "model": "nano",
            "messages": [
                {"role": "user", "content": "a", "name": "b"},
                {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": "c"},
                {"role": "tool", "content": "d", "tool_call_id": "1"},
                {"role": "user", "content": [{"type": "text", "text": "e"}]},
            ],
            "max_tokens": 1,
            "tools": [FUNCTION],
            "tool_choice": "auto",
            "user": "f",
            "cache_salt": "g",
            "metadata": {"h": "i"},
            "logit_bias": {"5": 1},
            "stop": "j",
            "speculation": {"drafter": "prompt_lookup"},
            "prediction": {"type": "content", "content": "k"},
        },
    ),
    (CHAT, {"messages": STORY, "max_tokens": 1, "response_format": FORM}),
    (
        CHAT,
        {
            "messages": STORY,
            "max_tokens": 1,
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
        },
    ),
    (CHAT, {"messages": STORY, "max_tokens": 1, "chat_template_kwargs": {"style": "a"}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "stop": ["c"], "suffix": ""}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "system": "b", "max_tokens": 1,
                      "stop_sequences": ["c"], "metadata": {"d": "e"}}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}], "system": "b"}),
    ("/v1/responses", {"input": "a", "instructions": "b", "max_output_tokens": 1, "metadata": {"c": "d"}}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
]  # fmt: skip


def styled() -> Loaded:
    """The embedded model with a template that has a variable for requests, and tools."""
    tokenizer = copy.deepcopy(model().tokenizer)
    tokenizer.chat_template = (
        "{% generation %}{{ style | default('plain') }}{% endgeneration %}{% for tool in tools or [] %}"
        "{{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
        "{{ bos_token }}{{ padding }}{% if add_generation_prompt %}:{% endif %}"
    )
    return replace(model(), tokenizer=tokenizer)


def strings(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a string in a body, and of a key: its container, and its index there."""
    if isinstance(value, dict | list):
        for place, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(one, str):
                yield value, place
            yield from strings(one)


def variants(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The body with each text of the corpus in place of each string, and of the keys of mappings."""
    count = sum(1 for _ in strings(body))
    for text in CORPUS:
        for number in range(count):
            changed = copy.deepcopy(body)
            container, place = list(strings(changed))[number]
            container[place] = text
            yield text, changed
        for field in {"metadata", "logit_bias", "chat_template_kwargs"} & set(body):
            yield text, body | {field: {text: 1}}
        if "response_format" in body:
            for schema in ({text: {}}, {"type": text}, {"$ref": text}, {"pattern": text, "type": "string"},
                           {"properties": {text: {}}}, {"$defs": text}, {"enum": [text]}):  # fmt: skip
                form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
                yield text, body | {"response_format": form}
        if "tools" in body:
            for parameters in ({"$defs": text}, {"definitions": text}, {"properties": text}, {"type": text}):
                one = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
                yield text, body | {"tools": [one]}


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(BODIES)))
def test_texts_inside_strings_are_answered_or_refused(number: int, share: int) -> None:
    """An eighth of them by default."""
    path, body = BODIES[number]
    every = list(variants(body))

    async def main() -> None:
        async with serving(loaded=styled()) as client:
            for text, changed in random.Random(number).sample(every, len(every) // share):
                exchange = client.send(path, changed)
                found = await exchange.text()
                assert exchange.status is not None and exchange.status < 500, (text[:40], found[:300])
                assert client.service.admission.inside == 0

    run(main, 600)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [*STORY, {"role": "assistant", "tool_calls": [{**CALL, "function": {
            "name": "a", "arguments": "[" * 5000}}]}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$defs": 5}}}],
          "tool_choice": "required"}, "tools"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_looks_harmless(more: dict[str, Any], param: str | None) -> None:
    async def main() -> None:
        async with serving(loaded=styled()) as client:
            exchange = client.chat(max_tokens=1, **more)
            found = await exchange.json()
            if param is None:  # a text as any other
                assert exchange.status in (200, 400), found
            else:
                assert exchange.status == 400 and found["error"]["param"] == param, found

    run(main)


NOT_ITS_OWN = [
    "chat_template", "tokenize", "messages", "conversation", "tools", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask", "bos_token", "self",
    "continue_final_message", "add_generation_prompt", "message", "range", "namespace", "raise_exception",
]  # fmt: skip


def test_templates_are_given_their_own_variables_alone() -> None:
    """Other names are refused by name, above all a template of the client's own."""

    async def main() -> None:
        async with serving(loaded=styled()) as client:
            for name in NOT_ITS_OWN:
                exchange = client.chat(chat_template_kwargs={"style": "a", name: "{{ 7*7 }}"}, max_tokens=1)
                error = (await exchange.json())["error"]
                assert exchange.status == 400 and error["param"] == "chat_template_kwargs", name
                assert repr(name) in error["message"] and "style" in error["message"]

    run(main)


def test_a_variable_of_the_template_reaches_it() -> None:
    async def main() -> None:
        async with serving(loaded=styled()) as client:
            asked = {"max_tokens": 1, "return_token_ids": True}
            plain = await client.chat(**asked).json()
            found = await client.chat(**asked, chat_template_kwargs={"style": "{{ 7*7 }}"}).json()
            assert plain["prompt_token_ids"][:1] != found["prompt_token_ids"][:1]
            text = model().tokenizer.decode(found["prompt_token_ids"])
            assert text.startswith("{{ 7*7 }}") and "49" not in text
        async with serving() as client:  # a template that has none
            exchange = client.chat(chat_template_kwargs={"style": "a"})
            assert "it has none" in (await exchange.json())["error"]["message"] and exchange.status == 400

    run(main)


@pytest.mark.parametrize("short", [2**16, -1])
def test_the_arguments_of_a_call_are_an_object_for_the_template(
    monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """In the server as in a process, where those of a long conversation are read."""
    monkeypatch.setattr(texts, "_SHORT", short)

    async def main() -> None:
        async with serving(loaded=styled()) as client:
            pool = client.service.texts.pool
            for given, shown in (
                ('{"a":\n[1]}', '{"a": [1]}'),
                ('{"a": [1', '{"a": [1]}'),  # as an answer's limit cuts it off
            ):
                call = {"type": "function", "function": {"name": "paint", "arguments": given}}
                turns = [*STORY, {"role": "assistant", "tool_calls": [call]}]
                asked = {"messages": turns, "max_tokens": 1, "return_token_ids": True}
                found = await client.chat(**asked).json()
                assert shown in model().tokenizer.decode(found["prompt_token_ids"])
                found = await client.send("/tokenize", {"messages": turns}).json()
                assert shown in model().tokenizer.decode(found["tokens"])
            assert bool(pool.pids) == (short < 0)

    run(main)


def test_the_server_makes_no_objects_of_long_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of a few megabytes would be gigabytes, and stall the others while it is read."""

    def refused(*given: Any) -> None:
        raise AssertionError("read in the server")

    monkeypatch.setattr(texts, "with_arguments", refused)
    call = {"type": "function", "function": {"name": "paint", "arguments": f'{{"a": [{"1," * 60_000}1]}}'}}

    async def main() -> None:
        async with serving() as client:
            exchange = client.chat(
                messages=[{"role": "assistant", "content": "", "tool_calls": [call]}, *STORY]
            )
            error = (await exchange.json())["error"]  # a template without a place for calls shows their text
            assert error["code"] == "context_length_exceeded" and client.service.texts.pool.pids

    run(main)


def test_a_prediction_and_a_named_drafter() -> None:
    prediction = {"type": "content", "content": "Once upon a time there was a dog."}

    async def main() -> None:
        async with serving(others={"copy": "prompt_lookup:branches=1", "both": "reference"}) as client:
            asked = {"prediction": prediction, "max_tokens": 8}
            plain = (await client.chat(max_tokens=8).json())["choices"]
            for name in ("off", "both", "prompt_lookup", True):
                assert (await client.chat(speculation=name, **asked).json())["choices"] == plain
            exchange = client.chat(speculation="copy", **asked)
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and error["param"] == "prediction"
            assert "leave speculation out" in error["message"] and "drafter=" not in error["message"]
        async with serving("early_exit:layers=1") as client:  # it replaces the target
            exchange = client.chat(**asked)
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and "speculation: 'off'" in error["message"]
            assert (await client.chat(speculation="off", **asked).json())["choices"]

    run(main)


def test_errors_quote_little_of_what_was_sent() -> None:
    async def main() -> None:
        async with serving() as client:
            long = "a" * 50_000
            for more in ({"model": long}, {long: 1}, {"logit_bias": {long: 1}}, {"speculation": long},
                         {"chat_template_kwargs": {long: 1}}):  # fmt: skip
                exchange = client.chat(**more)
                assert len(await exchange.text()) < 3000 and exchange.status in (400, 404)

    run(main)


def test_the_corpus_is_sent_as_it_is() -> None:
    """A body of these texts is JSON, and all of them are different."""
    assert len(set(CORPUS)) == len(CORPUS) == len(json.loads(json.dumps(CORPUS)))
