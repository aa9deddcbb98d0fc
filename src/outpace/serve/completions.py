"""``/v1/completions``: texts or token ids to the one request, events to chunks of text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from typing import Any

from starlette.responses import Response

from outpace.core import TokenLogprobs
from outpace.serve import wire
from outpace.serve.ask import Ask, openai_params
from outpace.serve.errors import Refused
from outpace.serve.service import Event, Run, Service
from outpace.serve.shapes import (
    FINISH,
    Stream,
    Words,
    answer,
    entries_of,
    event,
    extras,
    finite,
    logprobs_of,
    new_id,
    usage,
)

_MAX_TOKENS = 16  # OpenAI's default


async def completions(service: Service, body: wire.Completions, salt: str | None) -> Response:
    """Answer a request to complete texts."""
    run = await service.start(len(_prompts(body)) * (body.n or 1), lambda: _ask(service, body, salt))
    writer = _Writer(service, body, run)
    if body.stream:
        return Stream(run, writer.chunks())
    await run.finish()
    return answer(writer.whole())


def _prompts(body: wire.Completions) -> Seq[str | list[int]]:
    """The prompts, each a text or a list of token ids.

    Raises:
        Refused: there is none.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refused(400, "prompt is empty: give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _ask(service: Service, body: wire.Completions, salt: str | None) -> Ask:
    if body.suffix:
        raise Refused(400, "suffix is not supported; leave it out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refused(400, "best_of is not supported; leave it out, or give what n is", "best_of")
    if body.echo and body.logprobs is not None:
        raise Refused(400, "echo with logprobs is not supported; leave one out", "echo")
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "stream_options needs stream: true", "stream_options")
    if body.trace and not body.stream:
        raise Refused(400, "trace needs stream: true", "trace")
    prompts = [
        service.tokens(one) if isinstance(one, str) else service.check_tokens(one) for one in _prompts(body)
    ]
    if not all(prompts):
        raise Refused(400, "the prompt is empty: it has no tokens", "prompt")
    room = service.defaults.room(prompts, _MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    return Ask(
        prompts,
        openai_params(body, service.defaults, room, body.logprobs),
        body.n or 1,
        min_tokens=body.min_tokens,
        salt=None if salt is None and body.cache_salt is None else f"{salt}:{body.cache_salt}",
        trace=body.trace,
    )


class _Writer:
    """Writes the events of one run as OpenAI's completions do."""

    def __init__(self, service: Service, body: wire.Completions, run: Run) -> None:
        self._body, self._run = body, run
        self._words = Words(service)
        self._prompts = _prompts(body)
        self._decode = service.model.tokenizer.decode
        self._emitted = 0
        self._offsets = dict[int, int]()
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(service.now()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def _echo(self, index: int) -> str:
        """The prompt's text, where it is asked for."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._run.ask.n]
        return prompt if isinstance(prompt, str) else str(self._decode(prompt))

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, one in enumerate(self._run.generations):
            choice: dict[str, Any] = {
                "index": index,
                "text": self._echo(index) + (one.text or ""),
                "logprobs": None,
                "finish_reason": FINISH[one.finish_reason],
            }
            if self._body.logprobs is not None:
                choice["logprobs"] = self._logprobs(index, entries_of(one))
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._run.ask.prompts[index // self._run.ask.n]
                choice["token_ids"] = one.tokens
            choices.append(choice)
        found = self._head | {"choices": choices, "usage": usage(self._run, self._run.generations)}
        return found | self._extras()

    def _extras(self) -> dict[str, Any]:
        body = self._body
        return extras(self._run, self._run.generations, body.speculation_metrics, body.speculation)

    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """OpenAI's older shape: lists side by side, and the alternatives by their text."""
        words, wanted = self._words, self._body.logprobs or 0
        texts, offsets = [words.text(token) for token, _ in entries], []
        for text in texts:
            offset = self._offsets.get(index, 0)
            offsets.append(offset)
            self._offsets[index] = offset + len(text)
        top = []
        for (_, one), text in zip(entries, texts, strict=True):
            best = {words.text(other): finite(value) for other, value in list(one.top.items())[:wanted]}
            top.append(best | {text: finite(one.logprob)})
        return {
            "tokens": texts,
            "token_logprobs": [finite(one.logprob) for _, one in entries],
            "top_logprobs": top if wanted else None,
            "text_offset": offsets,
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        options = self._body.stream_options
        if self._body.echo:
            for index in range(len(self._run.choices)):
                yield self._chunk([_piece(index, self._echo(index))])
        async for one in self._run.events():
            self._emitted += len(one.tokens)
            for choice in self._pieces(one):
                yield self._chunk([choice])
        more = self._extras()
        if options is not None and options.include_usage:
            more["usage"] = usage(self._run, self._run.generations)
        if more:
            yield self._chunk([], **more)
        yield event(b"[DONE]")

    def _pieces(self, one: Event) -> list[dict[str, Any]]:
        """Chunks of an event: what it adds to its choice, then the finish by itself."""
        found = []
        ids, logprobs = self._body.return_token_ids, self._body.logprobs is not None
        trace = self._run.choices[one.index].trace
        if one.text or (one.tokens and (ids or logprobs or trace)):
            choice = _piece(one.index, one.text)
            if logprobs:
                choice["logprobs"] = self._logprobs(one.index, logprobs_of(one.tokens))
            if ids:
                choice["token_ids"] = [token.token for token in one.tokens]
            if trace is not None:
                choice["trace"] = trace.take(one.tokens, self._words.text)
            found.append(choice)
        if one.end is not None:
            found.append(_piece(one.index, "") | {"finish_reason": FINISH[one.end.finish_reason]})
        return found

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        options = self._body.stream_options
        chunk = self._head | {"choices": choices}
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage(self._run, self._run.generations, self._emitted)
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return event(chunk | more)


def _piece(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
