"""The engine as a service: requests are read, admitted and started, and the server is shut down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from outpace._version import __version__
from outpace.core import OutpaceError
from outpace.drafters.none import NoDraft
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.serve.admission import Admission, Limits, Ticket
from outpace.serve.ask import Ask, Defaults
from outpace.serve.engine import BROUGHT
from outpace.serve.errors import Refused, later, refusal, unreadable
from outpace.serve.grammar import Grammar, Grammars
from outpace.serve.metrics import Metrics
from outpace.serve.pool import Share
from outpace.serve.runs import Choice, Run
from outpace.serve.texts import Texts
from outpace.serve.trace import Trace, Traced

T = TypeVar("T")
_PATIENCE = 0.25  # seconds for which a question about health waits for the engine


class Service:
    """A loaded model behind an ``AsyncEngine``; made in the event loop that it serves.

    Args:
        model: the model, its tokenizer and template.
        engine: an engine made by ``make_engine``.
        names: names of the model in requests; the first one is used in logs and metrics.
        clock: function that returns the time in seconds.
        on_failure: called in the event loop when the engine's thread has died.
    """

    def __init__(
        self,
        model: Loaded,
        engine: Engine,
        limits: Limits,
        names: Seq[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        self.model, self.names = model, tuple(names)
        self.defaults = Defaults.of(model.target)
        self.grammars = Grammars(model.tokenizer, model.target.vocabulary, model.target.eos_token_ids)
        memory = max(2**30, 256 * limits.body)
        self.texts = Texts(model, Share(limits.read, memory, workers=4))
        self._probe: asyncio.Future[None] | None = None
        self._probed = 0.0
        self._working: set[asyncio.Future[Any]] = set()
        self.now = time.time
        self.created = int(self.now())
        self.fingerprint = f"outpace-{__version__}-{model.dtype}"
        self.exactness = exactness(engine)
        self.draining = False
        own = "off" if isinstance(engine.drafter, NoDraft) else engine.drafter.name
        self._drafters: dict[str | None, str] = {None: own, "off": "off"}
        self._drafters |= {name: name for name in engine.drafter_names}
        self._predicting = {
            name for name in self._drafters if name != "off" and engine.reads_references(name)
        }
        self._longest = max(map(len, model.tokenizer.get_vocab()), default=1)  # characters of a token
        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:
            if on_failure is not None:
                loop.call_soon_threadsafe(on_failure)

        self.engine = AsyncEngine(
            engine, max_waiting=limits.choices + 1, max_unread=limits.unread, on_failure=failed
        )
        self.metrics = Metrics(
            self.name,
            lambda: self.engine.running,
            lambda: max(0, self.admission.inside - self.engine.running),
            lambda: self.engine.memory_use or 0.0,
        )
        self.admission = Admission(limits, self.metrics, clock)

    @property
    def name(self) -> str:
        """The model's name, if a request gives none."""
        return self.names[0]

    @property
    def drafters(self) -> list[str]:
        """The names of drafters for requests; the first is the default."""
        return [name for name in dict.fromkeys(self._drafters.values()) if name != BROUGHT]

    # -- admission ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that requests can still be decoded.

        Raises:
            Refused: the engine has died, or the server is shutting down.
        """
        if self.engine.failed is not None:
            raise Refused(503, "the engine has failed; restart the server", code="engine_failed")
        if self.draining:
            raise later(503, "the server is shutting down; use another one", "draining", 1)

    async def check_health(self) -> None:
        """Check that a request of the server's own passes through the engine's thread in time.

        It has no prompt, so that the engine refuses it, between two steps, and it waits for no slot.

        Raises:
            Refused: the engine has died, or has not answered for ``Limits.stuck`` seconds.
        """
        if self.engine.failed is not None:
            raise Refused(503, "the engine has failed; restart the server", code="engine_failed")
        if self._probe is None or self._probe.done():
            self._probed = self.admission.clock()
            self._probe = asyncio.ensure_future(self._asked())
        await asyncio.wait({self._probe}, timeout=_PATIENCE)
        waited, most = self.admission.clock() - self._probed, self.admission.limits.stuck
        if not self._probe.done() and waited > most:
            message = f"the engine has not answered for {waited:.0f} s; restart the server"
            raise Refused(503, message, code="engine_stuck")

    async def _asked(self) -> None:
        with suppress(OutpaceError):
            await self.engine.add([])

    def admit(self, choices: int) -> Ticket:
        """Reserve room for choices.

        Raises:
            Refused: there is no room, the engine has died, or the server is shutting down.
        """
        self.check()
        return self.admission.admit(choices)

    # -- reading -----------------------------------------------------------------------------------------

    async def tokens(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; one that cannot fit into the context is refused before it is tokenised.

        Args:
            special: add the special tokens that begin or end a text.

        Raises:
            Refused: the text is too long, or takes too long. OutpaceError: it contains an unpaired surrogate.
        """
        return self._fitting(await self.texts.tokens(text, special, self._characters))

    @property
    def _characters(self) -> int | None:
        """The characters of the longest text that may fit into the context."""
        context = self.defaults.context
        return None if context is None else context * self._longest

    def _fitting(self, found: list[int] | int) -> list[int]:
        """Token ids, unless there is the length of a text that cannot fit."""
        if isinstance(found, list):
            return found
        raise Refused(
            400,
            f"this model's maximum context length is {self.defaults.context} tokens, and a text of {found} "
            "characters has more; shorten it",
            code="context_length_exceeded",
        )

    def beginning(self) -> list[int]:
        """The prompt for a request without one: the token that begins texts, or the one that ends them.

        Raises:
            Refused: the model has neither.
        """
        tokenizer = self.model.tokenizer
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return [int(token)]
        raise Refused(400, f"{self.name} has no token that begins a text; give a prompt", "prompt")

    async def conversation(self, messages: Seq[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to the beginning of the answer.

        Raises:
            Refused: there is no template, or it rejects the messages, or they are too long.
        """
        if not self.model.has_template:
            raise Refused(400, f"{self.name} has no chat template; use /v1/completions", "messages")
        return self._fitting(await self.texts.conversation(messages, options, self._characters))

    def check_tokens(self, tokens: Seq[int]) -> list[int]:
        """Check token ids sent by a client.

        Raises:
            Refused: one is outside the model's vocabulary.
        """
        most = self.model.target.vocabulary
        if any(token >= most for token in tokens):
            raise Refused(400, f"token ids are below {most}", "prompt")
        return list(tokens)

    # -- decoding ----------------------------------------------------------------------------------------

    async def work(self, work: Callable[[], Awaitable[T]], ticket: Ticket | None = None) -> T:
        """The result of work on a client's text, which has room until it ends, though the client leave.

        Args:
            ticket: its room; None for that of one choice.

        Raises:
            Refused: there is no room, or the text cannot be used.
        """
        own = self.admit(1) if ticket is None else ticket
        task = asyncio.ensure_future(work())
        self._working.add(task)
        task.add_done_callback(self._worked)
        own.hold(task)
        try:
            return await asyncio.shield(task)
        except Exception as error:
            raise unreadable(error) from error
        finally:
            if ticket is None:
                own.close()

    def _worked(self, task: asyncio.Future[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # of which nobody may be left to be told

    async def start(self, choices: int, prepare: Callable[[], Awaitable[Ask]]) -> Run:
        """Admit a request, and wait until it has joined the batch.

        Args:
            prepare: makes the request.

        Raises:
            Refused: the request is invalid, there is no room, or it has waited too long.
        """
        run = Run(self.engine, self.metrics, self.admission, self.admit(choices))

        async def read() -> tuple[Ask, Any]:
            ask = await prepare()
            return ask, None if ask.schema is None else await self.grammars.compile(ask.schema)

        try:
            run.ask, matcher = await self.work(read, run.ticket)
            await self._start(run, run.ask, matcher)
            await run.join(run.choices[0])
        except BaseException:
            run.close()
            raise
        return run

    async def _start(self, run: Run, ask: Ask, matcher: Any) -> None:
        name = self._drafter(ask)
        run.used = self._drafters[name]
        references = [ask.prediction] if ask.prediction and name != "off" else []
        for index in range(len(ask.prompts) * ask.n):
            prompt, began = ask.prompts[index // ask.n], self.admission.clock()
            params = ask.choice(index)
            drafts = params.drafts
            params = replace(
                params, speculation=replace(drafts, drafter=name, memory=drafts.memory or ask.salt)
            )
            criteria = None
            if matcher is not None:
                grammar = Grammar(matcher, len(prompt))
                params = replace(params, logits_processors=[grammar])
                criteria = grammar.ended
            trace = Trace(run.used) if ask.trace else None
            if trace is not None:
                params = Traced.of(params, trace)
            try:
                handle = await self.engine.add(
                    prompt, params, criteria=criteria, references=references, salt=ask.salt
                )
            except Exception as error:
                raise refusal(self.engine.failed or error) from error
            run.choices.append(Choice(index, prompt, handle, run.used, began, trace))

    def _drafter(self, ask: Ask) -> str | None:
        """The engine's name of the drafter for a request.

        Raises:
            Refused: there is no drafter of this name, or it cannot draft from the request's prediction.
        """
        name = ask.params.drafts.drafter
        if name == self._drafters[None] and name != "off":
            name = None
        if name not in self._drafters or name == BROUGHT:
            known = ", ".join(map(repr, self.drafters))
            raise Refused(400, f"this server has no drafter {name!r}; it has {known}", "speculation")
        brings = bool(ask.prediction) or ask.schema is not None
        name = BROUGHT if name is None and brings and BROUGHT in self._drafters else name
        if ask.prediction and name not in ("off", *self._predicting):
            raise Refused(400, f"{self._unread(name)}; or leave prediction out", "prediction")
        return name

    def _unread(self, name: str | None) -> str:
        """The reason for which a drafter drafts nothing from a prediction, and the remedy."""
        own = self._drafters[None]
        if BROUGHT not in self._drafters:
            return f"this server's drafter {own!r} cannot draft from a prediction; give speculation: 'off'"
        return (
            f"the drafter {name!r} cannot draft from a prediction; leave speculation out, for drafts of "
            f"{own!r} and of the prediction"
        )

    # -- ending ------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish, and end the rest after this many seconds."""
        self.draining = True
        with anyio.move_on_after(seconds):
            await self.admission.empty.wait()
        await self.close()

    async def close(self) -> None:
        """End the engine and the processes."""
        await self.engine.shutdown(drain=False)
        await self.texts.close()
        await self.grammars.close()


def exactness(engine: Engine) -> dict[str, Any]:
    """Fields of each response whose tokens may not be plain decoding's; empty if they are promised to be."""
    verifier, target = engine.verifier, engine.target
    if not verifier.lossy and target.promise != "not exact":
        return {}
    return {
        "exactness": {"promise": "not exact", "reason": str(verifier) if verifier.lossy else target.inexact}
    }
