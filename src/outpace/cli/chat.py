"""``outpace chat``: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import lines, screen
from outpace.cli import options as o
from outpace.cli.app import app, guarded
from outpace.cli.chat_commands import ENDS, SETTINGS, run_command
from outpace.cli.given import DraftingOptions, LoadingOptions, ModelOptions, StepOptions, taking
from outpace.cli.interrupt import Interrupt
from outpace.cli.observing import attached, engine_of, observer_of
from outpace.cli.parts import check_draws, profiled, sampling
from outpace.cli.running import cut_note, exactness_note, rate, run_one
from outpace.core import Generation, OutpaceError
from outpace.reading import token_ids

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded


System = Annotated[
    str, typer.Option("--system", metavar="TEXT", help="What the model is told before the conversation.")
]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions, DraftingOptions, LoadingOptions, StepOptions):
    """The options of ``outpace chat``."""

    max_new_tokens: o.MaxNewTokens = 256
    temperature: o.OwnTemperature = None
    top_k: o.OwnTopK = None
    top_p: o.OwnTopP = None
    min_p: o.OwnMinP = None
    repetition_penalty: o.OwnRepetitionPenalty = None
    seed: o.Seed = None
    system: System = ""

    def asked(self) -> dict[str, Any]:
        """The settings that were given.

        Raises:
            OutpaceError: one is invalid.
        """
        found = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        sampling(**{"temperature": 1.0, **found})
        return found


@app.command(epilog="Example: outpace chat smollm2")
@guarded
@taking(ChatOptions)
def chat(given: ChatOptions) -> None:
    """Chat with a model, in its chat template if it has one, sampled as its own generation config says.

    /help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    watching, asked = observer_of(given.observer), given.asked()
    source = given.source(given.model, options=given.steps(), releases=not given.observer)
    loaded, chosen = profiled(source, given.drafter, given.profile, given.verifier)
    with attached(watching, loaded, chosen.spec) as learner:
        engine = engine_of(loaded, chosen.drafter, given.verifier, 1, given.adaptive, learner)
        talk(ChatSession(loaded, engine, asked, given.system))


_STOP = "\nUser:"


class ChatSession:
    """A conversation and its prompt.

    Attributes:
        messages: in the format of chat templates, alternating user and assistant.
        system: what the model is told before them; empty for nothing.
        asked: sampling parameters that were asked for, before the model's own.
    """

    def __init__(self, model: Loaded, engine: Engine, asked: dict[str, Any], system: str = "") -> None:
        self.model = model
        self.engine = engine
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.set(asked)

    def set(self, asked: dict[str, Any]) -> None:
        """Choose the sampling of the answers that follow.

        Raises:
            OutpaceError: a value is wrong, or has no effect.
        """
        from outpace.loading.sampling import sampling_of_chat

        params = sampling_of_chat(self.model.target, asked)
        check_draws(params, asked)
        self.asked, self.params = asked, params
        if not self.model.has_template:
            self.params = replace(params, stop=(*params.stop, _STOP))

    @property
    def turns(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else ()), *self.messages]

    def encode(self) -> list[int]:
        """The conversation as token ids, up to where the answer begins."""
        from outpace.bench.subject import conversation

        return conversation(self.model, self.turns)

    def fit(self) -> tuple[list[int], int]:
        """The prompt's token ids, after dropping the oldest turns if the context is full.

        Also returns the number of dropped turns; a turn is a question and its answer.

        Raises:
            OutpaceError: the last message alone is too long.
        """
        context = self.model.target.context
        # First the message alone: this ends early if it is far too long.
        token_ids(self.model.tokenizer, self.messages[-1]["content"], most=context)
        ids = self.encode()
        if context is None:
            return ids, 0
        room = min(self.params.max_new_tokens, context // 4)
        dropped = 0
        while len(ids) + room > context and len(self.messages) > 1:
            del self.messages[:2]
            dropped += 1
            ids = self.encode()
        if len(ids) >= context:
            raise OutpaceError(f"that message does not fit in the model's context of {context} tokens")
        return ids, dropped

    def ask(
        self,
        message: str,
        show: Callable[[str], None],
        interrupt: Interrupt,
        notice: Callable[[str], None] = screen.note,
    ) -> Generation:
        """Run one turn: the answer, or the part before an interruption, is streamed to ``show`` and kept.

        Raises:
            OutpaceError: the message does not fit; the conversation is unchanged except for dropped turns.
        """
        self.messages.append({"role": "user", "content": message})
        try:
            ids, dropped = self.fit()
            if dropped:
                turns = "turn" if dropped == 1 else f"{dropped} turns"
                notice(f"(the context is full: the oldest {turns} dropped)")
            generation = run_one(self.engine, (ids, None), self.params, interrupt, show)
        except OutpaceError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": (generation.text or "").strip()})
        return generation


def talk(chat: ChatSession) -> None:
    """Read messages and answer them until /exit or the end of input."""
    interactive = sys.stdin.isatty()
    if not interactive:
        return _talk(chat, interactive)
    screen.note(f"{chat.model}. /help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer")
    with lines.history():
        _talk(chat, interactive)


def _talk(chat: ChatSession, interactive: bool) -> None:
    while (message := _read(interactive)) is not None:
        message = message.strip()
        try:
            if message.startswith("/") and (command := re.match(r"/(\w+)(?:\s+|$)", message)):
                if command[1] in ENDS:
                    return
                screen.note(run_command(chat, command[1], message[command.end() :].strip()))
            elif message:
                _turn(chat, message)
        except OutpaceError as error:
            screen.note(f"Error: {error}", style="red")


def _turn(chat: ChatSession, message: str) -> None:
    """Run one turn, show the answer as it is decoded, and report the speed."""
    first = True

    def show(text: str) -> None:
        nonlocal first
        read()
        screen.write(text.lstrip() if first else text)
        first = first and not text.strip()

    with Interrupt() as interrupt, screen.busy("reading ...") as read:
        generation = chat.ask(message, show, interrupt)
    screen.write("\n")
    stats = generation.stats
    speed = rate(stats.tokens, stats.seconds)
    cut = "interrupted; " if interrupt.raised else ""
    if limit := cut_note(generation, chat.params):
        cut = f"{limit}; /set max_new_tokens raises it; " if "--max" in limit else f"{limit}; "
    line = f"{cut}{stats.mean_accepted_length:.2f} tokens per step, {speed:.1f} tokens/s"
    screen.note(f"({line}{exactness_note(chat.engine, chat.params.greedy)})")


def _read(interactive: bool) -> str | None:
    """A message, or None at the end of input. Ctrl-C at the prompt drops what was typed."""
    while True:
        try:
            return lines.read(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            screen.write("\n")
            screen.note("(/exit or Ctrl-D ends)")
