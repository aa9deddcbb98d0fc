"""``POST /v1/completions``: its body, parsed to a request, and its response, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from outpace.core import TokenLogprobs
from outpace.serve.constraints import Constrained, constraint_of
from outpace.serve.errors import Refused, refusal
from outpace.serve.fields import Int, OpenAI, Tokens
from outpace.serve.formats import ending, finite
from outpace.serve.request import ParsedRequest, check_stream, openai_params, salted
from outpace.serve.run import Event, Run
from outpace.serve.service import Service
from outpace.serve.totals import CLIENT
from outpace.serve.writers import ChunkWriter, entries_of

_TEXTS = 1024  # prompts of a request
_SCORED = 2**20  # log probabilities of prompts that a response has, of about 100 bytes each
_MAX_TOKENS = 16  # OpenAI's default


def _kind_of_prompt(prompt: Any) -> str:
    """The kind of a prompt by its first element, so that one kind alone is tried."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=_TEXTS, fail_fast=True), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(max_length=_TEXTS, fail_fast=True), Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class Completions(OpenAI, Constrained):
    """``POST /v1/completions``."""

    prompt: Prompt | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: Annotated[Int, Field(ge=1)] | None = None
    suffix: str | None = None


async def completions(service: Service, body: Completions, salt: str | None) -> Response:
    run = await service.start(len(_prompts(service, body)) * body.n, lambda: _parse(service, body, salt))
    try:
        scores = await _scores(service, body, run)
    except BaseException as error:
        run.close()
        if isinstance(error, Exception):
            raise refusal(error) from error
        raise
    return await _CompletionsWriter(service, body, run, scores).response()


async def _scores(service: Service, body: Completions, run: Run) -> list[list[TokenLogprobs]]:
    """Log probabilities of each prompt's tokens after the first, if the prompt is echoed with them."""
    if not body.echo or body.logprobs is None:
        return []
    score, client = service.engine.score, CLIENT.get()
    return [await score(prompt, body.logprobs, client) for prompt in run.request.prompts]


def _prompts(service: Service, body: Completions) -> Seq[str | list[int]]:
    prompt = body.prompt
    if prompt is None and body.suffix:
        return [""]
    if prompt is None:  # as at the beginning of a document
        return [service.prompts.beginning()]
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refused(400, "prompt is empty: give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


async def _parse(service: Service, body: Completions, salt: str | None) -> ParsedRequest:
    if body.suffix and body.echo:
        raise Refused(400, "echo is not done with a suffix; leave it out", "echo")
    if body.best_of is not None and body.best_of != body.n:
        raise Refused(400, "best_of is not supported; leave it out, or make it equal to n", "best_of")
    check_stream(body)
    prompts = [await _tokens(service, one, body.suffix) for one in _prompts(service, body)]
    _check_scored(body, prompts)
    if not all(prompts):
        raise Refused(400, "the prompt is empty: it has no tokens", "prompt")
    most = service.defaults.most_tokens(prompts, _MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    schema, constrained = constraint_of(body, body.min_tokens)
    params = openai_params(body, service.defaults, most, body.logprobs)
    if body.suffix and not body.ignore_eos:
        params = replace(params, stop_token_ids=[*params.stop_token_ids, *service.prompts.middle().ends])
    return ParsedRequest(
        prompts,
        params,
        body.n,
        schema,
        salt=salted(salt, body),
        trace=body.trace,
        constrained=constrained,
    )


async def _tokens(service: Service, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Token ids of a prompt; before a suffix, of the request for what is between the two."""
    if not isinstance(prompt, str):
        service.prompts.check_tokens(prompt)
    if suffix:
        return await service.prompts.infill(prompt, suffix)
    return await service.prompts.tokens(prompt) if isinstance(prompt, str) else prompt


def _check_scored(body: Completions, prompts: Seq[Seq[int]]) -> None:
    """Refuse to keep the log probabilities of very many tokens, which a few bytes can ask for."""
    if not body.echo or body.logprobs is None:
        return
    count = sum(map(len, prompts)) * (1 + body.logprobs)
    if count > _SCORED:
        raise Refused(
            400,
            f"the prompts have {count} log probabilities, and the maximum is {_SCORED}: send fewer prompts, "
            "or lower logprobs",
            "logprobs",
        )


class _CompletionsWriter(ChunkWriter[Completions]):
    """Writer of the events of one run in the format of OpenAI's completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, service: Service, body: Completions, run: Run, scores: Seq[Seq[TokenLogprobs]]
    ) -> None:
        super().__init__(service, body, run)
        self._scores = scores
        self._prompts = _prompts(service, body)
        self._decode = service.model.tokenizer.decode
        self._offsets = dict[int, int]()
        self._begun = set[int]()

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._run.request.n]
        return prompt if isinstance(prompt, str) else str(self._decode(prompt))

    def _complete(self) -> dict[str, Any]:
        return {"choices": self._wholes()}

    def _wholes(self) -> Iterator[dict[str, Any]]:
        for index, end in enumerate(self._run.generations):
            choice = _piece(index, self._echo(index) + (end.text or ""), ending(end).chat)
            if self._body.logprobs is not None:
                choice["logprobs"] = self._written_logprobs(index, [*self._echoed(index), *entries_of(end)])
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._run.request.prompts[index // self._run.request.n]
                choice["token_ids"] = end.tokens
            yield choice

    def _echoed(self, index: int) -> list[tuple[int, TokenLogprobs | None]]:
        """The tokens of an echoed prompt and their log probabilities, of which the first token has none."""
        if not self._scores:
            return []
        prompt = index // self._run.request.n
        return list(zip(self._run.request.prompts[prompt], [None, *self._scores[prompt]], strict=True))

    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """Log probabilities in OpenAI's older format: parallel lists, and the alternatives by their text."""
        token_texts, wanted = self._texts, self._body.logprobs or 0
        texts, offsets = [token_texts.text(token) for token, _ in entries], []
        for text in texts:
            offset = self._offsets.get(index, 0)
            offsets.append(offset)
            self._offsets[index] = offset + len(text)
        top: list[dict[str, float] | None] = []
        for (_, one), text in zip(entries, texts, strict=True):
            if one is None:
                top.append(None)
                continue
            best = {token_texts.text(other): finite(value) for other, value in list(one.top.items())[:wanted]}
            top.append(best | {text: finite(one.logprob)})
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else finite(one.logprob) for _, one in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _first(self) -> Iterator[dict[str, Any]]:
        if self._body.echo:
            for index in range(len(self._run.choices)):
                piece = _piece(index, self._echo(index)) | self._prompt_ids(index)
                if self._scores:
                    piece["logprobs"] = self._written_logprobs(index, self._echoed(index))
                yield {"choices": [piece]}

    def _choices(self, event: Event) -> Iterator[dict[str, Any]]:
        more = self._details(event, self._body.logprobs is not None)
        if event.text or more or event.end is not None:
            reason = None if event.end is None else ending(event.end).chat
            yield _piece(event.index, event.text, reason) | self._prompt_ids(event.index) | more

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt's token ids in the first chunk of a choice, if requested."""
        if not self._body.return_token_ids or index in self._begun:
            return {}
        self._begun.add(index)
        return {"prompt_token_ids": self._run.request.prompts[index // self._run.request.n]}


def _piece(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
