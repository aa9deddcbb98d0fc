"""Images in chat: the tokens are those of transformers alone, and what cannot be read is refused."""

from __future__ import annotations

import base64
import copy
import io
import itertools
import json
import re
import struct
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from image_models import PARTED, folder, picture, seeing, url_of
from outpace.cache import KVCache
from outpace.engine import Engine, scheduler
from outpace.serve import images
from outpace.serve.dialogue import Dialogue
from serving import Client, run, serving
from watching import preemptions

PATHS = CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NEW = 12
WORDS = "Once there was a dog who wanted to see the sea, and so he walked for a day and a night until he came"


def part(path: str, data: bytes, kind: str = "png") -> dict[str, Any]:
    """An image in a message of an API."""
    if path == MESSAGES:
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": f"image/{kind}", "data": encoded}
        return {"type": "image", "source": source}
    url = url_of(data, kind)
    return (
        {"type": "image_url", "image_url": {"url": url}}
        if path == CHAT
        else {"type": "input_image", "image_url": url}
    )


def body(path: str, *contents: Any, **more: Any) -> dict[str, Any]:
    """A request of the turns of a user and of the assistant: texts, and bytes for images."""
    kind = "input_text" if path == RESPONSES else "text"
    turns = [
        {
            "role": "assistant" if number % 2 else "user",
            "content": content
            if isinstance(content, str)
            else [
                part(path, one) if isinstance(one, bytes) else {"type": kind, "text": one} for one in content
            ],
        }
        for number, content in enumerate(contents)
    ]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    field = "input" if path == RESPONSES else "messages"
    return {field: turns, limit: NEW, "temperature": 0, **more}


@cache
def alone(*contents: Any, new: int = NEW) -> tuple[list[int], list[int]]:
    """The prompt and the greedy output of transformers alone."""
    processor = transformers.AutoProcessor.from_pretrained(folder())
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder(), dtype=torch.float64)
    turns = [
        {
            "role": "assistant" if number % 2 else "user",
            "content": [
                {"type": "image"} if isinstance(one, bytes) else {"type": "text", "text": one}
                for one in ([content] if isinstance(content, str) else content)
            ],
        }
        for number, content in enumerate(contents)
    ]
    seen = [
        Image.open(io.BytesIO(one)).convert("RGB")
        for content in contents
        for one in content
        if isinstance(one, bytes)
    ]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    given = processor(text=[text], images=seen or None, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**given, max_new_tokens=new, do_sample=False)
    prompt = given["input_ids"][0].tolist()
    return prompt, output[0, len(prompt) :].tolist()


async def answered(client: Client, path: str, asked: dict[str, Any]) -> tuple[str, int]:
    """The text of an answer, and the number of its prompt's tokens."""
    found = await client.send(path, asked).json()
    usage = found["usage"]
    if path == CHAT:
        return found["choices"][0]["message"]["content"], usage["prompt_tokens"]
    if path == MESSAGES:
        return found["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]
    return found["output"][-1]["content"][0]["text"], usage["input_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_is_that_of_transformers_alone(path: str) -> None:
    one, two = picture(1), picture(2, "JPEG")
    contents: list[tuple[Any, ...]] = [(("What is this?", one),), ((one, "and", two), "A dog.", (two, "So?"))]

    async def main() -> None:
        async with serving("lookahead", loaded=seeing()) as client:
            for given in contents:
                prompt, tokens = alone(*given)
                text = seeing().tokenizer.decode(tokens, skip_special_tokens=True)
                assert await answered(client, path, body(path, *given)) == (text, len(prompt))
            listed = (await client.get("/v1/models"))["data"][0]
            assert listed["capabilities"]["images"] is True

    assert alone(*contents[0])[1] != alone(("What is this?", two))[1], "the images have no effect"
    run(main)


def test_a_stream_and_several_choices() -> None:
    given = (("What is this?", picture(1)),)
    prompt, tokens = alone(*given)

    async def main() -> None:
        async with serving("lookahead", loaded=seeing()) as client:
            asked = body(CHAT, *given, stream=True, n=2, return_token_ids=True)
            events = await client.send(CHAT, asked).events()
            found: dict[int, list[int]] = {0: [], 1: []}
            for choice in (event["choices"][0] for event in events[:-1] if event.get("choices")):
                found[choice["index"]] += choice.get("token_ids") or []
            assert found == {0: tokens, 1: tokens}
            assert events[0]["prompt_token_ids"] == prompt
            counted = body(MESSAGES, *given)
            del counted["max_tokens"], counted["temperature"]
            exchange = client.send(f"{MESSAGES}/count_tokens", counted)
            assert (await exchange.json())["input_tokens"] == len(prompt)

    run(main)


def test_the_prefix_cache_tells_images_apart() -> None:
    """The same tokens, with blocks of them around an image: rows behind it are shared only with the same."""
    one, two = picture(1), picture(2)
    contents = [((WORDS, WORDS, image, WORDS, WORDS),) for image in (one, two, one)]
    before = len(seeing().tokenizer(f"user: {WORDS}{WORDS}").input_ids) // 32 * 32

    async def main() -> None:
        async with serving("lookahead", loaded=seeing(), change=_shared) as client:
            shared = []
            for given in contents:
                found = await client.send(CHAT, body(CHAT, *given, return_token_ids=True)).json()
                assert found["choices"][0]["token_ids"] == alone(*given)[1]
                shared.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            whole = (len(alone(*contents[0])[0]) - 1) // 32 * 32
            assert shared == [0, before, whole] and 0 < before < whole
            words = body(CHAT, WORDS + WORDS)  # a text shares the rows before the image
            found = await client.send(CHAT, words).json()
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == before

    run(main)


def _shared(engine: Engine) -> None:
    from outpace.engine.prefix import PrefixCache

    engine._batch.memory.prefixes = PrefixCache(2**20)


def test_choices_are_preempted_and_resumed_with_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "_least_room", 16)
    monkeypatch.setattr(scheduler, "_ANSWER", 4)
    monkeypatch.setattr(scheduler, "_DRAFT", 2)
    given = (("What is this?", picture(1), picture(2)),)
    watched = list[Any]()

    def change(engine: Engine) -> None:
        watched.append(preemptions(engine, monkeypatch))

    async def main() -> None:
        rows = 256 * seeing().target.new_cache().row_bytes
        async with serving("lookahead", loaded=seeing(), memory=rows, change=change) as client:
            found = await client.send(
                CHAT, body(CHAT, *given, n=4, max_tokens=100, return_token_ids=True)
            ).json()
            assert [one["token_ids"] for one in found["choices"]] == [alone(*given, new=100)[1]] * 4

    run(main)
    assert any(watched[0])


def linked(asked: dict[str, Any]) -> dict[str, Any]:
    """A request whose images are at an address."""
    text = re.sub(r"data:image/png;base64,[^\"]*", "http://localhost:1/a.png", json.dumps(asked))
    found: dict[str, Any] = json.loads(text)
    return found


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


BAD: dict[str, tuple[Any, str]] = {
    "an address": ("http://localhost:1/a.png", "data URLs"),
    "a file": ("file:///etc/passwd", "data URLs"),
    "another kind of data": ("data:text/html;base64,AAAA", "data URLs"),
    "nothing": ("data:image/png;base64,", "an image is empty"),
    "no base64": ("data:image/png;base64,%%%%", "cannot be read"),
    "no image": (url_of(b"<svg/>"), "cannot be read"),
    "a format that is not taken": (url_of(picture(0, "BMP")), "cannot be read"),
    "half an image": (url_of(picture(0, side=64)[:200]), "cannot be read"),
    "too many pixels": (url_of(bomb(4000, 4000)), "4000 x 4000 pixels"),
    "a bomb": (url_of(bomb(60_000, 60_000)), "pixels"),
    "too many bytes": (url_of(b"0" * (2**23 + 9)), "bytes"),
    "the mark in a text": (url_of(picture(0)), "2 places"),
}


def test_what_cannot_be_read_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST", 3)
    good = (("What is this?", picture(1)),)

    async def main() -> None:
        async with serving("lookahead", loaded=seeing(), body=2**24) as client:
            for name, (url, why) in BAD.items():
                text = "<image>" if name == "the mark in a text" else "So?"
                parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
                exchange = client.send(CHAT, {"messages": [{"role": "user", "content": parts}]})
                error = (await exchange.json())["error"]
                assert exchange.status == 400 and why in error["message"], (name, error)
            refused = [
                (CHAT, body(CHAT, (picture(0),) * 4), "maximum is 3"),
                (CHAT, body(CHAT, "a", (picture(0), "b"), "c"), "not of assistant"),
                (MESSAGES, body(MESSAGES, "a", (picture(0), "b"), "c"), "not of assistant"),
                (RESPONSES, body(RESPONSES, "a", (picture(0), "b"), "c"), "not of assistant"),
                (CHAT, body(CHAT, (WORDS * 20, picture(0))), "maximum context length"),
                *((path, looked(path, *[picture(0)] * 4), "maximum is 3") for path in PATHS),
                *((path, looked(path, b"<svg/>"), "cannot be read") for path in PATHS),
                (CHAT, linked(looked(CHAT, picture(0))), "data URLs"),
                (RESPONSES, linked(looked(RESPONSES, picture(0))), "data URLs"),
            ]
            for path, asked, why in refused:
                exchange = client.send(path, asked)
                assert why in (await exchange.json())["error"]["message"] and exchange.status == 400
            tokens = alone(*good)[1]
            found = await client.send(CHAT, body(CHAT, *good, return_token_ids=True)).json()
            assert found["choices"][0]["token_ids"] == tokens
            assert client.service.admission.inside == 0

    run(main)


def test_pixels_are_counted_over_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PIXELS", 200)
    monkeypatch.setattr(images, "ALL_PIXELS", 400)

    async def main() -> None:
        async with serving(loaded=seeing()) as client:
            for count, status in ((2, 200), (3, 400)):  # of 192 pixels each
                exchange = client.send(CHAT, body(CHAT, [picture(n) for n in range(count)]))
                await exchange.text()
                assert exchange.status == status
            exchange = client.send(CHAT, body(CHAT, [picture(0, side=14)]))
            assert "pixels" in (await exchange.json())["error"]["message"]

    run(main)


def test_a_model_of_text_says_so() -> None:
    async def main() -> None:
        async with serving() as client:
            for path, ask in itertools.product(PATHS, (body, looked)):
                exchange = client.send(path, ask(path, (picture(0),) if ask is body else picture(0)))
                error = (await exchange.json())["error"]["message"]
                assert (
                    exchange.status == 400
                    and error == "nano takes text alone, no images: it is a model of text"
                )
            assert (await client.get("/v1/models"))["data"][0]["capabilities"]["images"] is False

    run(main)


SHOWN = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
WITH_TOOLS = SHOWN + PARTED.replace("\n{% endfor %}", f"{CALLS}\n{{% endfor %}}")
IN_USER = WITH_TOOLS.replace("c.type == 'image'", "c.type == 'image' and m.role == 'user'")
CALL = '{"name": "look", "arguments": {"x": "sea"}}'
CALLED = f"look user: Look.assistant: {f'<tool_call>{CALL}</tool_call>' * 2}"
TEXTED = f"<tool_call>\n{CALL}\n</tool_call>"
RESULTS = {  # how two results are shown, each with an image between texts; a break after a block is none
    PARTED: (  # has no place for tools
        f"{{preamble}}user: Look.assistant: {TEXTED}\n{TEXTED}user: <tool_response>\nA<image>B\n"
        "</tool_response>\n<tool_response>\n{error}A<image>B\n</tool_response>\nSo?assistant:"
    ),
    WITH_TOOLS: f"{CALLED}tool: A<image>Btool: {{error}}A<image>Buser: So?assistant:",
    IN_USER: (
        f"{CALLED}tool: A[image 1]Btool: {{error}}A[image 2]B"
        "user: [image 1]<image>[image 2]<image>\nSo?assistant:"
    ),
}


def looked(path: str, *images: Any) -> dict[str, Any]:
    """A request with a call and a result for each image, which stands between two texts."""
    given, schema, kind = {"x": "sea"}, {"type": "object"}, "input_text" if path == RESPONSES else "text"
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    results = {
        f"call{number}": [{"type": kind, "text": "A"}, part(path, one), {"type": kind, "text": "B"}]
        for number, one in enumerate(images)
    }
    if path == MESSAGES:
        calls = [{"type": "tool_use", "id": one, "name": "look", "input": given} for one in results]
        said = [{"type": "tool_result", "tool_use_id": one, "content": it} for one, it in results.items()]
        said[-1]["is_error"] = len(said) > 1
        turns += [{"role": "assistant", "content": calls}, {"role": "user", "content": said}]
        tools = [{"name": "look", "input_schema": schema}]
    elif path == RESPONSES:
        call = {"type": "function_call", "name": "look", "arguments": json.dumps(given)}
        turns += [{**call, "call_id": one} for one in results]
        turns += [
            {"type": "function_call_output", "call_id": one, "output": it} for one, it in results.items()
        ]
        tools = [{"type": "function", "name": "look", "parameters": schema}]
    else:
        function = {"name": "look", "arguments": json.dumps(given)}
        calls = [{"id": one, "type": "function", "function": function} for one in results]
        turns += [{"role": "assistant", "content": None, "tool_calls": calls}]
        turns += [{"role": "tool", "tool_call_id": one, "content": it} for one, it in results.items()]
        tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    turns.append({"role": "user", "content": "So?"})
    limit, field = ("max_output_tokens", "input") if path == RESPONSES else ("max_tokens", "messages")
    return {field: turns, "tools": tools, limit: NEW, "temperature": 0}


@pytest.mark.parametrize("template", RESULTS, ids=["no tools", "in results", "after results"])
def test_images_in_results_of_tools(template: str) -> None:
    """They stand in the result if the template shows them there, otherwise in a message after the results."""
    one, two = picture(1), picture(2)
    tokenizer = copy.deepcopy(seeing().tokenizer)
    tokenizer.chat_template = template
    processor = transformers.AutoProcessor.from_pretrained(folder())
    target = transformers.LlavaForConditionalGeneration.from_pretrained(folder(), dtype=torch.float64)

    def alone(*images: bytes, error: str = "") -> tuple[int, str]:
        seen = [Image.open(io.BytesIO(image)) for image in images]
        tool = {"function": {"name": "look", "parameters": {"type": "object"}}}
        turns, _ = Dialogue(seeing()).prepared([], [tool])
        text = RESULTS[template].replace("{preamble}", f"system: {turns[0]['content']}")
        text = text.replace("{error}", error)
        given = processor(text=[text], images=seen, return_tensors="pt", add_special_tokens=False)
        output = target.generate(**given, max_new_tokens=NEW, do_sample=False)[0]
        size = given["input_ids"].shape[1]
        return size, str(tokenizer.decode(output[size:], skip_special_tokens=True))

    async def main() -> None:
        async with serving("lookahead", loaded=replace(seeing(), tokenizer=tokenizer)) as client:
            for path in PATHS:
                text, size = await answered(client, path, looked(path, one, two))
                assert (size, text) == alone(one, two, error="Error: " if path == MESSAGES else ""), path

    assert alone(one, two)[1] != alone(two, one)[1], "the images' order has no effect"
    run(main)


def test_texts_of_a_template_of_parts() -> None:
    """A template that shows texts only as parts shows those of a conversation without images, too."""
    assert seeing().tokenizer.chat_template == PARTED
    given = ("Tell me a story.", "No.", "Why?")

    async def main() -> None:
        async with serving(loaded=seeing()) as client:
            for path in PATHS:
                text = seeing().tokenizer.decode(alone(*given)[1], skip_special_tokens=True)
                assert await answered(client, path, body(path, *given)) == (text, len(alone(*given)[0]))

    run(main)
