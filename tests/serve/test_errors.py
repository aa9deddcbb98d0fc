"""Every mistake gets an error in OpenAI's format, and leaves no room reserved."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outpace.core import DEFAULT_DRAFTER
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.routes import make_app
from outpace.serve.telemetry import provider_to
from outpace.serve.totals import CLIENT
from serving import LONG, STORY, run, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": STORY, "max_tokens": 2}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}


def chat(**more: Any) -> bytes:
    return json.dumps({**HI, **more}).encode()


def message(raw: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"' + raw + b'"}],"max_tokens":2}'


BODIES: list[tuple[str, bytes, int, str | None]] = [
    ("not JSON", b"{bad", 400, None),
    ("nothing", b"", 400, None),
    ("a list", b"[1]", 400, None),
    ("not UTF-8", message(b"\xff"), 400, None),
    ("a lone surrogate", message(b"\\ud800"), 400, None),
    ("NaN", b'{"temperature":NaN}', 400, None),
    ("infinity", chat()[:-1] + b',"temperature":1e999}', 400, "temperature"),
    ("a huge number", chat()[:-1] + b',"n":' + b"9" * 5000 + b"}", 400, None),
    ("deep nesting", chat()[:-1] + b',"metadata":' + b"[" * 10**5 + b"]" * 10**5 + b"}", 400, None),
    ("a wrong type", chat(temperature="1"), 400, "temperature"),
    ("a truth as a number", chat(max_tokens=True), 400, "max_tokens"),
    ("out of range", chat(top_p=-1), 400, "top_p"),
    ("too many choices", chat(n=129), 400, "n"),
    ("an unknown field", chat(temprature=1), 400, "temprature"),
    ("an unknown model", chat(model="gpt-4"), 404, "model"),
    ("an unknown role", chat(messages=[{"role": "x", "content": "y"}]), 400, "messages"),
    ("no messages", chat(messages=[]), 400, "messages"),
    ("a picture", chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages"),
    ("too long a prompt", message(b"ab " * 200_000), 400, None),
    ("a token too large", chat(stop_token_ids=[4096]), 400, None),
    ("a bias of no token", chat(logit_bias={"x": 1}), 400, "logit_bias"),
    ("a fraction of a token", chat(max_tokens=1.5), 400, "max_tokens"),
    ("a wrong schema", chat(response_format=SCHEMA), 400, "response_format"),
    ("no such tool", chat(tool_choice="required"), 400, "tool_choice"),
    ("top_logprobs alone", chat(top_logprobs=2), 400, "top_logprobs"),
    ("stream_options alone", chat(stream_options={}), 400, "stream_options"),
    ("oversize", message(b"a" * (5 * 2**20)), 413, None),
]


def test_bodies() -> None:
    async def main() -> None:
        async with serving() as client:
            for name, body, status, param in BODIES:
                exchange = client.send(CHAT, body, method="POST")
                error = (await exchange.json())["error"]
                assert exchange.status == status, (name, error)
                assert set(error) == {"message", "type", "param", "code"} and error["message"]
                assert error["param"] == param, (name, error)
                assert client.service.admission.inside == 0

    run(main)


@pytest.mark.parametrize(
    ("path", "part", "kind"),
    [
        (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ("/v1/messages", {"type": "document", "source": {"type": "text", "data": "a"}}, "document"),
        (
            "/v1/messages",
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document", "source": {}}]},
            "document",
        ),
        ("/v1/responses", {"type": "input_file", "file_id": "a"}, "input_file"),
    ],
)
def test_what_is_not_text_is_refused_by_its_name(path: str, part: dict[str, Any], kind: str) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]

    async def main() -> None:
        async with serving() as client:
            field = "input" if path == "/v1/responses" else "messages"
            body = {field: said} if path == "/v1/responses" else {field: said, "max_tokens": 2}
            exchange = client.send(path, body)
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and f"takes text and images here, not {kind!r}" in error["message"]

    run(main)


def test_a_body_longer_than_it_says_is_cut_off() -> None:
    async def main() -> None:
        async with serving(body=100) as client:
            exchange = client.send(TEXT, b'{"prompt":"' + b"a" * 200 + b'"}', content_length="20")
            assert (await exchange.json())["error"]["message"]
            assert exchange.status == 413

    run(main)


def test_paths_methods_and_types() -> None:
    async def main() -> None:
        async with serving() as client:
            for exchange, status in [
                (client.send("/v1/nothing"), 404),
                (client.send(CHAT), 405),
                (client.send(CHAT, chat(), content_type="text/plain"), 400),
            ]:
                assert (await exchange.json())["error"]["type"]
                assert exchange.status == status
            form = {"content_type": "application/x-www-form-urlencoded; charset=utf-8"}  # curl -d
            assert (await client.send(CHAT, chat(max_tokens=2), **form).json())["choices"]
            page = client.send(CHAT, chat(max_tokens=2), **form, origin="http://other.example")
            assert (await page.json())["error"]["code"] == "invalid_json" and page.status == 400
            anthropic = await client.send("/v1/messages", {"messages": STORY}).json()
            assert anthropic["type"] == "error"
            assert anthropic["error"]["type"] == "invalid_request_error"

    run(main)


def test_keys() -> None:
    async def main() -> None:
        async with serving(keys=("first", "second")) as client:
            for headers, status in [
                ({}, 401),
                ({"authorization": "Bearer wrong"}, 401),
                ({"authorization": "Basic first"}, 401),
                ({"authorization": "Bearer firs"}, 401),
                ({"x_api_key": ""}, 401),
                ({"authorization": "Bearer first"}, 200),
                ({"authorization": "bearer second"}, 200),
                ({"x_api_key": "second"}, 200),
            ]:
                exchange = client.send(CHAT, chat(), **headers)
                found = await exchange.json()
                assert exchange.status == status, headers
                assert status == 200 or found["error"]["code"] == "invalid_api_key"
            assert (await client.get("/health"))["status"] == "ok"
            assert "error" in await client.get("/metrics")

    run(main)


def test_keys_share_neither_cached_prompts_nor_what_drafters_remember() -> None:
    async def main() -> None:
        salts, memories = [], []
        async with serving(keys=("first", "second")) as client:
            add = client.service.engine.add

            async def seen(prompt: Any, params: Any, **more: Any) -> Any:
                salts.append(more["salt"])
                memories.append(params.drafts.memory)
                return await add(prompt, params, **more)

            client.service.engine.add = seen  # type: ignore[method-assign]
            for key in ("first", "second", "first"):
                await client.send(CHAT, chat(), x_api_key=key).json()
            await client.send(CHAT, chat(cache_salt="own"), x_api_key="first").json()
            await client.send(CHAT, chat(speculation={"memory": "off"}), x_api_key="first").json()
        assert memories == [*salts[:4], "off"]
        salts.pop()
        assert salts[0] == salts[2] and len(set(salts)) == 3
        assert not any("first" in salt for salt in salts)

    run(main)


def test_the_default_drafter_keeps_nothing_of_a_request_for_the_next() -> None:
    async def steps(drafter: str) -> list[int]:
        async with serving(drafter) as client:
            asked = {"max_tokens": 60, "speculation_metrics": True}
            found = [await client.chat(**asked).json() for _ in range(2)]
        return [one["metrics"]["speculative_decoding"]["num_spec_steps"] for one in found]

    first, second = run(lambda: steps(DEFAULT_DRAFTER))
    assert first == second
    remembering = run(lambda: steps("suffix"))  # which has to be asked for
    assert remembering[1] < remembering[0] == first


def test_pages_of_other_origins_may_ask_only_where_that_was_asked_for() -> None:
    async def main() -> None:
        page = {"origin": "https://a.example"}
        preflight = {**page, "access-control-request-method": "POST"}
        for origins, allowed in [((), None), (("https://a.example",), "https://a.example")]:
            transport = httpx2.ASGITransport(app=make_app(Keys(["key"]), Limits(body=100), origins))
            async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as http:
                asked = await http.options(CHAT, headers=preflight)
                assert asked.headers.get("access-control-allow-origin") == allowed
                assert (asked.status_code == 200) == (allowed is not None)
                found = await http.get("/health", headers=page)
                assert found.status_code == 200
                assert found.headers.get("access-control-allow-origin") == allowed

    run(main)


def test_a_span_of_each_request_where_a_tracer_is_given() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def main() -> None:
        app = make_app(Keys(["key"]), Limits(body=100), tracer=provider.get_tracer("test"))
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://testserver"
        ) as http:
            await http.get("/health", headers={"traceparent": parent, "x-request-id": "mine"})
            await http.post(CHAT, json=HI)

    run(main)
    first, second = spans.get_finished_spans()
    assert first.name == "GET /health" and first.attributes is not None and first.parent is not None
    assert first.attributes["outpace.request_id"] == "mine" and first.end_time and first.start_time
    assert first.end_time >= first.start_time
    assert f"{first.context.trace_id:032x}" in parent and f"{first.parent.span_id:016x}" in parent
    assert second.attributes is not None and second.attributes["http.response.status_code"] == 401


def test_spans_reach_a_collector_over_http() -> None:
    """A collector of OTLP over HTTP in this process gets what the option's exporter sends."""
    got = list[tuple[str, ExportTraceServiceRequest]]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    provider = provider_to(f"http://127.0.0.1:{collector.server_port}/v1/traces")

    async def main() -> None:
        app = make_app(Keys(["key"]), Limits(body=100), tracer=provider.get_tracer("test"))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as http:
            await http.get("/health", headers={"x-api-key": "secret"})

    run(main)
    provider.shutdown()
    collector.shutdown()
    collector.server_close()
    ((path, sent),) = got
    (resource,) = sent.resource_spans
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces" and span.name == "GET /health"
    assert any(one.value.string_value == "outpace" for one in resource.resource.attributes)
    assert {one.key for one in span.attributes} >= {"url.path", "http.response.status_code"}
    assert "secret" not in str(sent)


def test_request_ids_and_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(keys=("secret",)) as client:
            exchange = client.send(CHAT, chat(), x_request_id="mine-1", x_api_key="secret")
            await exchange.json()
            assert exchange.headers["x-request-id"] == "mine-1"
            exchange = client.send(CHAT, chat(), x_request_id="no\tgood")
            await exchange.json()
            assert exchange.headers["x-request-id"] not in ("no\tgood", "")

    with caplog.at_level("INFO", "outpace.access"):
        run(main)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "outpace.access"]
    assert [(line["status"], line["path"]) for line in lines] == [(200, CHAT), (401, CHAT)]
    assert lines[0]["id"] == "mine-1" and "secret" not in caplog.text


def test_metrics_have_vllms_names() -> None:
    async def main() -> None:
        async with serving() as client:
            await client.chat(max_tokens=30, ignore_eos=True).json()
            text = await client.send("/metrics").text()
            for name, value in [
                ("num_requests_running", 0.0),
                ("num_requests_waiting", 0.0),
                ("generation_tokens_total", 30.0),
                ("time_to_first_token_seconds_count", 1.0),
                ("inter_token_latency_seconds_count", None),
                ("e2e_request_latency_seconds_count", 1.0),
                ("request_queue_time_seconds_count", 1.0),
                ("prefix_cache_queries_total", None),
                ("kv_cache_usage_perc", None),
            ]:
                line = next(one for one in text.splitlines() if one.startswith(f"outpace:{name}{{"))
                assert value is None or line.endswith(f" {value}"), line
            assert "_created" not in text
            name = "outpace:spec_decode_num_draft_tokens_total"
            drafted = next(one for one in text.splitlines() if one.startswith(name))
            assert 'drafter="prompt_lookup"' in drafted and not drafted.endswith(" 0.0")

    run(main)


def test_the_dashboard_asks_for_series_that_there_are() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text("utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"outpace:\w+", target["expr"])
    }

    async def main() -> None:
        async with serving(running=1, waiting=0) as client:
            await client.chat(max_tokens=30, ignore_eos=True).json()
            CLIENT.set(client.address)  # another's ticket would leave it a share
            ticket = client.service.admit(1)
            assert "error" in await client.chat().json()  # one that is refused
            ticket.close()
            text = await client.send("/metrics").text()
            assert asked <= set(re.findall(r"^outpace:\w+", text, re.MULTILINE))

    run(main)
    assert len(asked) > 12


def test_metrics_while_one_runs() -> None:
    async def main() -> None:
        async with serving(running=1) as client:
            with client.paced():
                first = client.send(CHAT, LONG)
                await first.chunk()
                second = client.send(CHAT, LONG)
                waiting = 'outpace:num_requests_waiting{model_name="nano"} 1.0'
                while waiting not in (text := await client.send("/metrics").text()):
                    await asyncio.sleep(0.01)  # the second is being tokenised
                assert 'outpace:num_requests_running{model_name="nano"} 1.0' in text
                for exchange in (first, second):
                    exchange.leave()
            await client.empty()

    run(main)
