"""Copying from references sent with the request: an earlier version, a predicted output, documents.

LLMA (Yang et al. 2023, arXiv 2304.04487, section 3) finds the output's last tokens in a reference and drafts
the tokens that follow there. Aggressive decoding (Sun, Ge, Wei, Wang 2021, arXiv 2106.04970, section 3)
drafts the input from its beginning, and after a difference continues where the two texts agree again. With
Predicted Outputs (OpenAI 2024) the request contains the text.

Differences: after an edit, drafting does not wait until an n-gram matches again, but drafts several
continuations (k tokens replaced, inserted or deleted) as branches of one tree. Of an n-gram's many
occurrences, those near the place where the output left the text are used. Several references are followed at
once. Drafts get longer while copies are accepted completely, and shorter otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.sequence import Sequence, Step
from outpace.tree import Trie


class NgramPlaces:
    """The places of all n-grams of a text, in order. Look-ups take time independent of the text's length.

    A place is the index of the token that follows an n-gram; the n-gram at the end of the text has none.

    Args:
        text: token ids.
        max_ngram: the longest n-grams that are indexed, at least 1.
    """

    def __init__(self, text: Seq[int], max_ngram: int) -> None:
        self._sizes = range(max_ngram, 0, -1)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place in range(1, len(text)):
            for size in range(1, min(max_ngram, place) + 1):
                self._places.setdefault(tuple(text[place - size : place]), []).append(place)

    def longest(self, tokens: Seq[int]) -> tuple[int, Seq[int]]:
        """The longest n-gram at the end of ``tokens`` that occurs in the text: its length and its places.

        The length is 0 if not even the last token occurs.
        """
        for size in self._sizes:
            if size <= len(tokens):
                places = self._places.get(tuple(tokens[-size:]))
                if places is not None:
                    return size, places
        return 0, ()


def nearest(places: Seq[int], cursor: int) -> int:
    """The first of the sorted places at or after ``cursor``; if there is none, the last one before it."""
    return places[min(bisect_left(places, cursor), len(places) - 1)]


_SURE = 2  # consecutive equal tokens that establish a place of the text
_NEAR = 8  # within this many tokens of the place where the output left a text, one equal token is enough
_LONGEST_EDIT = 8  # output tokens of an edit beyond which its end is no longer guessed


@dataclass(eq=False)
class Trail:
    """The output's place in one reference.

    Attributes:
        text: the reference's tokens.
        index: its n-grams.
        place: index of the next token to copy, or, after a difference, of the token where the output left
            the text.
        away: output tokens since it left the text; 0 while it follows the text; None if it never did.
        run: number of consecutive tokens that agreed.
    """

    text: tuple[int, ...]
    index: NgramPlaces
    place: int = 0
    away: int | None = None
    run: int = 0

    def near(self, place: int) -> bool:
        return self.away is not None and abs(place - self.place) <= _NEAR

    def follow(self, place: int, run: int, away: int) -> None:
        """Record that the output agrees with the text up to ``place``, and ``away`` other tokens followed."""
        self.place, self.run, self.away = place, run, away

    def lose(self, tokens: int) -> None:
        """Record that ``tokens`` further output tokens did not follow the text."""
        self.away = None if self.away is None else self.away + tokens


@dataclass(eq=False)
class Lead:
    """A place of a reference to copy from.

    Attributes:
        evidence: number of tokens before it that equal the output's last ones; 0 if they are not evidence.
        nodes: nodes of the draft that were copied from it.
    """

    trail: Trail
    place: int
    evidence: int
    nodes: list[int] = field(default_factory=list)

    def grow(self, trie: Trie, count: int, budget: int, stops: frozenset[int]) -> bool:
        """Copy ``count`` more tokens within the budget of nodes; return False if the copy ends there."""
        place = self.place + len(self.nodes)
        text = self.trail.text[place : place + count]
        ends = next((i for i, token in enumerate(text, 1) if token in stops), None)
        self.nodes += trie.add(text[:ends], under=self.nodes[-1] if self.nodes else -1, budget=budget)
        return ends is None and len(text) == count

    def agreed(self, tokens: Seq[int]) -> int:
        """Length of the longest prefix of ``tokens`` that the text has at the place."""
        text = self.trail.text[self.place : self.place + len(tokens)]
        for count, (own, token) in enumerate(zip(text, tokens, strict=False)):
            if own != token:
                return count
        return len(text)


@dataclass
class ReferenceState:
    """A sequence, its references, the places to copy from next, best first, and the length of its drafts."""

    sequence: Sequence
    trails: list[Trail]
    length: int
    leads: list[Lead] = field(default_factory=list)


@dataclass(frozen=True)
class Reference(SequenceDrafter[ReferenceState]):
    """Copying from the request's references, resynchronised after each edit.

    The first reference is drafted from its beginning, the others from where the output's last tokens occur in
    them. Pass references with the request: ``engine.add(prompt, params, references=[ids, ...])``.

    Attributes:
        num_speculative_tokens: tokens drafted in the first step, and the maximum unless copies are accepted
            completely.
        max_speculative_tokens: maximum number of tokens drafted per step: the draft doubles while copies are
            accepted completely.
        max_ngram: the longest n-gram looked up, at least 1.
        branches: places copied from at once; the draft branches where they disagree. 1 drafts chains.
        prompt: copy from the prompt of a request without references. (transformers' generate() has no
            argument for references.)
    """

    num_speculative_tokens: int = 16
    max_speculative_tokens: int = 96
    max_ngram: int = 4
    branches: int = 3
    prompt: bool = True

    when: ClassVar[str] = "for edits, code and documents: a text that the output repeats"
    needs: ClassVar[str] = "references with the request"
    paper: ClassVar[str] = (
        "Yang et al. 2023, Inference with Reference (arXiv 2304.04487); Sun et al. 2021, Instantaneous "
        "Grammatical Error Correction with Shallow Aggressive Decoding (arXiv 2106.04970)"
    )

    def __post_init__(self) -> None:
        self.check_least(
            num_speculative_tokens=1,
            max_speculative_tokens=self.num_speculative_tokens,
            max_ngram=1,
            branches=1,
        )
        self.check_most(max_ngram=2**16)

    @property
    def trees(self) -> bool:
        return self.branches > 1

    @property
    def reads_references(self) -> bool:
        return True

    def start(self, sequence: Sequence, shared: Any) -> ReferenceState:
        texts = [_ended(text, sequence) for text in sequence.references if text]
        trails = [Trail(text, NgramPlaces(text, self.max_ngram)) for text in texts]
        if trails and not sequence.output_length:
            # There is no match yet; the best guess is that the output begins as the text does.
            trails[0].away, trails[0].run = 0, self.max_ngram
        if not trails and self.prompt:
            text = tuple(sequence.tokens)
            trails.append(Trail(text, NgramPlaces(text, self.max_ngram)))
        state = ReferenceState(sequence, trails, self.num_speculative_tokens)
        state.leads = self._leads(state)
        return state

    def draft(self, state: ReferenceState) -> Draft:
        for lead in state.leads:
            lead.nodes = []
        growing = self._chosen(state.leads)
        budget = state.length if _sure(growing) else min(state.length, self.num_speculative_tokens)
        trie = Trie()
        # Copies grow in parallel: where they agree they share nodes, where they differ the budget.
        while growing and len(trie) < budget:
            count = 1 if len(growing) > 1 else budget - len(trie)
            stops = state.sequence.stop_tokens
            growing = [lead for lead in growing if lead.grow(trie, count, budget, stops)]
        return trie.draft()

    def learn(self, state: ReferenceState, step: Step) -> None:
        new = step.tokens
        agreed = {lead: lead.agreed(new) for lead in state.leads}
        for trail in state.trails:
            own = [lead for lead in agreed if lead.trail is trail]
            lead = max(own, key=agreed.__getitem__, default=None)
            if lead is None or not _believable(lead, agreed[lead]):
                trail.lose(len(new))
            else:
                run = lead.evidence + agreed[lead]
                trail.follow(lead.place + agreed[lead], run, len(new) - agreed[lead])
        copied = [lead for lead in agreed if lead.nodes]
        if copied:
            best = max(copied, key=agreed.__getitem__)
            whole = agreed[best] > 0 and agreed[best] >= len({*best.nodes}.intersection(step.kept))
            state.length = self._length(state.length, agreed[best], whole)
        # Not in ``draft``, which is not called in every step.
        state.leads = self._leads(state)

    def _length(self, length: int, agreed: int, whole: bool) -> int:
        """Number of tokens to draft next: more after a copy that was accepted completely, fewer otherwise."""
        if whole:
            return min(self.max_speculative_tokens, max(self.num_speculative_tokens, 2 * length))
        return min(self.num_speculative_tokens, max(2 * self.branches, length // 2, 2 * agreed))

    def _leads(self, state: ReferenceState) -> list[Lead]:
        """Places where the output may continue, the likeliest first."""
        found, guessed, far = [], [], []
        most = min(self.max_ngram, state.sequence.output_length or self.max_ngram)
        for trail in state.trails:
            if trail.away == 0 and trail.place < len(trail.text):
                found.append(Lead(trail, trail.place, min(trail.run, most)))
                continue
            guessed += [Lead(trail, place, 0) for place in _ways_on(trail)]
            length, places = trail.index.longest(state.sequence.tokens)
            if not length:
                continue
            place = nearest(places, trail.place)
            if length >= _SURE or len(places) == 1 or trail.near(place):
                found.append(Lead(trail, place, length))
            else:
                far.append(Lead(trail, place, 0))
        found.sort(key=lambda lead: -lead.evidence)
        once = {(lead.trail, lead.place): lead for lead in reversed([*found, *guessed, *far])}
        return list(reversed(once.values()))

    def _chosen(self, leads: Seq[Lead]) -> list[Lead]:
        """The leads to draft from: those with the most evidence, or all if there is little."""
        if _sure(leads):
            leads = [lead for lead in leads if lead.evidence == leads[0].evidence]
        return list(leads[: self.branches])


def _sure(leads: Seq[Lead]) -> bool:
    return bool(leads) and leads[0].evidence >= _SURE


def _believable(lead: Lead, agreed: int) -> bool:
    """True if enough tokens agree to accept this as the output's place, or it is the first place to try."""
    return agreed > 0 and (lead.trail.near(lead.place) or lead.evidence + agreed > _SURE)


def _ways_on(trail: Trail) -> list[int]:
    """Places where the output's current edit may end, the likeliest first.

    The order suits corrected spelling, since a misspelt word has one or two tokens more than the correct one.
    Next comes the edit that replaces as many tokens as it inserts.
    """
    if not trail.away or trail.away > _LONGEST_EDIT:
        return []
    same = trail.place + trail.away
    around = (same + 1, same + 2, same, same + 3, same - 1)
    return [place for place in around if trail.place <= place < len(trail.text)]


def _ended(text: Seq[int], sequence: Sequence) -> tuple[int, ...]:
    """A reference, with the token that would end it as an output appended."""
    return (*text, *sorted(sequence.eos_token_ids)[:1])
