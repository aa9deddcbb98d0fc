"""Prompts as token ids: short texts are read in a thread, all others in worker processes."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outpace.core import first_line
from outpace.loading import Loaded
from outpace.serve.errors import NotStarted, Refused
from outpace.serve.pool import Pool, Share
from outpace.serve.worker import with_arguments

_SHORT = 2**16  # characters of a text, or of a conversation in JSON
_FEW = 256  # messages of a conversation, of which a template may compare each with each
_log = logging.getLogger("outpace.serve")


class Texts:
    """Reader of texts and conversations with a model's tokenizer and template.

    A tokenizer that cannot be sent to a process reads long texts in two threads of its own, which nothing
    ends: some of remote code.
    """

    def __init__(self, model: Loaded, share: Share) -> None:
        self._model = model
        self.pool = Pool("texts", share, "reading the text", None, lambda: pickle.dumps(model.tokenizer), 1)
        self._threads: ThreadPoolExecutor | None = None

    async def tokens(self, text: str, special: bool, most: int | None) -> list[int] | int:
        """Token ids of a text.

        Args:
            special: add the special tokens that begin or end a text.
            most: maximum number of characters; the number of a longer text is returned instead.

        Raises:
            OutpaceError: it contains an unpaired surrogate. Refused: it takes too long.
        """
        if most is not None and len(text) > most:
            return len(text)
        read = self._model.tokens if special else self._model.plain_tokens
        if len(text) <= _SHORT:
            return await asyncio.to_thread(read, text)
        return await self._far({"text": text, "special": special, "most": most})

    async def conversation(
        self, messages: Seq[dict[str, Any]], options: dict[str, Any], most: int | None
    ) -> list[int] | int:
        """Token ids of a conversation in the model's template; the arguments are those of ``tokens``.

        Raises:
            OutpaceError: the template rejects it. Refused: it takes too long.
        """
        if len(messages) <= _FEW and all(_is_plain(option) for option in options.values()):
            said = await asyncio.to_thread(json.dumps, [messages, options])
            if len(said) <= _SHORT:
                text = await asyncio.to_thread(self._rendered, messages, options)
                return await self.tokens(text, False, most)
        job = {"name": self._model.name, "messages": messages, "options": options, "most": most}
        return await self._far(job)

    async def _far(self, job: dict[str, Any]) -> list[int] | int:
        if self._threads is None:
            try:
                found: list[int] | int = await self.pool.run(await asyncio.to_thread(_bytes, job))
                return found
            except NotStarted as error:
                _log.warning("long texts are read in threads, without limits: %s", first_line(error))
                self._threads = ThreadPoolExecutor(2, "outpace-texts")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._near, job)

    def _near(self, job: dict[str, Any]) -> list[int] | int:
        """The answer of a worker to a job."""
        text, most = job.get("text"), job["most"]
        if text is None:
            text = self._rendered(job["messages"], job["options"])
        if most is not None and len(text) > most:
            return len(text)
        return self._model.tokens(text) if job.get("special") else self._model.plain_tokens(text)

    def _rendered(self, messages: Seq[dict[str, Any]], options: dict[str, Any]) -> str:
        return self._model.render(with_arguments(messages), **options)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


class Prompts:
    """Prompts of requests as token ids, within the model's context and vocabulary.

    Args:
        texts: reads the texts.
        name: the model's name in errors.
    """

    def __init__(self, model: Loaded, texts: Texts, name: str) -> None:
        self._model, self._texts, self._name = model, texts, name
        self._context = model.target.context
        longest = max(map(len, model.tokenizer.get_vocab()), default=1)  # characters of a token
        # The characters of the longest text that may fit into the context
        self._characters = None if self._context is None else self._context * longest

    async def tokens(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; one that cannot fit into the context is refused before it is tokenised.

        Args:
            special: add the special tokens that begin or end a text.

        Raises:
            Refused: the text is too long, or takes too long. OutpaceError: it contains an unpaired surrogate.
        """
        return self._fitting(await self._texts.tokens(text, special, self._characters))

    def beginning(self) -> list[int]:
        """The prompt for a request without one: the token that begins texts, or the one that ends them.

        Raises:
            Refused: the model has neither.
        """
        tokenizer = self._model.tokenizer
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return [int(token)]
        raise Refused(400, f"{self._name} has no token that begins a text; give a prompt", "prompt")

    async def conversation(self, messages: Seq[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to the beginning of the answer.

        Raises:
            Refused: there is no template, or it rejects the messages, or they are too long.
        """
        if not self._model.has_template:
            raise Refused(400, f"{self._name} has no chat template; use /v1/completions", "messages")
        return self._fitting(await self._texts.conversation(messages, options, self._characters))

    def check_tokens(self, tokens: Seq[int]) -> list[int]:
        """Check token ids sent by a client.

        Raises:
            Refused: one is outside the model's vocabulary.
        """
        most = self._model.target.vocabulary
        if any(token >= most for token in tokens):
            raise Refused(400, f"token ids are below {most}", "prompt")
        return list(tokens)

    def _fitting(self, tokens: list[int] | int) -> list[int]:
        """Token ids, unless there is the length of a text that cannot fit."""
        if isinstance(tokens, list):
            return tokens
        raise Refused(
            400,
            f"this model's maximum context length is {self._context} tokens, and a text of {tokens} "
            "characters has more; shorten it",
            code="context_length_exceeded",
        )


def _bytes(job: dict[str, Any]) -> bytes:
    return json.dumps(job).encode()


def _is_plain(option: Any) -> bool:
    """True for what a template can do little with: no numbers, by which it might count."""
    return option is None or isinstance(option, bool | str) or _are_tools(option)


def _are_tools(option: Any) -> bool:
    return isinstance(option, list) and all(isinstance(one, dict) and "function" in one for one in option)
