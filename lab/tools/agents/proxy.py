"""A proxy between an agent and a server: it forces a call in the first request, and times each answer.

A tiny model has no wish to call anything: the first request of a conversation must call one tool, with
arguments that the proxy puts into the tool's schema, so that the call is made by the server's grammar.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = "It says what a file says to one who reads it, and there is nothing else to be done."
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
_SHOWN = "tools", "system", "instructions", "messages", "input"  # what a prompt is made of, in its order
_PASSED = ("authorization", "x-api-key", "anthropic-version", "anthropic-beta", "content-type", "accept")


@dataclass
class Turn:
    """One request of an agent and its answer.

    Attributes:
        first: seconds to the first byte after the head that carries text or a call.
        prompt, cached, emitted: tokens.
        left_out: tools that the server left out of the prompt.
        alike: share of the request's characters with which an earlier one begins, too.
    """

    path: str
    forced: str | None
    tools: int
    status: int = 0
    first: float | None = None
    prompt: int = 0
    cached: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    called: bool = False
    left_out: str = ""
    alike: float = 0.0
    error: str = ""


@dataclass
class Proxy:
    """Proxy to a server on this machine.

    Args:
        port: the server's port.
        force: the tool to call in the first request that has it, and its arguments.
        limit: maximum number of tokens of an answer.
        drafter: the drafter of all requests; None for the server's.
        keep: a folder for the requests as they are passed on.
    """

    port: int
    force: tuple[str, dict[str, Any]] | None
    limit: int = 48
    drafter: str | None = None
    keep: Path | None = None
    turns: list[Turn] = field(default_factory=list)
    _forced: bool = False
    _shown: list[str] = field(default_factory=list)

    def __enter__(self) -> int:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return int(self._server.server_address[1])

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def changed(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Turn]:
        """A request as it is passed on, and where its answer is noted."""
        turn = Turn(path, None, len(body.get("tools") or ()))
        if self.force is not None and turn.tools and _known(path, body, *self.force) and not self._forced:
            turn.forced, self._forced = self.force[0], True
            body["tool_choice"] = _choice(path, self.force[0])
        else:  # an answer that is cut off is a failure to some, and others go on with it
            _answer(path, body)
        limit = next((one for one in ("max_completion_tokens", LIMITS[path]) if one in body), LIMITS[path])
        body[limit] = self.limit if turn.forced is None else 4 * self.limit
        body["speculation_metrics"] = True
        if self.drafter is not None:
            body["speculation"] = self.drafter
        if body.get("stream") and path == "/v1/chat/completions":
            body["stream_options"] = {"include_usage": True}
        shown = json.dumps([body.get(name) for name in _SHOWN])
        turn.alike = max((_alike(shown, one) for one in self._shown), default=0) / len(shown)
        self._shown.append(shown)
        self.turns.append(turn)
        if self.keep is not None:
            name = f"{len(self.turns):02}{path.replace('/', '-')}.json"
            (self.keep / name).write_text(json.dumps(body, indent=1), "utf-8")
        return body, turn


def _alike(first: str, second: str) -> int:
    """The number of characters with which both texts begin."""
    both = min(len(first), len(second))
    return next((place for place in range(both) if first[place] != second[place]), both)


def _known(path: str, body: dict[str, Any], name: str, arguments: dict[str, Any]) -> bool:
    """Give a tool a schema of these arguments alone; true if it is there.

    It has the schema in all requests, so that their prompts begin alike.
    """
    for tool in body["tools"]:
        function = tool.get("function", tool)
        if function.get("name") == name:
            function["input_schema" if path == "/v1/messages" else "parameters"] = {
                "type": "object",
                "properties": {key: {"const": value} for key, value in arguments.items()},
                "required": list(arguments),
            }
            return True
    return False


def _answer(path: str, body: dict[str, Any]) -> None:
    """Make the answer to a request ``ANSWER``, by its schema."""
    schema = {"const": ANSWER}
    if path == "/v1/messages":
        config = {"format": {"type": "json_schema", "schema": schema}}
        body["output_config"] = {**(body.get("output_config") or {}), **config}
    elif path == "/v1/responses":
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _choice(path: str, name: str) -> dict[str, Any]:
    """The ``tool_choice`` of an API that names a tool."""
    if path == "/v1/messages":
        return {"type": "tool", "name": name}
    return {
        "type": "function",
        **({"name": name} if path == "/v1/responses" else {"function": {"name": name}}),
    }


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *given: object) -> None:
        """Say nothing of each request."""

    def do_GET(self) -> None:
        self._pass(None, None)

    def do_HEAD(self) -> None:
        self._pass(None, None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if path not in LIMITS:
            self._pass(data, None)
            return
        body, turn = self.proxy.changed(path, json.loads(data))
        self._pass(json.dumps(body).encode(), turn)

    def _pass(self, data: bytes | None, turn: Turn | None) -> None:
        began = time.monotonic()
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=3600)
        headers = {name: value for name, value in self.headers.items() if name.lower() in _PASSED}
        server.request(self.command, self.path, data, headers)
        response = server.getresponse()
        self.send_response(response.status)
        self.send_header("content-type", response.headers.get("content-type", "application/json"))
        self.send_header("connection", "close")
        self.end_headers()
        for line in response:
            self.wfile.write(line)
            self.wfile.flush()
            if turn is not None:
                turn.status = response.status
                turn.left_out = response.headers.get("x-outpace-tools-left-out", "")
                _note(turn, line, time.monotonic() - began)
        server.close()
        self.close_connection = True


def _note(turn: Turn, line: bytes, seconds: float) -> None:
    """Note what a line of an answer says."""
    text = line.strip().removeprefix(b"data: ")
    if turn.status >= 400:
        turn.error += text.decode(errors="replace")
        return
    if not text.startswith(b"{"):
        return
    for one in _objects(json.loads(text)):
        if turn.first is None and _says(one):
            turn.first = seconds
        turn.called = (
            turn.called or bool(one.get("tool_calls")) or one.get("type") in ("tool_use", "function_call")
        )
        usage = one.get("usage")
        if isinstance(usage, dict):
            cached = usage.get("cache_read_input_tokens", 0)
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            turn.prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached)
            turn.cached = details.get("cached_tokens", cached)
            turn.emitted = usage.get("completion_tokens", usage.get("output_tokens", 0))
        metrics = one.get("speculative_decoding")
        if isinstance(metrics, dict):
            turn.drafted, turn.accepted = metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]


def _says(one: dict[str, Any]) -> bool:
    """True if an object of an answer brings text or a part of a call."""
    if str(one.get("type", "")).endswith(("_delta", ".delta")):
        return True
    return bool(one.get("content") or one.get("tool_calls") or one.get("reasoning_content"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)
