"""The decoding loop: draft, verify, keep, learn, over a batch that sequences join and leave between steps."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, Literal

from outpace.cache import CacheFull
from outpace.core import Generation, OutpaceError, SamplingParams, Source, StreamedToken, TokenLogprobs
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDraft
from outpace.engine.active import Drafting
from outpace.engine.clock import Clock
from outpace.engine.errand import Errand, Stopping
from outpace.engine.guards import CallGuard, whole_number
from outpace.engine.memory import Memory
from outpace.engine.observer import Observer
from outpace.engine.parts import (
    Adaptive,
    check_company,
    check_shape,
    check_told,
    drafter_of,
    need_logits,
    policy_of,
)
from outpace.engine.profile import save_costs
from outpace.engine.reader import Reader
from outpace.engine.request import Prompt, Requests, one_each, params_of_each, prompts_of
from outpace.engine.running import RunningBatch
from outpace.engine.scheduler import Scheduler
from outpace.engine.step import Stepper
from outpace.policy.governor import Governor
from outpace.sequence import Sequence
from outpace.targets import Target, TargetModel
from outpace.targets.batch import Batch
from outpace.text import Tokenizer
from outpace.verify import Verifier, load_verifier

_log = logging.getLogger(__name__)
_CHUNK, _CHUNK_CUDA = 512, 2048  # rows of a prompt in a forward
_SCORED = 128  # rows whose logits are in memory at once, in scoring a text, or a multiple


class Engine:
    """Decoder of sequences with a target, a drafter and a verifier.

    An engine belongs to the thread that uses it first, and must not be called from within a step; use
    ``AsyncEngine`` from other threads. An error specific to one sequence (in its logits processors, criteria,
    text or draft) ends that sequence, with ``finish_reason="error"`` and the exception in ``error``; the
    other sequences' tokens are unchanged. An error of a drafter that handles sequences together ends all
    sequences it drafts for, and an error of the target's forward all sequences in it; if memory ran out, only
    the newest sequence ends.

    Args:
        target: ``outpace.Target(model)``, or a loaded transformers model.
        drafter: a drafter or its spec string; None decodes plainly.
        verifier: a verifier or its spec string: ``match`` (the tokens of plain decoding with the same seed),
            ``rejection`` (their distribution), or one of another package.
        tokenizer: for stop strings and text, of which only its ``decode`` is used, and for prompts that are
            texts or messages.
        adaptive: True uses a governor, which chooses the number of nodes to draft per step from measured
            seconds and acceptance, 0 if drafting does not pay; False verifies all nodes that the drafter
            proposes. ``"auto"`` is True under the verifier ``match``, otherwise False. Under other verifiers
            a seed's tokens depend on the number of drafted nodes, so ``adaptive=True`` then refuses requests
            with a seed. A ``Policy`` replaces the governor; ``outpace.policy.governor.Pinned(8)`` drafts 8
            nodes.
        costs: a profile with the governor's initial costs (``save_costs``, ``outpace tune``).
        observer: called after each step, after the drafter; it may change the drafter's weights.
        clock: function that returns the time in seconds.
        prefill_chunk: maximum number of prompt tokens per forward; while other sequences are decoding, a
            chunk is limited to about half the time of a step. None for 512, on a CUDA device 2,048, or, if
            the target is ``stock``, for no limit.
        slots: number of sequences to make room for (the cache grows, unless the target is static).
        length: rows per slot to make room for.
        memory: maximum bytes of the rows of all sequences; below 1, a share of the free memory; None for no
            limit. Requests wait while there is too little. A sequence that outgrows its rows preempts the
            newest sequence of the lowest priority, which is later resumed with the same tokens.
        prefix_cache: bytes for the rows of shared prompt prefixes, which are then computed once, or, below 1,
            a share of the free memory; None disables it. Drafters that read hidden states need those of every
            row, so they feed full prompts.
        max_running: maximum number of sequences decoded at once; others wait. None for no limit but memory.
        drafters: further drafters, by the names that ``SamplingParams.speculation`` selects them by; their
            sequences share forwards. Each governed drafter has its own governor.

    Raises:
        OutpaceError: unknown drafter or verifier, or parts that do not fit together.
    """

    def __init__(
        self,
        target: TargetModel | Any,
        drafter: Drafter[Any] | str | None = None,
        verifier: Verifier | str = "match",
        tokenizer: Tokenizer | None = None,
        *,
        adaptive: Adaptive = "auto",
        costs: str | Path | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        prefill_chunk: int | None = None,
        slots: int = 1,
        length: int = 256,
        memory: int | float | None = 0.9,
        prefix_cache: int | float | None = None,
        max_running: int | None = None,
        drafters: Mapping[str, Drafter[Any] | str] | None = None,
    ) -> None:
        slots, length = whole_number("slots", slots, 1), whole_number("length", length, 1)
        if not callable(clock):
            raise OutpaceError(f"clock is a function that returns seconds, not {clock!r}")
        self.target = Target(target)
        if prefill_chunk is None:
            usual = _CHUNK_CUDA if self.target.device.type == "cuda" else _CHUNK
            prefill_chunk = sys.maxsize if self.target.stock else usual
        self.prefill_chunk = whole_number("prefill_chunk", prefill_chunk, 1)
        self.drafter = drafter_of(drafter)
        self.verifier = load_verifier(verifier)
        self.tokenizer = tokenizer
        check_shape(self.drafter, self.verifier, self.target)
        self.governor = policy_of(adaptive, self.drafter, self.verifier, self.target, costs)
        self._clock = Clock(clock)
        self._turn = CallGuard(self._renew)
        self.target = self.drafter.attach(self.target)
        rows = Memory(self.target, memory, slots, length, prefix_cache)
        others = {name: drafter_of(other) for name, other in (drafters or {}).items()}
        check_company(self.drafter, others, self.verifier, self.target)
        self._draftings = self._make_draftings(others, adaptive)
        self.observer = observer
        watched = () if observer is None else observer.hidden_layers
        read = [layer for d in self._draftings.values() for layer in d.drafter.hidden_layers(d.shared)]
        layers = tuple(dict.fromkeys((*read, *watched)))
        most = None if max_running is None else whole_number("max_running", max_running, 1)
        check_told(self.target, self.verifier, layers)
        scheduler = Scheduler(self.target, self.prefill_chunk, most, self._clock)
        self.allowance = scheduler.allowance
        self._batch = RunningBatch(
            self.target, rows, scheduler, self._draftings, layers, observer, self._clock
        )
        self._stepper = Stepper(self.target, self.verifier, self._batch, observer, self._clock)
        self._requests = Requests(
            self.target, self.verifier, tokenizer, self._draftings, observer, self._clock
        )

    def _make_draftings(
        self, others: Mapping[str, Drafter[Any]], adaptive: Adaptive
    ) -> dict[str | None, Drafting]:
        """The engine's drafters, by the name in ``Speculation.drafter``; None is the default drafter."""
        governed = adaptive if isinstance(adaptive, bool | str) else "auto"  # a policy is for the default one
        draftings: dict[str | None, Drafting] = {
            None: Drafting(self.drafter, self.governor, self.target),
            "off": Drafting(NoDraft(), None, self.target),
        }
        for name, other in others.items():
            policy = policy_of(governed, other, self.verifier, self.target)
            draftings[name] = Drafting(other, policy, self.target)
        return draftings

    # -- whole generations -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        references: Seq[Seq[Seq[int]]] | None = None,
        sources: Seq[Any] | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Generation]:
        """Decode prompts together; one generation per prompt, in their order.

        With ``n`` in its parameters, a prompt has n generations in a row.

        Args:
            prompts: one text, one conversation, or a list of prompts: texts, conversations, or token ids, at
                least one each. A text is taken as it stands; for a model with an encoder it is the source. A
                conversation is messages with "role" and "content", for the tokenizer's chat template.
            params: for all prompts, or one per prompt. Default: greedy.
            references: for each prompt, the texts that its output may repeat, as token ids.
            sources: for each prompt, an encoder-decoder model's source (see ``Seq2SeqTarget``), or the images
                in it (see ``MultimodalTarget``).
            errors: ``"raise"`` raises the error that ends a sequence, and removes the others; ``"return"``
                decodes the others to their end, and returns the error in ``Generation.error``.

        Raises:
            ContextOverflow: a prompt is longer than the context. OutpaceError: another mistake in a prompt.
        """
        if errors not in ("raise", "return"):
            raise OutpaceError(f"errors must be 'raise' or 'return', not {errors!r}")
        given = prompts_of(prompts)
        chosen = params_of_each(params, len(given))
        texts = one_each(references, (), len(given), "lists of references")
        inputs = one_each(sources, None, len(given), "sources")
        with self._turn:
            sequences = [
                self._requests.sequence(
                    self._batch.cache, prompt, asked.output(index), references=copied, source=source
                )
                for prompt, asked, copied, source in zip(given, chosen, texts, inputs, strict=True)
                for index in range(asked.n)
            ]
            for sequence in sequences:
                self._batch.scheduler.add(sequence)
            try:
                while any(sequence.finish_reason is None for sequence in sequences):
                    self._step()
                    for sequence in sequences if errors == "raise" else ():
                        sequence.check()
            except Exception:
                self._batch.leave(sequences)
                raise
        return [sequence.generation() for sequence in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        references: Seq[Seq[int]] = (),
        source: Any = None,
    ) -> Iterator[StreamedToken]:
        """Yield tokens of one prompt as they are emitted. Closing the iterator removes the sequence.

        The prompt is a text, a conversation or token ids, as for ``generate``.

        An error that ends the sequence is raised after its last token.
        """
        with self._turn:
            sequence = self._requests.sequence(
                self._batch.cache, prompt, params, references=references, source=source
            )
        held: list[Callable[[], None]] = []
        return self._turn.lend(self._stream(sequence, held), held)

    def _stream(self, sequence: Sequence, held: list[Callable[[], None]]) -> Generator[StreamedToken]:
        held.append(partial(self._batch.leave, [sequence]))
        with self._turn:
            self._batch.scheduler.add(sequence)
        try:
            reader = Reader(sequence)
            while True:
                # Other users of the engine may have run steps: first yield the tokens they emitted.
                ended = sequence.finish_reason is not None
                yield from reader.new()
                if ended:
                    sequence.check()
                    return
                self.step()
        finally:
            if sequence.finish_reason is None:
                self.remove(sequence)
            held.clear()

    def score(self, tokens: Seq[int], top: int = 0) -> Generator[list[TokenLogprobs]]:
        """Yield the log probabilities of a text's tokens after the first, some at a time.

        Steps may be run in between. The rows are freed when the generator is closed.

        Args:
            tokens: the text, at least one token.
            top: number of the most probable tokens to report with each.

        Raises:
            OutpaceError: the target returns no logits, or a token is not in the vocabulary. CacheFull: there
            is no room for the text's rows now.
        """
        held: list[Callable[[], None]] = []
        return self._turn.lend(self._score(tokens, top, held), held)

    def _score(
        self, tokens: Seq[int], top: int, held: list[Callable[[], None]]
    ) -> Generator[list[TokenLogprobs]]:
        need_logits(self.target, "log probabilities of a prompt")
        if not all(0 <= token < self.target.vocabulary for token in tokens):
            raise OutpaceError(f"token ids are from 0 to {self.target.vocabulary - 1}")
        with self._turn:
            cache, self._turn.broken = self._batch.cache, True  # until the slot is held, or refused
            try:
                slot = self.target.open(cache, None, len(tokens))
            except CacheFull as error:
                self._turn.broken = False
                message = (
                    f"there is no room for the {len(tokens)} rows of this text; give the engine more memory"
                )
                raise CacheFull(message) from error
            held.append(partial(cache.free, slot))
            self._turn.broken = False
        try:
            size = math.lcm(_SCORED, self.target.prompt_step)
            for start in range(0, len(tokens) - 1, size):
                rows = tokens[start : start + size]
                with self._turn:
                    output = self.target.forward(cache, Batch.of({slot: rows}, prompt=len(rows)))
                    cache.keep({slot: range(len(rows))})
                logprobs = output.logits_of(slot).float().log_softmax(dim=-1)
                following = tokens[start + 1 : start + 1 + len(rows)]
                yield [
                    TokenLogprobs.of(row, token, top) for row, token in zip(logprobs, following, strict=False)
                ]
        finally:
            with self._turn:
                if held:  # not after an interrupt, when the cache was replaced
                    self._turn.broken = True  # until it is freed
                    cache.free(slot)
                    held.clear()
                    self._turn.broken = False

    def encoding(self, source: Any) -> Errand[Source | None]:
        """The encoding of a source, as ``add`` does it, in pieces."""

        def work(stop: Callable[[], None]) -> Source | None:
            with Stopping(stop):
                return self.target.encode(source)

        return Errand(work, self._clock)

    # -- a batch that changes ----------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        criteria: Callable[[list[int]], bool] | None = None,
        references: Seq[Seq[int]] = (),
        output: Seq[int] = (),
        source: Any = None,
        priority: int = 0,
        salt: str | None = None,
        client: str = "",
    ) -> Sequence:
        """Add a sequence, which joins the batch at the next step if there is room.

        Args:
            criteria: called with prompt and output after each token; True ends the sequence.
            references: texts that the output may repeat, as token ids.
            output: tokens emitted earlier, possibly after another prompt, from which decoding continues: the
                next token is drawn at output index ``len(output)``. ``max_new_tokens`` includes them.
            source: an encoder-decoder model's source (see ``Seq2SeqTarget``) or the prompt's images (see
                ``MultimodalTarget``), encoded now.
            priority: higher priorities join first, and are preempted last if memory is short.
            salt: prefix-cache rows are shared only among requests with the same salt, one per tenant.
            client: whose request it is: clients whose requests wait join in turns.
        """
        with self._turn:
            sequence = self._requests.sequence(
                self._batch.cache,
                prompt,
                params,
                criteria,
                references,
                output,
                source,
                priority,
                salt,
                client,
            )
            self._batch.scheduler.add(sequence)
            return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, ended or not; no effect if it is not in the engine."""
        with self._turn:
            self._batch.leave([sequence])

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in the batch, and those waiting to join."""
        with self._turn:
            return self._batch.sequences

    @property
    def drafter_names(self) -> list[str]:
        """The names of the further drafters, for ``SamplingParams.speculation``."""
        return [name for name in self._draftings if name is not None and name != "off"]

    def reads_references(self, name: str | None) -> bool:
        """True if the drafter of this name, or for None the engine's own, reads references."""
        return self._draftings[name].drafter.reads_references

    @property
    def memory_use(self) -> float | None:
        """Reserved share of the memory for rows; None if it has no limit."""
        with self._turn:
            return self._batch.memory.use

    @property
    def prefix_bytes(self) -> int:
        """Maximum size of the prefix cache in bytes; 0 if there is none."""
        prefixes = self._batch.memory.prefixes
        return 0 if prefixes is None else prefixes.limit

    @property
    def prefix_rows(self) -> int:
        """Number of tokens of prompts that the prefix cache holds."""
        size = self._batch.cache.copied_bytes(1) if self.prefix_bytes else 0
        return self.prefix_bytes // size if size else 0

    @property
    def room(self) -> tuple[int, int]:
        """Slots and rows per slot that the cache was made with."""
        return self._batch.memory.room

    def step(self) -> list[Sequence]:
        """Admit waiting sequences, feed a chunk of their prompts, and run one step for the others.

        Returns:
            The sequences that took part in the step: those whose prompts are in the cache.

        Sequences that ended, with an error or not, have left the batch when this returns. An interrupt, or an
        error of the policy or the observer, removes every sequence, since cache and tokens may no longer
        match. The engine remains usable: its next call begins with a new cache, and with drafters that have
        forgotten what they remembered.
        """
        with self._turn:
            return self._step()

    def _step(self) -> list[Sequence]:
        try:
            if self._batch.in_doubt:
                self._refresh()
            self._batch.join()
            self._batch.make_room()
            decoding = self._batch.scheduler.decoding()
            if decoding:
                self._stepper.advance(decoding)
            return [active.sequence for active in decoding]
        except BaseException:
            self._turn.broken = True
            self._batch.end()
            raise

    def _renew(self) -> None:
        """Make the engine as new after a call that an exception left in the middle."""
        self._batch.end()
        self._refresh()

    def _refresh(self) -> None:
        """Replace the cache and what the drafters have prepared."""
        self._batch.memory.renew(*self._batch.memory.room)
        for drafting in self._draftings.values():
            drafting.renew()
        self._batch.scheduler.doubt = False

    # -- memory ------------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Prepare usual steps, so that the first requests do not wait for it: captures, on a GPU.

        For as many sequences as ``slots``. Elsewhere there is nothing to prepare. No effect while sequences
        are being decoded.
        """
        with self._turn:
            if not self._batch.active:
                self._batch.warm()

    def make_room(self, slots: int, length: int) -> None:
        """Replace the cache by a larger or smaller one; the drafters keep their data.

        Raises:
            OutpaceError: sequences are being decoded, whose rows are in the cache.
        """
        with self._turn:
            if self._batch.active:
                raise OutpaceError(
                    "sequences are being decoded, and their rows are in the cache; remove them first"
                )
            try:
                self._batch.memory.renew(slots, length)
            except BaseException:
                self._turn.broken = True
                raise

    def check_prefix_store(self) -> None:
        """Refuse to store the prefix cache where that is not possible.

        Raises:
            OutpaceError: there is none, or its rows are not tensors alone (recurrent models, GGUF files).
        """
        self._batch.memory.stored()

    def save_prefixes(self, folder: str | Path) -> None:
        """Write the prefix cache to a file in a folder, from which ``load_prefixes`` fills another engine's.

        The file has users' prompts, as token ids and rows, so the folder must be this user's alone.

        Raises:
            OutpaceError: there is no prefix cache, it cannot be stored, or the folder cannot be used.
        """
        with self._turn:
            self._batch.memory.save(Path(folder))

    def load_prefixes(self, folder: str | Path) -> None:
        """Fill the prefix cache from the file in a folder; no effect if there is none.

        Rows of the file are compared with what the model computes here. No effect on tokens.

        Raises:
            OutpaceError: as ``save_prefixes``, or the file is of another model, version or machine; the
                prefix cache is then as it was.
        """
        with self._turn:
            self._batch.memory.restore(Path(folder))

    # -- the governor ------------------------------------------------------------------------------------

    def save_costs(self, path: str | Path) -> None:
        """Write the measured costs of steps to a profile, for ``Engine(..., costs=path)``.

        Its other fields, and profiles of other models, dtypes and machines in the file, are kept.

        Raises:
            OutpaceError: this engine has no governor, or the file is not a profile.
        """
        if not isinstance(self.governor, Governor):
            raise OutpaceError("nothing was measured: make the engine with adaptive=True")
        save_costs(path, self.target, self.governor.costs())
