"""Speculative decoding with a draft model (Leviathan et al. 2023; Chen et al. 2023; Daliri et al. 2024).

A smaller model with the target's vocabulary decodes a chain of tokens for the target to verify. It has a
cache of its own, which is cut back to the committed text after each step and then lacks the one or two
tokens it has not seen: those go in with the next root.

What differs from the papers: by default the draft model draws with the target's own noise, so the two
choose the same token far more often than independent draws do (Daliri et al. 2024), and the tokens are
those of plain decoding. A verifier that needs independent drafts gets independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from outpace import nano_draft_path
from outpace.cache import KVCache, Slot
from outpace.core import Draft, NoTokenLeft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.sequence import KeyedDraw, Sequence, Step
from outpace.targets import Rows, Target, TargetModel
from outpace.tree import chain

_CHUNK = 512  # prompt tokens fed in one forward
_LATE = 2  # committed tokens the cache lacks after a step: the root, and a last guess that was accepted


@dataclass(frozen=True)
class Shared:
    """What the sequences of one engine share: the draft model and its cache."""

    model: TargetModel
    cache: KVCache


@dataclass
class DraftModelState:
    """A sequence's slot in the draft cache, and the guesses made for its next step.

    The slot's rows are those of the first ``base`` tokens of the text and of guesses after it. ``rows`` maps
    a parent node to the distribution its child was drawn from.
    """

    sequence: Sequence
    shared: Shared
    slot: Slot
    base: int = 0
    guessed: list[int] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftModel(Drafter[DraftModelState]):
    """A smaller model with the same vocabulary.

    Attributes:
        model: a target, a loaded model, or a name or path for transformers to load (safetensors only), in
            the target's dtype and on its device. None is the embedded draft model.
        num_draft_tokens: K, tokens drafted in a step, at least 1.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": its most probable tokens. (The same where
            decoding is greedy.)
    """

    model: Any = field(default=None, repr=False)
    num_draft_tokens: int = 4
    draws: Literal["coupled", "independent", "greedy"] = "coupled"

    paper: ClassVar[str] = (
        "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding "
        "(arXiv 2211.17192); Chen et al. 2023, Accelerating Large Language Model Decoding with Speculative "
        "Sampling (arXiv 2302.01318); coupled draws: Daliri et al. 2024 (arXiv 2408.07978)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise OutpaceError(
                f"draft_model: num_draft_tokens must be at least 1, not {self.num_draft_tokens}"
            )
        if self.draws not in ("coupled", "independent", "greedy"):
            raise OutpaceError(
                f"draft_model: draws must be 'coupled', 'independent' or 'greedy', not {self.draws!r}"
            )

    def prepare(self, target: TargetModel) -> Shared:
        model = _load(self.model, target)
        if model.vocabulary != target.vocabulary:
            raise OutpaceError(
                f"draft_model: the draft model has {model.vocabulary} token ids and the target "
                f"{target.vocabulary}; they need the same vocabulary"
            )
        return Shared(model, model.new_cache())

    def start(self, sequence: Sequence, shared: Shared) -> DraftModelState:
        return DraftModelState(sequence, shared, shared.cache.allocate())

    def stop(self, state: DraftModelState) -> None:
        state.shared.cache.free(state.slot)

    def propose(self, states: Seq[DraftModelState]) -> list[Draft]:
        wanted = {}
        for state in states:
            _rewind(state)
            count = self._count(state)
            if count > 0:
                wanted[id(state)] = count
        active = [state for state in states if id(state) in wanted]
        _catch_up(active)
        feeds = [state.sequence.tokens[state.base :] for state in active]
        while active:
            rows = _feed(active, feeds)
            best = rows.argmax(dim=-1).tolist()
            drawn = [self._draw(state, rows[place], best[place]) for place, state in enumerate(active)]
            active = [
                state
                for state, more in zip(active, drawn, strict=True)
                if more and self._goes_on(state, wanted[id(state)])
            ]
            feeds = [[state.guessed[-1]] for state in active]
        return [_draft(state) for state in states]

    def observe(self, states: Seq[DraftModelState], steps: Seq[Step]) -> None:
        for state in states:
            _rewind(state)

    def _count(self, state: DraftModelState) -> int:
        """Tokens to draft: no more than could be accepted, and none past the draft model's own context."""
        sequence, context = state.sequence, state.shared.model.context
        count = min(self.num_draft_tokens, sequence.room - 1)
        # The last guess is not fed: with the root, K guesses need K - 1 rows more than the text.
        return count if context is None else min(count, context - len(sequence.tokens) + 1)

    def _draw(self, state: DraftModelState, row: Tensor, best: int) -> bool:
        """Guess one token more; False if the draft model has none to offer (NaN, or all excluded)."""
        sequence, node = state.sequence, len(state.guessed)
        distribution = None
        if sequence.processor.plain:
            token = best
        elif self.draws == "greedy":
            token = int(sequence.processor.adjust(row, state.guessed).argmax())
        else:
            coupled = self.draws == "coupled"
            try:
                token, distribution = KeyedDraw(sequence).draft(row, state.guessed, node, coupled)
            except NoTokenLeft:
                return False
        state.guessed.append(token)
        if distribution is not None:
            state.rows[node - 1] = distribution
        return True

    def _goes_on(self, state: DraftModelState, wanted: int) -> bool:
        return len(state.guessed) < wanted and state.guessed[-1] not in state.sequence.stop_tokens


def _draft(state: DraftModelState) -> Draft:
    draft = chain(state.guessed)
    return Draft(draft.tokens, draft.parents, state.rows) if state.rows else draft


def _rewind(state: DraftModelState) -> None:
    """Cut the cache back to the guesses that came true, but for the next root, and forget the rest."""
    cache, tokens = state.shared.cache, state.sequence.tokens
    most = min(cache.lengths[state.slot.index], len(tokens) - 1)
    kept = min(state.base, most)
    for guess in state.guessed:
        if kept == most or tokens[kept] != guess:
            break
        kept += 1
    if state.guessed:
        cache.truncate(state.slot, kept)
    state.base, state.guessed, state.rows = kept, [], {}


def _catch_up(states: Seq[DraftModelState]) -> None:
    """Feed, in chunks and short of its root, each text of which the cache lacks more than a step leaves."""
    while behind := [s for s in states if len(s.sequence.tokens) - s.base > _LATE]:
        ends = [min(s.base + _CHUNK, len(s.sequence.tokens) - 1) for s in behind]
        chunks = [s.sequence.tokens[s.base : end] for s, end in zip(behind, ends, strict=True)]
        _feed(behind, chunks, logits_from=None)


def _feed(states: Seq[DraftModelState], tokens: Seq[Seq[int]], logits_from: int | None = 0) -> Tensor:
    """One forward of the draft model; the logits after each sequence's last token, [B, vocabulary]."""
    shared = states[0].shared
    # The order of the states is the engine's, that of the slots the cache's.
    first = min(state.slot.index for state in states)
    rows = [Rows(())] * (max(state.slot.index for state in states) - first + 1)
    for state, new in zip(states, tokens, strict=True):
        rows[state.slot.index - first] = Rows(new)
    output = shared.model.forward(shared.cache, rows, first, logits_from)
    shared.cache.keep([range(len(row.tokens)) for row in rows])
    for state, new in zip(states, tokens, strict=True):
        if not state.guessed:
            state.base += len(new)
    if output.logits is None:
        return torch.empty(0)
    places = [state.slot.index - first for state in states]
    return output.logits[places, [len(new) - 1 for new in tokens]]


def _load(model: Any, target: TargetModel) -> TargetModel:
    """The draft model as a target."""
    if model is None:
        model = nano_draft_path()
    if not isinstance(model, str | Path):
        return Target(model)
    from transformers import AutoModelForCausalLM

    like = getattr(target, "model", None)
    options = {} if like is None else {"dtype": like.dtype}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(str(model), use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        raise OutpaceError(f"draft_model: transformers cannot load {str(model)!r}: {error}") from error
    return Target(loaded if like is None else loaded.to(like.device))
