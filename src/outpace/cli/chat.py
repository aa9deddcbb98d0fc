"""``outpace chat``: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import app, guarded
from outpace.cli.interrupt import Interrupt
from outpace.cli.observing import attached, engine_of, observer_of
from outpace.cli.parts import Source, profiled, sampling, steps
from outpace.cli.running import exactness_note, rate, run_one
from outpace.core import Generation, OutpaceError, SamplingParams
from outpace.reading import token_ids

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded


@app.command(epilog="Example: outpace chat --model HuggingFaceTB/SmolLM2-135M-Instruct")
@guarded
def chat(
    model: o.ModelName = None,
    drafter: o.DefaultDrafterSpec = "",
    profile: o.ProfileFile = None,
    verifier: o.VerifierName = "match",
    adaptive: o.Adaptive = None,
    observer: o.ObserverSpec = "",
    device: o.Device = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    llamacpp: o.LlamaCpp = "",
    quantise: o.Quantise = None,
    stock: o.Stock = False,
    threads: o.Threads = None,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
) -> None:
    """Chat with a model, in its chat template if it has one.

    /exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer.
    """
    watching = observer_of(observer)
    params = sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    options = steps(quantise, stock, bool(observer))
    source = Source(model, device, dtype, trust_remote_code, llamacpp, options=options)
    loaded, spec = profiled(source, drafter, profile, verifier)
    with attached(watching, loaded, spec) as learner:
        engine = engine_of(loaded, spec, verifier, 1, adaptive, learner)
        talk(Chat(loaded, engine, params))


_STOP = "\nUser:"
_HELP = "/exit or Ctrl-D ends, /reset forgets the conversation, Ctrl-C stops an answer"


class Chat:
    """A conversation and its prompt.

    Attributes:
        messages: in the format of chat templates, alternating user and assistant.
    """

    def __init__(self, model: Loaded, engine: Engine, params: SamplingParams) -> None:
        self.model = model
        self.engine = engine
        if not model.has_template:
            params = replace(params, stop=(*params.stop, _STOP))
        self.params = params
        self.messages: list[dict[str, str]] = []

    def encode(self) -> list[int]:
        """The conversation as token ids, up to where the answer begins."""
        from outpace.bench.subject import conversation

        return conversation(self.model, self.messages)

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


def talk(chat: Chat) -> None:
    """Read messages and answer them until /exit or the end of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        _line_editing()
        screen.note(f"{chat.model}. {_HELP}")
    while (message := _read(interactive)) is not None:
        message = message.strip()
        if message in ("/exit", "/quit"):
            return
        if message == "/reset":
            chat.messages.clear()
            screen.note("(the conversation is forgotten)")
        elif message.startswith("/") and message[1:].isalpha():
            screen.note(f"(no command {message}: {_HELP})")
        elif message:
            _turn(chat, message)


def _turn(chat: Chat, message: str) -> None:
    """Run one turn, show the answer as it is decoded, and report the speed."""
    first = True

    def show(text: str) -> None:
        nonlocal first
        screen.write(text.lstrip() if first else text)
        first = first and not text.strip()

    try:
        with Interrupt() as interrupt:
            generation = chat.ask(message, show, interrupt)
    except OutpaceError as error:
        screen.note(f"Error: {error}", style="red")
        return
    screen.write("\n")
    stats = generation.stats
    speed = rate(stats.tokens, stats.seconds)
    cut = "interrupted; " if interrupt.raised else ""
    line = f"{cut}{stats.mean_accepted_length:.2f} tokens per step, {speed:.1f} tokens/s"
    screen.note(f"({line}{exactness_note(chat.engine, chat.params.greedy)})")


def _read(interactive: bool) -> str | None:
    """A line, or None at the end of input. Ctrl-C at the prompt drops the line."""
    while True:
        try:
            return input("> " if interactive else "")
        except EOFError:
            if interactive:
                screen.write("\n")
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            screen.write("\n")
            screen.note(f"({_HELP})")
        except UnicodeDecodeError as error:
            raise OutpaceError(f"standard input is not UTF-8 text: {error.reason}") from None


def _line_editing() -> None:
    """Enable arrow keys and history in ``input`` if the platform has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
