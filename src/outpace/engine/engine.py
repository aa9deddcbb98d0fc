"""The one loop: draft, verify, keep, learn, over a batch that sequences join and leave between steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from outpace.cache import Place, Slot
from outpace.choosing import own_tokens
from outpace.core import Draft, Generation, OutpaceError, SamplingParams, StreamedToken, out_of_memory
from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.engine.guards import Clock, Turn, whole_number
from outpace.engine.observer import Observer
from outpace.engine.parts import Adaptive, check_draft, check_shape, drafter_of, policy_of
from outpace.engine.profile import save_costs
from outpace.engine.reader import Reader
from outpace.engine.request import Requests, one_each, params_of_each
from outpace.policy.governor import Governor, Outcome, Plan
from outpace.sampling import Logits
from outpace.sequence import KeyedDraw, Sequence, Step
from outpace.targets import Output, Rows, Target, TargetModel
from outpace.text import Tokenizer
from outpace.tree import trim
from outpace.verify import Verifier, load_verifier


@dataclass(eq=False)
class _Active:
    """A sequence in the batch, with its slot in the cache and the drafter's state."""

    sequence: Sequence
    slot: Slot
    number: int  # of its joining, ascending
    state: Any = None
    started: bool = False


class Engine:
    """Decodes sequences with a target, a drafter and a verifier.

    An engine belongs to the thread that uses it first, and is not called from within a step; ``AsyncEngine``
    serves others. An error in what is done for one sequence (its logits processors, criteria, text or draft)
    ends that sequence, with ``finish_reason="error"`` and the exception in ``error``; the others get the
    tokens they would have got. A drafter that handles sequences together fails for all that it drafts for, a
    forward of the target for all in it; where memory ran out, the newest sequence ends and the others go on.

    Args:
        target: ``outpace.Target(model)``, or a loaded transformers model.
        drafter: a drafter or its spec string; None decodes plainly.
        verifier: a verifier or its spec string: ``match`` (the tokens of plain decoding with the same seed),
            ``rejection`` or ``block`` (their distribution), or one that is lossy.
        tokenizer: for stop strings and text; only its ``decode`` is used.
        adaptive: True lets a governor choose, from measured seconds and acceptance, how many nodes each step
            drafts, none where nothing pays; False drafts what the drafter proposes. ``"auto"`` governs under
            the verifier ``match``. Under another verifier the tokens of a seed depend on how many nodes were
            drafted, so there ``adaptive=True`` refuses a request with a seed. A policy of your own decides
            itself; ``outpace.policy.governor.Pinned(8)`` drafts 8 nodes.
        costs: a profile with measured costs that the governor begins with (``save_costs``, ``outpace tune``).
        observer: is shown every step after the drafter has seen it: ``outpace.train.Online``.
        clock: what seconds are read from.
        prefill_chunk: prompt tokens fed in one forward.
        slots: sequences to make room for at once (the cache grows, unless the target is static).
        length: rows to make room for in each slot.

    Raises:
        OutpaceError: unknown drafter or verifier, or parts that do not fit each other.
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
        prefill_chunk: int = 512,
        slots: int = 1,
        length: int = 256,
    ) -> None:
        self.prefill_chunk = whole_number("prefill_chunk", prefill_chunk, 1)
        slots, length = whole_number("slots", slots, 1), whole_number("length", length, 1)
        if not callable(clock):
            raise OutpaceError(f"clock is a function that returns seconds, not {clock!r}")
        self.target = Target(target)
        self.drafter = drafter_of(drafter)
        self.verifier = load_verifier(verifier)
        self.tokenizer = tokenizer
        check_shape(self.drafter, self.verifier)
        self.governor = policy_of(adaptive, self.drafter, self.verifier, self.target, costs)
        self._clock = Clock(clock)
        self._turn = Turn()
        self.target = self.drafter.attach(self.target)
        self._cache = self.target.new_cache(slots, length)
        self.room = (slots, length)  # the sequences that the cache was made for, and the rows of each
        self._shared = self.drafter.prepare(self.target)
        self.observer = observer
        watched = () if observer is None else observer.hidden_layers
        self._layers = tuple(dict.fromkeys((*self.drafter.hidden_layers(self._shared), *watched)))
        self._active: list[_Active] = []
        self._numbers = itertools.count()
        self._waiting: list[Sequence] = []
        self._requests = Requests(
            self.target,
            self.verifier,
            tokenizer,
            self.governor,
            observer,
            self.drafter.reads_references,
            self._clock,
        )

    # -- whole generations -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        references: Seq[Seq[Seq[int]]] | None = None,
        sources: Seq[Any] | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Generation]:
        """Decode prompts together; one generation per prompt, in their order.

        Args:
            prompts: token ids, each prompt at least one.
            params: for all prompts, or one for each. Default: greedy.
            references: for each prompt, the texts that its output may repeat, as token ids.
            sources: for each prompt, what an encoder-decoder model decodes it from (``Seq2SeqTarget``).
            errors: ``"raise"`` raises what ends a sequence with an error, and removes the others;
                ``"return"`` decodes the others to their end, and returns it in ``Generation.error``.

        Raises:
            ContextOverflow: a prompt is longer than the context. OutpaceError: another mistake in a prompt.
        """
        if errors not in ("raise", "return"):
            raise OutpaceError(f"errors must be 'raise' or 'return', not {errors!r}")
        chosen = params_of_each(params, len(prompts))
        texts = one_each(references, (), len(prompts), "lists of references")
        given = one_each(sources, None, len(prompts), "sources")
        with self._turn.taken():
            sequences = [
                self._requests.sequence(self._cache, prompt, own, references=copied, source=source)
                for prompt, own, copied, source in zip(prompts, chosen, texts, given, strict=True)
            ]
            self._waiting.extend(sequences)
        try:
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step()
                for sequence in sequences if errors == "raise" else ():
                    sequence.check()
        finally:
            with self._turn.taken():
                self._leave(sequences)
        return [sequence.generation() for sequence in sequences]

    def stream(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        references: Seq[Seq[int]] = (),
        source: Any = None,
    ) -> Iterator[StreamedToken]:
        """Tokens of one prompt as they are accepted. Closing the iterator removes the sequence.

        An error that ends the sequence is raised after its last token.
        """
        with self._turn.taken():
            sequence = self._requests.sequence(
                self._cache, prompt, params, references=references, source=source
            )
        return self._stream(sequence)

    def _stream(self, sequence: Sequence) -> Iterator[StreamedToken]:
        with self._turn.taken():
            self._waiting.append(sequence)
        reader = Reader(sequence)
        try:
            while True:
                # Others that share the engine may have stepped it meanwhile: first what is there already.
                ended = sequence.finish_reason is not None
                yield from reader.new()
                if ended:
                    sequence.check()
                    return
                self.step()
        finally:
            self.remove(sequence)

    # -- a batch that changes ----------------------------------------------------------------------------

    def add(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        criteria: Callable[[list[int]], bool] | None = None,
        references: Seq[Seq[int]] = (),
        output: Seq[int] = (),
        source: Any = None,
    ) -> Sequence:
        """Let a sequence join at the next step.

        Args:
            criteria: called with prompt and output after each token; True ends the sequence.
            references: texts that the output may repeat, as token ids.
            output: tokens emitted before, perhaps after another prompt, from which decoding goes on: the next
                token is the one at their end, drawn as such. ``max_new_tokens`` counts them.
            source: what an encoder-decoder model decodes from, encoded now; see ``Seq2SeqTarget``.
        """
        with self._turn.taken():
            sequence = self._requests.sequence(
                self._cache, prompt, params, criteria, references, output, source
            )
            self._waiting.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, ended or not; one that is not in is left as it is."""
        with self._turn.taken():
            self._leave([sequence])

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences being decoded, and those that wait to join."""
        with self._turn.taken():
            return self._everyone()

    def _everyone(self) -> list[Sequence]:
        return [active.sequence for active in self._active] + self._waiting

    def step(self) -> list[Sequence]:
        """Let waiting sequences join, run one step for all, and return those that took part.

        Sequences that ended have left the batch when this returns, those that ended with an error included.
        An interrupt, or an error of the policy or the observer, removes every sequence, since cache and
        tokens may no longer agree; the engine itself can be used on.
        """
        with self._turn.taken():
            try:
                ahead = self._join()
                return self._advance(ahead) if self._active else []
            except BaseException:
                self._leave(self._everyone())
                if len(self._cache):  # the error fell between taking a slot and noting who has it
                    self._cache = self.target.new_cache(*self.room)
                raise

    def _advance(self, ahead: int) -> list[Sequence]:
        """One step for the whole batch; ``ahead`` rows of each prompt are still to be fed before its root."""
        took_part = [a.sequence for a in self._active]
        began = self._clock()
        plan = self._plan()
        proposals = self._propose(plan)
        trimmed = self._trim(proposals, plan)
        drafted = self._clock()
        output = self._forward({a: draft for a, (draft, _) in trimmed.items()}, ahead)
        steps = {} if output is None else self._verify_each(trimmed, output, ahead)
        verified = self._clock()
        if output is not None:
            self._cache.keep({a.slot: _rows_kept(step, ahead) for a, step in steps.items()})
        kept = self._clock()
        self._observe(steps)
        learnt = self._clock()
        if self.governor is not None and plan is not None and steps:
            sizes = [len(step.draft) for step in steps.values()]
            paths = [step.path for step in steps.values()]
            drafting, verifying = drafted - began + learnt - kept, None if ahead else kept - drafted
            self.governor.learn(Outcome(plan, sizes, paths, drafting, verifying))
        self._leave([sequence for sequence in took_part if sequence.finish_reason is not None])
        ended = self._clock()
        for sequence in took_part:
            stats = sequence.stats
            stats.seconds_draft += drafted - began + learnt - kept
            if ahead:
                stats.seconds_prefill += verified - drafted
            else:
                stats.seconds_verify += verified - drafted
            stats.seconds_rest += kept - verified + ended - learnt
        return took_part

    def _plan(self) -> Plan | None:
        """What to draft for each sequence in this step; None for whatever is proposed."""
        plan = None if self.governor is None else self.governor.plan(len(self._active))
        for active in self._active:
            active.sequence.budget = None if plan is None else plan.nodes
            active.sequence.row_cost = None if plan is None else plan.row_cost
        return plan

    def _nodes_left(self, active: _Active, plan: Plan | None, draft: Draft) -> int | None:
        """Nodes that pay by the plan, within the room of the sequence's slot where the cache cannot grow."""
        budget = None if plan is None else plan.take(draft)
        if not self._cache.static:
            return budget
        room = self._cache.room(active.slot) - len(active.sequence.tokens)
        return room if budget is None else min(room, budget)

    def _calls(self, members: Iterable[_Active]) -> list[list[_Active]]:
        """The sequences that a call to the drafter is for: one, where the drafter handles one at a time."""
        cls, members = type(self.drafter), list(members)
        alone = cls.propose is SequenceDrafter.propose and cls.observe is SequenceDrafter.observe
        return [[one] for one in members] if alone or not members else [members]

    def _propose(self, plan: Plan | None) -> dict[_Active, Draft]:
        """A draft for each sequence; an empty one where the drafter failed."""
        proposals = dict.fromkeys(self._active, Draft())
        if plan is not None and not plan.nodes:
            return proposals
        for members in self._calls(self._active):
            try:
                drafts = self.drafter.propose([a.state for a in members])
                proposals.update(zip(members, drafts, strict=True))
            except Exception as error:
                _fail(members, error)
        return proposals

    def _trim(
        self, proposals: Mapping[_Active, Draft], plan: Plan | None
    ) -> dict[_Active, tuple[Draft, Seq[int]]]:
        """The drafts as they are verified, and which node of the proposal each of their nodes was."""
        trimmed = {}
        for active, draft in proposals.items():
            try:
                # A path of n nodes emits n + 1 tokens, so deeper nodes than the room less one are of no use.
                trimmed[active] = trim(draft, active.sequence.room - 1, self._nodes_left(active, plan, draft))
                check_draft(draft, self.target)
            except Exception as error:
                active.sequence.fail(error)
        self._leave([a.sequence for a in proposals if a.sequence.error is not None])
        return trimmed

    def _forward(self, drafts: Mapping[_Active, Draft], ahead: int) -> Output | None:
        """The target's forward over the roots and drafts of the batch.

        An error ends the sequences in it. Where memory ran out it ends the newest one, and the others are
        tried again. None where no sequence is left.
        """
        while self._active:
            feeds = {a.slot: Rows.under(a.sequence.tokens[-1 - ahead :], drafts[a]) for a in self._active}
            try:
                return self.target.forward(self._cache, feeds, logits_from=ahead, hidden_layers=self._layers)
            except Exception as error:
                full = out_of_memory(error)
                if full:
                    error.__traceback__ = None  # its frames hold the tensors of the forward
                newest = max(self._active, key=attrgetter("number"))
                failed = [newest] if full else list(self._active)
                _fail(failed, error)
                self._leave([a.sequence for a in failed])
        return None

    def _verify_each(
        self, trimmed: Mapping[_Active, tuple[Draft, Seq[int]]], output: Output, ahead: int
    ) -> dict[_Active, Step]:
        """What the step emits for each sequence; a sequence that fails has no entry."""
        assert output.logits is not None
        rows = output.logits
        first = {active: output.span(active.slot).start for active in self._active}
        own = self._own_tokens(rows, first, trimmed)
        steps = {}
        for active in self._active:
            sequence, root = active.sequence, active.sequence.output_length
            draft, kept = trimmed[active]
            try:
                logits = Logits(rows, first[active], 1 + len(draft))
                hidden = output.hidden_of(active.slot, ahead, 1 + len(draft))
                draw = KeyedDraw(sequence, own.get(active))
                steps[active] = self._verify(draw, draft, kept, logits, hidden)
            except Exception as error:
                sequence.fail(error)
                emitted = sequence.output_length - root
                sequence.stats.record(len(draft), max(emitted - 1, 0), emitted)
        return steps

    def _own_tokens(
        self, rows: Tensor, first: Mapping[_Active, int], trimmed: Mapping[_Active, tuple[Draft, Seq[int]]]
    ) -> dict[_Active, dict[int, int]]:
        """The target's own tokens by node, of the sequences whose walk follows them.

        Args:
            first: the row of each sequence's root.
        """
        chosen = [active for active in first if self.verifier.uses_own_tokens(active.sequence.params)]
        trees = [active.sequence.tree(trimmed[active][0].guesses, first[active]) for active in chosen]
        return dict(zip(chosen, own_tokens(rows, trees), strict=True))

    def _verify(
        self, draw: KeyedDraw, draft: Draft, kept: Seq[int], logits: Logits, hidden: dict[int, Tensor]
    ) -> Step:
        sequence = draw.sequence
        verdict = self.verifier.verify(logits, draft.guesses, draw)
        sequence.stats.record(len(draft), len(verdict.path), len(verdict.tokens))
        return Step(
            draft=draft,
            kept=kept,
            path=verdict.path,
            tokens=verdict.tokens,
            logits=logits,
            root=draw.root,
            sequence=sequence,
            hidden=hidden,
            committed=_committed(hidden, verdict.path),
        )

    def _observe(self, steps: Mapping[_Active, Step]) -> None:
        """Tell the drafter, then the observer, what became of the drafts."""
        for members in self._calls(steps):
            try:
                self.drafter.observe([a.state for a in members], [steps[a] for a in members])
            except Exception as error:
                _fail(members, error)
        if self.observer is not None and steps:
            self.observer.stepped(list(steps.values()))

    # -- memory ------------------------------------------------------------------------------------------

    def make_room(self, slots: int, length: int) -> None:
        """A new cache in place of this one, larger or smaller; what drafters remember is kept.

        Raises:
            OutpaceError: sequences are being decoded, whose rows lie in the cache.
        """
        with self._turn.taken():
            if self._active:
                raise OutpaceError(
                    "sequences are being decoded, and their rows lie in the cache; remove them first"
                )
            self._cache, self.room = self.target.new_cache(slots, length), (slots, length)

    # -- the governor ------------------------------------------------------------------------------------

    def save_costs(self, path: str | Path) -> None:
        """Write the measured costs of steps into a profile, for ``Engine(..., costs=path)``.

        Its other fields, and profiles of other models, dtypes and machines in the file, are kept.

        Raises:
            OutpaceError: this engine has no governor, or the path holds something else.
        """
        if not isinstance(self.governor, Governor):
            raise OutpaceError("nothing was measured: make the engine with adaptive=True")
        save_costs(path, self.target, self.governor.costs())

    # -- joining and leaving -----------------------------------------------------------------------------

    def _join(self) -> int:
        """Prefill those that wait, but for the last token of each prompt, which is the first root.

        Where nobody else is in the batch, the last rows of the prompts, as many of each, are left to the
        first step's forward: one forward less. (Not for a drafter that reads hidden states: it needs those of
        the prompt before it drafts.) A static cache has no more slots than it has: the rest wait on
        until one is free.

        Returns:
            The number of rows left to the step.
        """
        self._waiting = [sequence for sequence in self._waiting if sequence.finish_reason is None]
        most = self._cache.max_slots
        free = len(self._waiting) if most is None else most - len(self._cache)
        waiting = self._waiting[:free]
        if not waiting:
            return 0
        began = self._clock()
        first = len(self._active)
        for sequence in waiting:
            self._waiting.remove(sequence)
            sequence.stats.lossy = self.verifier.lossy
            try:
                slot = self.target.open(self._cache, sequence.source)
            except Exception as error:
                sequence.fail(error)
                continue
            self._active.append(_Active(sequence, slot, next(self._numbers)))
        joined = self._active[first:]
        if not joined:
            return 0
        tokens = [a.sequence.tokens for a in joined]
        leaves = first == 0 and not self._layers
        ahead = min(self.prefill_chunk, *(len(own) - 1 for own in tokens)) if leaves else 0
        try:
            hidden = self._prefill(
                {a.slot: own[: len(own) - 1 - ahead] for a, own in zip(joined, tokens, strict=True)}
            )
        except Exception as error:
            _fail(joined, error)
            self._leave([a.sequence for a in joined])
            return 0
        self._start(joined, hidden)
        seconds = self._clock() - began
        for sequence in waiting:
            sequence.stats.seconds_prefill += seconds
        self._leave([a.sequence for a in joined if a.sequence.error is not None])
        return ahead if self._active else 0

    def _start(self, joined: Seq[_Active], hidden: Seq[Mapping[int, Tensor]]) -> None:
        """Let the drafter and the observer begin with sequences whose prompts are in the cache."""
        for active in joined:
            active.sequence.place = Place(self._cache, active.slot)
            try:
                active.state = self.drafter.start(active.sequence, self._shared)
                active.started = True
            except Exception as error:
                active.sequence.fail(error)
        states = dict(zip(joined, hidden, strict=False))  # none where no prompt had a row
        read = [a for a in joined if a.started and self._layers and len(a.sequence.tokens) > 1]
        if read:
            try:
                self.drafter.read([a.state for a in read], [states[a] for a in read])
            except Exception as error:
                _fail(read, error)
        if self.observer is not None:
            for active in joined:
                if active.started:
                    self.observer.joined(active.sequence, states[active] if active in read else {})

    def _prefill(self, texts: Mapping[Slot, Seq[int]]) -> list[dict[int, Tensor]]:
        """Feed a text to each slot.

        Returns:
            For each the hidden states of its rows, by layer, for the layers that the drafter reads; nothing
            where a text has no row.
        """
        parts: list[list[dict[int, Tensor]]] = [[] for _ in texts]
        for start in range(0, max(map(len, texts.values())), self.prefill_chunk):
            chunks = {slot: text[start : start + self.prefill_chunk] for slot, text in texts.items()}
            fed = {slot: Rows(chunk) for slot, chunk in chunks.items() if chunk}
            output = self.target.forward(self._cache, fed, None, hidden_layers=self._layers)
            self._cache.keep({slot: range(len(chunk)) for slot, chunk in chunks.items()})
            for own, (slot, chunk) in zip(parts, chunks.items(), strict=True):
                if chunk:
                    own.append(output.hidden_of(slot, 0, len(chunk)))
        layers = self._layers
        return [
            {layer: torch.cat([rows[layer] for rows in own]) for layer in layers} if own else {}
            for own in parts
        ]

    def _leave(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            place = next((i for i, a in enumerate(self._active) if a.sequence is sequence), None)
            if place is None and sequence not in self._waiting:
                continue
            if place is None:
                self._waiting.remove(sequence)
            else:
                self._free(place)
            if sequence.finish_reason is None:
                sequence.finish_reason = "removed"

    def _free(self, place: int) -> None:
        """Give back what a sequence of the batch holds."""
        gone = self._active.pop(place)
        self._cache.free(gone.slot)
        if gone.started:
            try:
                self.drafter.stop(gone.state)
            except Exception as error:
                gone.sequence.fail(error)
            if self.observer is not None:
                self.observer.left(gone.sequence)
        gone.sequence.place = None


def _fail(members: Iterable[_Active], error: Exception) -> None:
    for active in members:
        active.sequence.fail(error)


def _rows_kept(step: Step, ahead: int) -> list[int]:
    """Rows that a step commits: 0 .. ahead - 1 of the prompt, the root's, and those of the accepted nodes."""
    return [*range(ahead + 1), *(ahead + 1 + node for node in step.path)]


def _committed(hidden: Mapping[int, Tensor], path: Seq[int]) -> dict[int, Tensor]:
    """Of hidden states [1 + nodes, size] those of the root and of a path."""
    rows = [0, *(node + 1 for node in path)]
    return {layer: states[rows] for layer, states in hidden.items()}
