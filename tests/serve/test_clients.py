"""openai-python's client against the server, in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from starlette.testclient import TestClient

from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.engine import make_engine
from outpace.serve.routes import make_app
from outpace.serve.service import Service
from serving import STORY, model, run, serving


class Colour(BaseModel):
    """A schema of the answer."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "green", "blue"]
    shade: Literal["dark", "light"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    limits = Limits()

    async def opening() -> Service:
        engine = make_engine(model(), "prompt_lookup", limits, adaptive=False, memory=0.2)
        return Service(model(), engine, limits, ["nano"])

    app = make_app(Keys(["key"]), limits, opening=opening)
    with TestClient(app, base_url="http://testserver/v1") as http:
        while app.state.service is None:  # it is made in the application's event loop
            assert http.get("http://testserver/health").status_code == 200
        yield openai.OpenAI(api_key="key", base_url="http://testserver/v1", http_client=http, max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "nano", "messages": STORY, "max_tokens": 10, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text and whole.usage is not None and whole.usage.completion_tokens == 10
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"
    more = {"top_k": 1, "speculation": "off", "speculation_metrics": True}
    own = client.chat.completions.create(**asked, extra_body=more)
    assert own.choices[0].message.content == text
    assert own.model_extra is not None and own.model_extra["speculation"]["drafter"] == "off"


def test_the_lines_of_the_documents(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "serve.md").read_text("utf-8")
    (lines,) = re.findall(r'^```python title="needs the server"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(openai, "OpenAI", lambda **given: client)
    printed: list[str] = []
    exec(lines.replace("outpace-nano", "nano"), {"print": printed.append})
    assert printed and printed[0]


def test_completions_and_models(client: openai.OpenAI) -> None:
    found = client.completions.create(model="nano", prompt=["The", "A"], max_tokens=4, logprobs=1)
    assert len(found.choices) == 2 and found.choices[0].logprobs is not None
    assert [one.id for one in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": STORY, "max_tokens": 2}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", **asked)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="nano", temperature=-1, **asked)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="nano", **asked)


def test_structured_outputs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "nano", "messages": STORY, "max_tokens": 40, "temperature": 0}
    found = client.chat.completions.parse(response_format=Colour, **asked)
    assert isinstance(found.choices[0].message.parsed, Colour)
    with client.chat.completions.stream(response_format=Colour, **asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed


def test_tools(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Colour, name="paint")
    found = client.chat.completions.parse(
        model="nano", messages=STORY, max_tokens=80, tools=[tool], tool_choice="required"
    )
    (call,) = found.choices[0].message.tool_calls or ()
    assert call.function.name == "paint" and isinstance(call.function.parsed_arguments, Colour)


def test_responses(client: openai.OpenAI) -> None:
    found = client.responses.create(model="nano", input="Hello.", max_output_tokens=5)
    assert found.output_text and found.usage is not None and found.usage.output_tokens == 5
    events = client.responses.create(model="nano", input="Hello.", max_output_tokens=5, stream=True)
    assert [event.type for event in events][-1] == "response.incomplete"


def test_the_asynchronous_client_streams_and_retries() -> None:
    async def main() -> None:
        async with serving(running=1, waiting=0) as server:
            transport = httpx2.ASGITransport(app=server.app)
            http = httpx2.AsyncClient(transport=transport)
            client = openai.AsyncOpenAI(api_key="x", base_url="http://testserver/v1", http_client=http)
            asked: dict[str, Any] = {"model": "nano", "messages": STORY, "max_tokens": 3}
            stream = await client.chat.completions.create(stream=True, **asked)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
            ticket = server.service.admit(1)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.with_options(max_retries=0).chat.completions.create(**asked)
            assert refused.value.response.headers["x-should-retry"] == "true"
            statuses = []

            async def make_room(response: httpx2.Response) -> None:
                statuses.append(response.status_code)
                ticket.close()

            http.event_hooks = {"response": [make_room]}
            client._calculate_retry_timeout = lambda *given: 0  # type: ignore[method-assign]
            found = await client.chat.completions.create(**asked)
            assert found.usage is not None and found.usage.completion_tokens == 3
            assert statuses == [429, 200]
            await server.empty()
            await http.aclose()

    run(main)


def test_a_client_that_gives_up_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with serving() as server:
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
            client = openai.AsyncOpenAI(
                api_key="x", base_url="http://testserver/v1", http_client=http, max_retries=0
            )
            asked: dict[str, Any] = {"model": "nano", "messages": STORY, "max_tokens": 1900}
            asking = asyncio.ensure_future(
                client.chat.completions.create(extra_body={"ignore_eos": True}, **asked)
            )
            while not server.service.engine.running:
                await asyncio.sleep(0)
            asking.cancel()  # as a timeout does
            await server.empty()
            await http.aclose()

    run(main)
