"""One step of a batch: draft, forward, verify, keep, observe, learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import CacheFull, Slot
from outpace.core import Draft
from outpace.draws.logits import Logits
from outpace.draws.own_tokens import own_tokens
from outpace.engine.active import NOTHING, Active, by_drafter, check_draft, fail
from outpace.engine.clock import StepClock
from outpace.engine.observer import Observer
from outpace.engine.running import RunningBatch
from outpace.sequence import KeyedDraw, Sequence, Step
from outpace.targets import Output, Rows, TargetModel
from outpace.targets.batch import Building
from outpace.transfer import upload
from outpace.tree import few_leaves, trim
from outpace.verify import Verifier

_log = logging.getLogger(__name__)


class TrimmedDraft(NamedTuple):
    """A draft to verify, and the proposal's node for each of its nodes."""

    draft: Draft
    kept: Seq[int]


class Stepper:
    """Runs the steps of an engine's batch.

    Args:
        target, verifier, observer, clock: the engine's.
    """

    def __init__(
        self,
        target: TargetModel,
        verifier: Verifier,
        batch: RunningBatch,
        observer: Observer | None,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._verifier = verifier
        self._batch = batch
        self._observer = observer
        self._clock = clock

    def advance(self, decoding: Seq[Active]) -> None:
        """Run one step.

        Args:
            decoding: the sequences that decode in it, which are ready.
        """
        clock = StepClock(self._clock)
        # Those that only wait for their drafter feed nothing in this step.
        prompts = {a: a.chunk for a in self._batch.active if a.chunk or (a.chunk == 0 and a.ready)}
        early = _early(decoding)
        drafts = self._draft(decoding, early)
        clock.end("draft")
        output = self._forward(drafts, prompts)
        steps, own = self._verify(drafts, output)
        clock.end("verify")
        self._batch.scheduler.charge(own, clock.seconds["verify"])
        fed = self._keep(steps, output, prompts)
        clock.end("keep")
        rows, read = sum(len(cut.draft) + 1 for cut in drafts.values()), sum(fed.values())
        if output is not None:
            self._measure(len(drafts), rows, read, clock.forward)
        self._observe(steps)
        clock.end("observe")
        self._learn(steps, early, rows, read, clock)
        self._finish(fed, output)
        clock.end("learn")
        _charge(decoding, prompts, clock)

    def _measure(self, decoding: int, rows: int, prompts: int, seconds: float) -> None:
        """Note what a forward took, and what it leaves for work beside steps."""
        scheduler = self._batch.scheduler
        scheduler.pace.measured(decoding, rows, prompts, seconds)
        own = scheduler.pace.without(prompts, seconds)
        if own is None:
            own = seconds * rows / (rows + prompts)
        scheduler.allowance.earn(own, seconds - own)

    # -- draft -------------------------------------------------------------------------------------------

    def _draft(self, decoding: Seq[Active], early: Container[Active]) -> dict[Active, TrimmedDraft]:
        """A draft per sequence, from its own drafter, cut to what is verified; none if the draft is wrong."""
        proposals = dict.fromkeys(decoding, NOTHING)
        for drafting, members in by_drafter(a for a in decoding if a not in early).items():
            drafting.decide(members)
            proposals |= drafting.propose(members)
        return self._cut(proposals)

    def _cut(self, proposals: Mapping[Active, Draft]) -> dict[Active, TrimmedDraft]:
        """The drafts to verify.

        For a target that takes chains only, a tree is first cut to its likeliest path, so that all of the
        nodes that pay are on it.
        """
        drafts: dict[Active, TrimmedDraft] = {}
        leaves = self._target.max_leaves
        for active, draft in proposals.items():
            try:
                whole: Seq[int] = range(len(draft))
                if self._target.why_chains_only:
                    draft, whole = few_leaves(draft, 1)
                # A path of n nodes emits n + 1 tokens, so nodes deeper than room - 1 are useless.
                nodes = self._nodes_left(active, draft)
                cut, nodes_kept = trim(draft, active.sequence.room - 1, nodes)
                kept = [whole[node] for node in nodes_kept]
                if leaves is not None:
                    cut, nodes_kept = few_leaves(cut, max(leaves // len(proposals), 1))
                    kept = [kept[node] for node in nodes_kept]
                drafts[active] = TrimmedDraft(cut, kept)
                check_draft(draft, self._target)
            except Exception as error:
                fail([active], error)
        self._batch.leave([a.sequence for a in proposals if a.sequence.error is not None])
        return drafts

    def _nodes_left(self, active: Active, draft: Draft) -> int:
        """The number of nodes of a draft to verify, within the room that the slot has or can reserve."""
        nodes, length = active.drafting.nodes(active, draft), len(active.sequence.tokens)
        if length + nodes > self._batch.cache.room(active.slot):
            try:
                self._batch.cache.reserve(active.slot, length + nodes)
            except CacheFull:  # a draft preempts no sequence
                nodes = self._batch.cache.room(active.slot) - length
        return int(nodes)

    # -- forward -----------------------------------------------------------------------------------------

    def _forward(self, drafts: Mapping[Active, TrimmedDraft], prompts: Mapping[Active, int]) -> Output | None:
        """The target's forward over the roots and drafts of a batch; None if no sequence is left."""
        building, members = Building(), list[Active]()
        for active, (draft, _) in drafts.items():
            sequence, ahead = active.sequence, active.ahead
            if sequence.error is None:
                asked = sequence.tree(draft.guesses, 0, active.drafting.top) if self._target.tells else None
                rows = Rows.under(sequence.tokens[-1 - ahead :], draft)
                building.add(active.slot, rows, read=ahead, asked=asked)
                members.append(active)
        for active, chunk in prompts.items():
            if not active.ready:
                self._batch.add_chunk(building, active, chunk)
                members.append(active)
        output = self._batch.forward(building.made(), members)
        if output is not None:
            self._batch.read_ahead(output)
        return output

    # -- verify ------------------------------------------------------------------------------------------

    def _verify(
        self, drafts: Mapping[Active, TrimmedDraft], output: Output | None
    ) -> tuple[dict[Active, Step], dict[Active, float]]:
        """Verify each sequence's draft and emit its tokens; a sequence that fails has no entry."""
        steps: dict[Active, Step] = {}
        seconds: dict[Active, float] = {}
        if output is None:
            return steps, seconds
        for active, (logits, own) in self._logits(output, drafts).items():
            sequence, root = active.sequence, active.sequence.output_length
            draft, timed = drafts[active].draft, bool(sequence.params.logits_processors)
            began = self._clock() if timed else 0.0
            try:
                hidden = output.hidden_of(active.slot, active.ahead, 1 + len(draft))
                steps[active] = self._verdict(sequence, drafts[active], logits, hidden, own)
            except Exception as error:
                sequence.fail(error)
                emitted = sequence.output_length - root
                sequence.stats.record(len(draft), max(emitted - 1, 0), emitted)
            if timed:
                seconds[active] = self._clock() - began
        return steps, seconds

    def _logits(
        self, output: Output, drafts: Mapping[Active, TrimmedDraft]
    ) -> dict[Active, tuple[Logits, dict[int, int]]]:
        """Each sequence's logits, and the target's own tokens as far as they are computed in advance."""
        batch = [a for a in drafts if a.sequence.error is None]
        if output.told:
            return {a: (output.told[a.slot], output.told[a.slot].own) for a in batch}
        if not batch:  # prompts alone, whose logits are not returned
            return {}
        assert output.logits is not None
        rows, roots = output.logits, {a: output.spans[a.slot].start for a in batch}
        own = self._own_tokens(rows, output.array, roots, drafts)
        return {a: (Logits(rows, roots[a], 1 + len(drafts[a].draft)), own.get(a, {})) for a in batch}

    def _own_tokens(
        self,
        rows: Tensor,
        array: NDArray[np.float32] | None,
        roots: Mapping[Active, int],
        drafts: Mapping[Active, TrimmedDraft],
    ) -> dict[Active, dict[int, int]]:
        """The target's own tokens by node, for the sequences whose verification follows them."""
        chosen = [active for active in roots if self._verifier.uses_own_tokens(active.sequence.params)]
        try:
            trees = [active.sequence.tree(drafts[active].draft.guesses, roots[active]) for active in chosen]
            return dict(zip(chosen, own_tokens(rows, trees, array), strict=True))
        except Exception:  # then an error of one sequence ends only that sequence
            _log.warning("tokens are chosen node by node in this step", exc_info=True)
            return {}

    def _verdict(
        self,
        sequence: Sequence,
        cut: TrimmedDraft,
        logits: Logits,
        hidden: dict[int, Tensor],
        own: Mapping[int, int],
    ) -> Step:
        """Verify one sequence's draft, which emits its tokens."""
        draw = KeyedDraw(sequence, own)
        verdict = self._verifier.verify(logits, cut.draft.guesses, draw)
        sequence.stats.record(len(cut.draft), len(verdict.path), len(verdict.tokens))
        return Step(
            draft=cut.draft,
            kept=cut.kept,
            path=verdict.path,
            tokens=verdict.tokens,
            logits=logits,
            root=draw.root,
            sequence=sequence,
            hidden=hidden,
            committed=_committed(hidden, verdict.path),
            own=own,
        )

    # -- keep, observe, learn ----------------------------------------------------------------------------

    def _keep(
        self, steps: Mapping[Active, Step], output: Output | None, prompts: Mapping[Active, int]
    ) -> dict[Active, int]:
        """Keep the rows of prompts and of accepted tokens; return the number of rows of each prompt."""
        if output is None:
            return {}
        fed = {a: rows for a, rows in prompts.items() if a.sequence.error is None}
        paths: dict[Slot, Seq[int]] = {a.slot: range(rows) for a, rows in fed.items()}
        paths |= {a.slot: _rows_kept(step, a.ahead) for a, step in steps.items()}
        self._batch.cache.keep(paths)
        return fed

    def _observe(self, steps: Mapping[Active, Step]) -> None:
        """Pass the steps to the drafters, then to the observer."""
        for drafting, members in by_drafter(steps).items():
            drafting.observe({a: steps[a] for a in members})
        if self._observer is not None and steps:
            self._observer.stepped(list(steps.values()))

    def _learn(
        self,
        steps: Mapping[Active, Step],
        early: Container[Active],
        rows: int,
        prompts: int,
        clock: StepClock,
    ) -> None:
        """Report the steps to the policies, each with its part of the seconds."""
        pace = self._batch.scheduler.pace
        verifying = pace.without(prompts, clock.forward)
        for drafting, members in by_drafter(steps).items():
            part = sum(len(steps[a].draft) + 1 for a in members) / rows
            drafting.learn(
                {a: steps[a] for a in members if a not in early},
                part * clock.drafting,
                None if verifying is None else part * verifying,
                pace.row_seconds,
            )

    def _finish(self, fed: Mapping[Active, int], output: Output | None) -> None:
        """Take the rows of prompts, and let sequences leave that have ended."""
        if output is not None:
            self._batch.fed(fed, output)
        self._batch.leave([a.sequence for a in self._batch.active if a.sequence.finish_reason is not None])


def _early(decoding: Seq[Active]) -> set[Active]:
    """The sequences whose first step is plain: their drafters wait for the hidden states of their prompts."""
    for active in decoding:
        active.sequence.prompt_unread = active.drafting.reads and bool(active.ahead)
    return {a for a in decoding if a.sequence.prompt_unread and a.drafting.waits}


def _charge(decoding: Iterable[Active], prompts: Mapping[Active, int], clock: StepClock) -> None:
    """Add the seconds of a step to the counts of each sequence in it, in full."""
    for active in decoding:
        active.sequence.stats.seconds_draft += clock.drafting
        active.sequence.stats.seconds_rest += clock.rest
    for active in dict.fromkeys([*decoding, *prompts]):
        stats = active.sequence.stats
        if prompts.get(active):
            stats.seconds_prefill += clock.seconds["verify"]
        else:
            stats.seconds_verify += clock.seconds["verify"]


def _rows_kept(step: Step, ahead: int) -> list[int]:
    """Rows that a step commits: 0 .. ahead - 1 of the prompt, the root, and the accepted nodes."""
    return [*range(ahead + 1), *(ahead + 1 + node for node in step.path)]


def _committed(hidden: Mapping[int, Tensor], path: Seq[int]) -> dict[int, Tensor]:
    """Select the root's and a path's rows of hidden states, shape [1 + nodes, size]."""
    rows = [0, *(node + 1 for node in path)]
    if rows[-1] == len(path):  # copies: the next forward may overwrite what these are views of
        return {layer: states[: len(rows)].clone() for layer, states in hidden.items()}
    places = {device: upload(rows, device) for device in {states.device for states in hidden.values()}}
    return {layer: states[places[states.device]] for layer, states in hidden.items()}
