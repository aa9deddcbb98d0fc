"""``/v1/completions``: conversion of texts or token ids to ``Ask``, and of events to chunks of text."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from starlette.responses import Response

from outpace.core import TokenLogprobs
from outpace.serve import wire
from outpace.serve.ask import Ask, openai_params
from outpace.serve.errors import Refused, refusal
from outpace.serve.runs import Event, Run
from outpace.serve.service import Service
from outpace.serve.shapes import FINISH, entries_of, finite
from outpace.serve.writer import Writer, check, salted

_MAX_TOKENS = 16  # OpenAI's default


async def completions(service: Service, body: wire.Completions, salt: str | None) -> Response:
    """Handle a request for completions."""
    run = await service.start(len(_prompts(service, body)) * (body.n or 1), lambda: _ask(service, body, salt))
    try:
        scores = await _scores(service, body, run)
    except BaseException as error:
        run.close()
        if isinstance(error, Exception):
            raise refusal(error) from error
        raise
    return await _Writer(service, body, run, scores).response()


async def _scores(service: Service, body: wire.Completions, run: Run) -> list[list[TokenLogprobs]]:
    """Log probabilities of each prompt's tokens after the first, if the prompt is echoed with them."""
    if not body.echo or body.logprobs is None:
        return []
    return [await service.engine.score(prompt, body.logprobs) for prompt in run.ask.prompts]


def _prompts(service: Service, body: wire.Completions) -> Seq[str | list[int]]:
    """The prompts, each a text or a list of token ids.

    Raises:
        Refused: there is none.
    """
    prompt = body.prompt
    if prompt is None:  # as at the beginning of a document
        return [service.beginning()]
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refused(400, "prompt is empty: give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


async def _ask(service: Service, body: wire.Completions, salt: str | None) -> Ask:
    if body.suffix:
        raise Refused(400, "suffix is not supported; leave it out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refused(400, "best_of is not supported; leave it out, or make it equal to n", "best_of")
    check(body)
    prompts = [
        await service.tokens(one) if isinstance(one, str) else service.check_tokens(one)
        for one in _prompts(service, body)
    ]
    if not all(prompts):
        raise Refused(400, "the prompt is empty: it has no tokens", "prompt")
    room = service.defaults.room(prompts, _MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    return Ask(
        prompts,
        openai_params(body, service.defaults, room, body.logprobs),
        body.n or 1,
        salt=salted(salt, body),
        trace=body.trace,
    )


class _Writer(Writer):
    """Writer of the events of one run in the format of OpenAI's completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, service: Service, body: wire.Completions, run: Run, scores: Seq[Seq[TokenLogprobs]]
    ) -> None:
        super().__init__(service, body, run)
        self._body, self._scores = body, scores
        self._prompts = _prompts(service, body)
        self._decode = service.model.tokenizer.decode
        self._offsets = dict[int, int]()
        self._begun = set[int]()

    def _echo(self, index: int) -> str:
        """The prompt's text, if requested."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._run.ask.n]
        return prompt if isinstance(prompt, str) else str(self._decode(prompt))

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, one in enumerate(self._run.generations):
            choice = _piece(index, self._echo(index) + (one.text or ""), FINISH[one.finish_reason])
            if self._body.logprobs is not None:
                choice["logprobs"] = self._logprobs(index, [*self._echoed(index), *entries_of(one)])
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._run.ask.prompts[index // self._run.ask.n]
                choice["token_ids"] = one.tokens
            choices.append(choice)
        return {"choices": choices}

    def _echoed(self, index: int) -> list[tuple[int, TokenLogprobs | None]]:
        """The tokens of an echoed prompt and their log probabilities, of which the first token has none."""
        if not self._scores:
            return []
        place = index // self._run.ask.n
        return list(zip(self._run.ask.prompts[place], [None, *self._scores[place]], strict=True))

    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """Log probabilities in OpenAI's older format: parallel lists, and the alternatives by their text."""
        words, wanted = self._words, self._body.logprobs or 0
        texts, offsets = [words.text(token) for token, _ in entries], []
        for text in texts:
            offset = self._offsets.get(index, 0)
            offsets.append(offset)
            self._offsets[index] = offset + len(text)
        top: list[dict[str, float] | None] = []
        for (_, one), text in zip(entries, texts, strict=True):
            if one is None:
                top.append(None)
                continue
            best = {words.text(other): finite(value) for other, value in list(one.top.items())[:wanted]}
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
                    piece["logprobs"] = self._logprobs(index, self._echoed(index))
                yield {"choices": [piece]}

    def _choices(self, one: Event) -> Iterator[dict[str, Any]]:
        more = self._details(one, self._body.logprobs is not None)
        if one.text or more or one.end is not None:
            reason = None if one.end is None else FINISH[one.end.finish_reason]
            yield _piece(one.index, one.text, reason) | self._prompt_ids(one.index) | more

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt's token ids in the first chunk of a choice, if requested."""
        if not self._body.return_token_ids or index in self._begun:
            return {}
        self._begun.add(index)
        return {"prompt_token_ids": self._run.ask.prompts[index // self._run.ask.n]}


def _piece(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
