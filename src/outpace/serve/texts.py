"""Clients' texts as token ids: short ones in a thread, all others in worker processes."""

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
from outpace.serve.errors import NotStarted
from outpace.serve.pool import Pool, Share

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
                text = await asyncio.to_thread(self._model.render, messages, **options)
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
            text = self._model.render(job["messages"], **job["options"])
        if most is not None and len(text) > most:
            return len(text)
        return self._model.tokens(text) if job.get("special") else self._model.plain_tokens(text)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


def _bytes(job: dict[str, Any]) -> bytes:
    return json.dumps(job).encode()


def _is_plain(option: Any) -> bool:
    """True for what a template can do little with: no numbers, by which it might count."""
    return option is None or isinstance(option, bool | str) or _are_tools(option)


def _are_tools(option: Any) -> bool:
    return isinstance(option, list) and all(isinstance(one, dict) and "function" in one for one in option)
