"""Bounds of what a body is made into: each list and mapping, and the server while the worst is sent."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx2
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from outpace.serve.chat import Chat
from outpace.serve.completions import Completions
from outpace.serve.fields import Tokens
from outpace.serve.messages_body import CountTokens, Messages
from outpace.serve.responses_body import Responses
from outpace.serve.routes import Detokenize, Tokenize
from serving import STORY, served

BODIES = (Chat, Completions, Messages, CountTokens, Responses, Tokenize, Detokenize)


def containers(kind: Any, place: str, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each list and mapping of a type: its place, the type with its annotations, and the annotations."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        yield from containers(inner, place, (*metadata, *more))
    elif origin in (Union, types.UnionType):
        for one in get_args(kind):
            yield from containers(one, place, () if get_origin(one) is Annotated else metadata)
    elif origin in (list, dict) or kind in (list, dict):
        flat = [two for one in metadata for two in (one.metadata if isinstance(one, FieldInfo) else [one])]
        yield place, Annotated[(kind, *metadata)] if metadata else kind, flat
        for one in get_args(kind):
            yield from containers(one, f"{place}[]")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from containers(field.annotation, f"{place}.{name}", tuple(field.metadata))
    else:
        assert origin in (None, Literal), f"{place}: what is {kind}?"


def unbounded(kind: type[BaseModel]) -> list[str]:
    return [
        place
        for place, _, notes in containers(kind, kind.__name__)
        if not any(getattr(note, "max_length", None) for note in notes)
    ]


@pytest.mark.parametrize("kind", BODIES)
def test_every_list_and_mapping_has_a_bound(kind: type[BaseModel]) -> None:
    assert unbounded(kind) == []


def test_the_walk_finds_what_has_none() -> None:
    class Inner(BaseModel):
        texts: list[str] | None = None

    class Outer(BaseModel):
        bounded: Tokens
        either: str | Annotated[list[Inner], FieldInfo(max_length=3)]
        pairs: dict[str, list[int]]

    assert unbounded(Outer) == ["Outer.either[].texts", "Outer.pairs", "Outer.pairs[]"]


@pytest.mark.parametrize("kind", BODIES)
def test_lists_end_at_their_first_wrong_element(kind: type[BaseModel]) -> None:
    """At most the errors of one element, of every kind that the list may have."""
    wrong: Any
    for place, annotated, _ in containers(kind, kind.__name__):
        for wrong in ([None], [{}], [[{}]], [{"type": "text"}]):
            adapter = TypeAdapter(annotated)
            try:
                adapter.validate_python(wrong * 4, strict=True)
            except ValidationError as error:
                assert len({line["loc"][0] for line in error.errors() if line["loc"]}) <= 1, place


def filled(head: str, one: str, tail: str, separator: str = ",") -> bytes:
    """A body of 4 MB."""
    count = (4 * 2**20 - len(head) - len(tail)) // (len(one) + len(separator))
    return (head + separator.join([one] * count) + tail).encode()


def pairs(head: str, value: str, tail: str) -> bytes:
    """A body of 4 MB with an object of different keys."""
    count = (4 * 2**20 - len(head) - len(tail)) // (len(value) + 10)
    return (head + ",".join(f'"{place:06}":{value}' for place in range(count)) + tail).encode()


TURN = '{"role":"user","content":""}'
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = json.dumps({"messages": STORY})[:-1]
TOOL = '{"type":"function","function":{"name":"a","parameters":'
FORM = ',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
SCORED = {"echo": True, "logprobs": 20, "max_tokens": 0}
NESTED = '{"function":{"name":"a","arguments":"' + "[" * 190 + "]" * 190 + '"}}'
CALLS = '{"messages":[{"role":"assistant","content":"","tool_calls":['
PART = '{"type":"text","text":""}'


# fmt: off
def worst() -> list[tuple[str, bytes]]:
    """Paths, and bodies that take long to read."""
    return [
        *((TEXT, filled('{"prompt":[', one, "]}"))
          for one in ("{}", "1", "1.0", "[1]", "[]", '"a"', "[[[]]]")),
        (TEXT, filled('{"prompt":[[', "1", "]]}")),
        (TEXT, filled('{"prompt":["","', "a", '"]}', "")),
        (TEXT, filled('{"prompt":"', "a", '"}', "")),
        (TEXT, filled('{"prompt":"', "\\u00e9", '"}', "")),
        (TEXT, filled('{"prompt":"', "a b", '"}', " ")),
        (TEXT, filled('{"prompt":"a","stop":[', '"a"', "]}")),
        (TEXT, filled('{"prompt":"a","stop_token_ids":[', "1", "]}")),
        (TEXT, pairs('{"prompt":"a","logit_bias":{', "1", "}}")),
        (TEXT, pairs('{"prompt":"a","logit_bias":{', '"x"', "}}")),
        (TEXT, pairs("{", "1", "}")),
        (TEXT, json.dumps({"prompt": [[5] * 2000] * 20, **SCORED}).encode()),
        (CHAT, filled('{"messages":[', TURN, "]}")),
        (CHAT, filled('{"messages":[', "{}", "]}")),
        (CHAT, pairs('{"messages":[{', "1", "}]}")),
        (CHAT, filled('{"messages":[{"role":"user","content":[', PART, "]}]}")),
        (CHAT, filled('{"messages":[', '{"role":"user","content":[' + ",".join([PART] * 1000) + "]}", "]}")),
        (CHAT, filled('{"messages":[{"role":"user","content":[', '{"type":"file"}', "]}]}")),
        (CHAT, filled('{"messages":[{"role":"user","content":"', "a b", '"}]}', " ")),
        (CHAT, filled('{"messages":[{"role":"assistant","tool_calls":[', "{}", "]}]}")),
        (CHAT, filled(
            '{"messages":[{"role":"assistant","content":"","tool_calls":[{"function":{"name":"a","arguments":"[',
            "{}", ']"}}]}]}')),
        (CHAT, filled(
            '{"messages":[{"role":"assistant","content":"","tool_calls":[{"function":{"name":"a","arguments":"[',
            "[[[[[[[[[[]]]]]]]]]]", ']"}}]}]}')),
        (CHAT, filled(CALLS + ",".join([NESTED] * 1000) + "]},", TURN, "]}")),
        (CHAT, filled('{"messages":[{"role":"user","content":"","annotations":[', "{}", "]}]}")),
        (CHAT, filled(ASK + ',"tools":[', '{"type":"function","function":{"name":"a"}}', "]}")),
        (CHAT, filled(ASK + ',"tools":[' + TOOL + '{"enum":[', "{}", "]}}}]}")),
        (CHAT, filled(ASK + ',"metadata":{"a":[', '{"":0}', "]}}")),
        (CHAT, pairs(ASK + ',"chat_template_kwargs":{', "1", "}}")),
        (CHAT, filled(ASK + ',"prediction":{"type":"content","content":[', PART, "]}}")),
        (CHAT, filled(ASK + ',"prediction":{"type":"content","content":"', "a b", '"}}', " ")),
        (CHAT, filled(ASK + FORM + '{"enum":[', '"a"', "]}}}}")),
        (CHAT, pairs(ASK + FORM + '{"properties":{', "{}", "}}}}}")),
        (CHAT, filled(ASK + ',"modalities":[', '"text"', "]}")),
        ("/v1/messages", filled('{"max_tokens":1,"messages":[', TURN, "]}")),
        ("/v1/messages", filled('{"max_tokens":1,"messages":[' + TURN + '],"system":[', PART, "]}")),
        ("/v1/messages/count_tokens", filled('{"messages":[', TURN, "]}")),
        ("/v1/responses", filled('{"input":[', TURN, "]}")),
        ("/v1/responses", filled('{"input":"', "a b", '"}', " ")),
        ("/tokenize", filled('{"messages":[', TURN, "]}")),
        ("/tokenize", filled('{"return_token_strs":true,"prompt":"', "a b", '"}', " ")),
        ("/detokenize", filled('{"tokens":[', "1", "]}")),
        ("/detokenize", filled('{"tokens":[', "{}", "]}")),
    ]
# fmt: on


def held(pid: int) -> float:
    """The memory of a process and of its workers, in MiB."""
    family = [pid, *(int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                     for child in (task / "children").read_text().split())]  # fmt: skip
    pages = 0
    for one in family:
        with suppress(OSError):  # a worker that has just ended
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def watched(http: httpx2.AsyncClient, sending: asyncio.Task[Any]) -> float:
    """The longest time that the server took to say that it is healthy, while something is sent."""
    longest = 0.0
    while not sending.done():
        began = time.monotonic()
        assert (await http.get("/health")).status_code == 200
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.02)
    return longest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about processes")
def test_the_server_is_well_while_the_worst_is_sent() -> None:
    """Send a body again if /health was late: another process may have been in the way."""

    async def main(pid: int, address: str) -> None:
        async with (
            httpx2.AsyncClient(base_url=address, timeout=300) as http,
            httpx2.AsyncClient(base_url=address, timeout=300) as other,
        ):
            patterned = {"type": "string", "pattern": "^[ab]$"}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": patterned}}
            for texts in ("a", "a " * 40_000):  # so that a worker of each kind is there
                turns = [{"role": "user", "content": texts}]
                await http.post(CHAT, json={"messages": turns, "max_tokens": 1, "response_format": form})
            before = held(pid)
            for path, body in worst():
                for rest in reversed(range(8)):
                    headers = {"content-type": "application/json"}
                    sending = asyncio.ensure_future(http.post(path, content=body, headers=headers))
                    longest = await watched(other, sending)
                    response = sending.result()
                    assert response.status_code < 500, (path, body[:80], response.text[:300])
                    if longest < 0.5:
                        break
                    assert rest, f"{path} {body[:80]!r}: /health took {longest:.2f} s"
                assert held(pid) - before < 200, f"{path} {body[:80]!r}: {held(pid) - before:.0f} MiB more"

    with served() as (process, address, _):
        asyncio.run(main(process.pid, address))
