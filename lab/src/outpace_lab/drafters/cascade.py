"""Staged speculation: a drafter that drafts for the draft model (Spector and Re 2023; Chen et al. 2023).

The draft model decodes its chain as a target would: an inner drafter proposes, the draft model verifies in
one forward and emits at least one token, so a chain of K tokens takes at most K forwards. The chain equals
the one that the draft model would have decoded alone, and the target verifies it: the vertical cascade. With
``tail``, the inner drafter alone drafts the places after it, which are reached less often: the horizontal
one.

Differences from the papers: Spector and Re draft trees at both stages; here the inner stage may be a tree,
the outer one is a chain. Chen et al. set the lengths of each stage by hand; here the inner drafter has its
own, cut at the end of the chain. Their horizontal cascade may have several draft models; here it has one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.support.runner import DraftRunner, Feed, Track
from outpace.draws.logits import Logits
from outpace.sequence import Sequence, Step
from outpace.targets import TargetModel
from outpace.tree import chain, trim
from outpace_lab.drafters.provisional import Decoder, Provisional, decoder_of
from outpace_lab.drafters.staged import verify


@dataclass(frozen=True)
class Shared:
    """Data that an engine's sequences share: the draft model, its cache, the inner drafter's shared data."""

    decoder: Decoder
    runner: DraftRunner
    inner: Any


@dataclass
class CascadeState:
    """A sequence as the draft model decodes it.

    Attributes:
        text: the committed text, followed by the chain.
        inner: the inner drafter's state for that text.
        rows: the distribution that each token of the chain was drawn from.
    """

    sequence: Sequence
    shared: Shared
    text: Provisional
    track: Track
    inner: Any
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Cascade(Drafter[CascadeState]):
    """A draft model that is itself accelerated by another drafter.

    Attributes:
        draft: the drafter for the target: a draft_model that drafts chains.
        inner: the drafter for that model: any that needs no hidden states.
        tail: number of tokens that the inner drafter adds after the chain, at most; the draft model does not
            verify them.
    """

    draft: Drafter[Any]
    inner: Drafter[Any]
    tail: int = 0

    when: ClassVar[str] = "with a draft model that is itself slow"
    needs: ClassVar[str] = "that model"
    paper: ClassVar[str] = (
        "Spector and Re 2023, Accelerating LLM Inference with Staged Speculative Decoding (arXiv "
        "2308.04623); Chen et al. 2023, Cascade Speculative Drafting for Even Faster LLM Inference (arXiv "
        "2312.11462)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_least(tail=0)
        if not isinstance(self.draft, DraftModel):
            raise OutpaceError(
                f"cascade: draft must have a model, as draft_model has; a {type(self.draft).__name__} has "
                "none (it may be the inner drafter)"
            )

    @property
    def reads_references(self) -> bool:
        return self.inner.reads_references

    def prepare(self, target: TargetModel) -> Shared:
        assert isinstance(self.draft, DraftModel)
        decoder = decoder_of(self.draft, target)
        inner = self.inner.prepare(decoder.model)
        if self.inner.hidden_layers(inner):
            raise OutpaceError(
                f"cascade: {type(self.inner).__name__} needs the target's hidden states, which a draft model "
                "does not provide; use another inner drafter"
            )
        return Shared(decoder, DraftRunner(decoder.model), inner)

    def renew(self, shared: Shared, target: TargetModel) -> Shared:
        model = shared.decoder.model
        return Shared(shared.decoder, shared.runner.renewed(), self.inner.renew(shared.inner, model))

    def start(self, sequence: Sequence, shared: Shared) -> CascadeState:
        text = Provisional(sequence, shared.decoder.noise)
        inner = self.inner.start(text, shared.inner)
        return CascadeState(sequence, shared, text, shared.runner.open(), inner)

    def stop(self, state: CascadeState) -> None:
        self.inner.stop(state.inner)
        state.shared.runner.close(state.track)

    def propose(self, states: Seq[CascadeState]) -> list[Draft]:
        active = [state for state in states if self._begin(state)]
        if active:
            runner = active[0].shared.runner
            runner.catch_up([state.track for state in active], [state.text.tokens for state in active])
        reached = list(active)
        while active:
            self._round(active)
            active = [state for state in active if state.text.finish_reason is None]
        tails = self._tails(reached) if self.tail else {}
        return [_draft(state, tails.get(id(state), [])) for state in states]

    def _tails(self, reached: Seq[CascadeState]) -> dict[int, list[int]]:
        """The inner drafter's tokens after each whole chain, by the state's id."""
        lengths: list[tuple[CascadeState, int]] = []
        for state in reached:
            text, length = state.text, len(state.text.chain)
            more = state.sequence.within_reach(length + self.tail) - length
            if text.finish_reason == "length" and more > 0:
                # One more than is drafted, as for a target's bonus.
                text.limit, text.stopped_by = text.output_length + more + 1, None
                lengths.append((state, more))
        proposed = self.inner.propose([state.inner for state, _ in lengths]) if lengths else []
        return {
            id(state): _first_path(draft)[:more]
            for (state, more), draft in zip(lengths, proposed, strict=True)
        }

    def _begin(self, state: CascadeState) -> bool:
        """Update the text to the committed one; return False if there is nothing to draft."""
        text, shared = state.text, state.shared
        length = state.sequence.within_reach(shared.decoder.length)
        if shared.decoder.model.context is not None:
            # The last token of the chain is not fed.
            length = min(length, shared.decoder.model.context - len(state.sequence.tokens) + 1)
        before = len(text.tokens)
        unchanged = text.follow(max(length, 0))
        state.rows = []
        shared.runner.rewind(state.track, text.tokens, unchanged)
        changed = unchanged < max(before, len(text.tokens))
        if changed and not self.inner.revise(state.inner, unchanged):
            self.inner.stop(state.inner)
            state.inner = self.inner.start(text, shared.inner)
        return length > 0

    def _round(self, active: Seq[CascadeState]) -> None:
        """Run one forward of the draft model for all sequences, which adds at least one token per chain."""
        runner = active[0].shared.runner
        proposed = self.inner.propose([state.inner for state in active])
        trimmed = [trim(draft, state.text.room - 1) for state, draft in zip(active, proposed, strict=True)]
        feeds = [
            Feed(state.text.tokens[state.track.stem :], draft.tokens, draft.parents)
            for state, (draft, _) in zip(active, trimmed, strict=True)
        ]
        rows = runner.feed([state.track for state in active], feeds)
        at, steps = 0, []
        for state, (draft, kept) in zip(active, trimmed, strict=True):
            fed = len(state.text.tokens)
            step, drawn = verify(state.text, draft, kept, Logits(rows[at : at + len(draft) + 1]))
            at += len(draft) + 1
            steps.append(step)
            state.rows += drawn
            runner.rewind(state.track, state.text.tokens, fed)
            _count(state.sequence, step)
        self.inner.observe([state.inner for state in active], steps)


def _count(sequence: Sequence, step: Step) -> None:
    """Count the draft model's own steps, and the tokens drafted for it."""
    sequence.stats.count("draft_steps", 1)
    sequence.stats.count("inner_drafted", len(step.draft))
    sequence.stats.count("inner_accepted", len(step.path))


def _first_path(draft: Draft) -> list[int]:
    """Tokens of the first child of the root, its first child, and so on."""
    found, at = [], -1
    for node, parent in enumerate(draft.parents):
        if parent == at:
            found.append(draft.tokens[node])
            at = node
    return found


def _draft(state: CascadeState, tail: Seq[int]) -> Draft:
    draft = chain([*state.text.chain, *tail])
    rows = {place - 1: row for place, row in enumerate(state.rows)}
    if rows:
        # The tail's tokens were chosen: each is certain, whatever it was drawn from.
        for place, token in enumerate(tail, start=len(state.rows)):
            rows[place - 1] = torch.zeros_like(state.rows[0])
            rows[place - 1][token] = 1.0
    return Draft(draft.tokens, draft.parents, rows or None)
