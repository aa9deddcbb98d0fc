"""Prompts as token ids: short texts are read in a thread, all others in worker processes."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from outpace.core import first_line
from outpace.loading import Loaded
from outpace.serve.errors import NotStarted, Refused
from outpace.serve.fim import Middle
from outpace.serve.images import Images
from outpace.serve.pool import JobLimit, WorkerPool
from outpace.serve.totals import Turns
from outpace.serve.worker import read_job, read_text, with_arguments

_SHORT = 2**16  # characters of a text, or of a conversation in JSON
_FEW = 256  # messages of a conversation, of which a template may compare each with each
Read = TypeVar("Read", str, list[int])
_log = logging.getLogger("outpace.serve")


class Texts:
    """Reader of texts and conversations with a model's tokenizer and template.

    A tokenizer that cannot be sent to a process reads long texts in two threads of its own, which nothing
    ends: some of remote code.
    """

    def __init__(self, model: Loaded, share: JobLimit, turns: Turns) -> None:
        self._model = model
        load = partial(pickle.dumps, model.tokenizer)
        self.pool = WorkerPool("texts", share, turns, "reading the text", None, load, 1)
        self._threads: ThreadPoolExecutor | None = None

    async def tokens(self, text: str, special: bool, most: int | None) -> list[int] | int:
        """Token ids of a text.

        Args:
            special: add the special tokens that begin or end a text.
            most: maximum number of characters; the number of a longer text is returned instead.

        Raises:
            OutpaceError: it contains an unpaired surrogate. Refused: it takes too long.
        """
        return await self._read({"text": text, "special": special, "most": most})

    async def unmarked(
        self, text: str, marks: Mapping[str, int], begins: bool, most: int | None
    ) -> list[int] | int:
        """Token ids of a text in which nothing becomes a mark, as ``unmarked_ids`` reads it."""
        return await self._read({"text": text, "marks": marks, "begins": begins, "most": most})

    async def _read(self, job: dict[str, Any]) -> list[int] | int:
        size, most = len(job["text"]), job["most"]
        if most is not None and size > most:
            return size
        found: list[int] | int
        if size <= _SHORT:
            found = await asyncio.to_thread(read_text, self._model.tokenizer, job)
        else:
            found = await self._far(job)
        return found

    async def conversation(
        self, messages: Seq[dict[str, Any]], options: dict[str, Any], most: int | None
    ) -> list[int] | int:
        """Token ids of a conversation in the model's template; the arguments are those of ``tokens``.

        Raises:
            OutpaceError: the template rejects it. Refused: it takes too long.
        """
        text = await self._short(messages, options)
        if text is not None:
            return await self.tokens(text, False, most)
        found: list[int] | int = await self._far(self._job(messages, options, most))
        return found

    async def rendered(
        self, messages: Seq[dict[str, Any]], options: dict[str, Any], most: int | None
    ) -> str | int:
        """A conversation as a text; arguments and errors are those of ``conversation``."""
        text = await self._short(messages, options)
        if text is not None:
            return text
        found: str | int = await self._far({**self._job(messages, options, most), "text_alone": True})
        return found

    async def _short(self, messages: Seq[dict[str, Any]], options: dict[str, Any]) -> str | None:
        """A short conversation as a text; None for one that a worker reads."""
        if len(messages) <= _FEW and all(_is_plain(option) for option in options.values()):
            said = await asyncio.to_thread(json.dumps, [messages, options])
            if len(said) <= _SHORT:
                return await asyncio.to_thread(self._rendered, messages, options)
        return None

    def _job(
        self, messages: Seq[dict[str, Any]], options: dict[str, Any], most: int | None
    ) -> dict[str, Any]:
        return {"name": self._model.name, "messages": messages, "options": options, "most": most}

    async def _far(self, job: dict[str, Any]) -> Any:
        if self._threads is None:
            try:
                return await self.pool.run(await asyncio.to_thread(_bytes, job))
            except NotStarted as error:
                _log.warning("long texts are read in threads, without limits: %s", first_line(error))
                self._threads = ThreadPoolExecutor(2, "outpace-texts")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._near, job)

    def _near(self, job: dict[str, Any]) -> list[int] | str | int:
        """The answer of a worker to a job."""
        answer: list[int] | str | int = read_job(self._model.tokenizer, job)
        return answer

    def _rendered(self, messages: Seq[dict[str, Any]], options: dict[str, Any]) -> str:
        return self._model.render(with_arguments(messages), **options)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


@dataclass(frozen=True)
class Prompt:
    """A conversation as token ids, places of images included.

    Attributes:
        source: what the model's processor made of the images; None if there are none.
    """

    tokens: list[int]
    source: Mapping[str, Any] | None = None


class Prompts:
    """Prompts of requests as token ids, within the model's context and vocabulary.

    Args:
        texts, images: read them.
        name: the model's name in errors.
    """

    def __init__(self, model: Loaded, texts: Texts, images: Images, name: str) -> None:
        self._model, self._texts, self._images, self._name = model, texts, images, name
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

    @cached_property
    def fills(self) -> Middle | None:
        """The tokenizer's marks for filling in the middle; None if it has none."""
        return Middle.of(self._model.tokenizer, self._model.tokens(""))

    def middle(self) -> Middle:
        """Those marks.

        Raises:
            Refused: there are none.
        """
        if self.fills is None:
            told = f"the tokenizer of {self._name} has no marks for filling in the middle; leave suffix out"
            raise Refused(400, told, "suffix")
        return self.fills

    async def infill(
        self, prefix: str | Seq[int], suffix: str, files: Seq[tuple[str, str]] = ()
    ) -> list[int]:
        """Token ids of the prompt for what is between two texts; arguments are those of ``Middle.prompt``.

        Raises:
            Refused: the tokenizer has no marks for it, or as ``tokens``.
        """

        async def read(text: str, begins: bool) -> list[int]:
            return self._fitting(await self._texts.unmarked(text, middle.marks, begins, self._characters))

        middle = self.middle()
        return await middle.prompt(read, prefix, suffix, files)

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

    async def conversation(self, messages: Seq[dict[str, Any]], **options: Any) -> Prompt:
        """A conversation in the model's chat template, up to the beginning of the answer.

        Args:
            messages: whose contents are texts or, with images, lists of parts: ``{"type": "text", "text"}``,
                ``{"type": "image", "image"}`` with the image in base64.

        Raises:
            Refused: there is no template or no message, or it rejects the messages, or they are too long, or
                an image cannot be read.
        """
        if not messages:
            raise Refused(400, "the conversation is empty; send a message of the user", "messages")
        if not self._model.has_template:
            raise Refused(400, f"{self._name} has no chat template; use /v1/completions", "messages")
        turns, images = self._images.check(messages)
        if not images:
            return Prompt(self._fitting(await self._texts.conversation(turns, options, self._characters)))
        text = self._fitting(await self._texts.rendered(turns, options, self._characters))
        return Prompt(*await self._images.prompt(text, images))

    def check_tokens(self, tokens: Seq[int]) -> list[int]:
        """Check token ids sent by a client.

        Raises:
            Refused: one is outside the model's vocabulary.
        """
        most = self._model.target.vocabulary
        if any(token >= most for token in tokens):
            raise Refused(400, f"token ids are below {most}", "prompt")
        return list(tokens)

    def _fitting(self, tokens: Read | int) -> Read:
        """What was read, unless it is the length of a text that cannot fit."""
        if not isinstance(tokens, int):
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
