"""Several drafters at once, their trees merged into one (as SpecInfer merges those of several draft models:
Miao et al. 2023, arXiv 2305.09781, section 3).

A node that several parts propose is drafted once. How often a node is right, given a right parent, is
measured by the set of parts that propose it, its depth, and the chance they state or its rank among its
siblings. The emitted tokens decide this for every proposed node, drafted or not, so all parts that propose
are measured and no exploration is needed (Liu et al. 2025, Not-a-Bandit, arXiv 2510.20064, for the choice of
one draft model). A node's probability is the product of the rates on its path, and the likeliest nodes of all
parts are drafted. Their number is the one with the most tokens per time (Leviathan et al. 2023, arXiv
2211.17192, theorem 3.8, for a tree), where a row costs a given share of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.combined.ledger import Guesses, Ledger
from outpace.drafters.combined.parts import OfParts
from outpace.drafters.combined.share import PartStep
from outpace.drafters.support.memories import Memories
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import worthwhile

_CPU_ROW, _ROW = 0.06, 0.01  # assumed cost of a row in plain steps if not measured, on a CPU and elsewhere
_ROUND = 16  # steps within which each part gets its minimum of nodes
_SHORT = 4  # tokens still allowed up to which drafts are too short to measure a part's gains
_NOTHING, _NO_GUESSES = Draft(), Guesses()

Layers = list[tuple[int, ...]]  # the target's layers that each part reads


class CombinedShared(NamedTuple):
    """Data that an engine's sequences share: that of each part, the measurements, the cost of a row."""

    prepared: list[Any]
    ledgers: Memories[Ledger]
    layers: Layers
    row_cost: float


@dataclass
class CombinedState:
    """A sequence's states of the parts, their latest proposals, and the proposals' nodes in the draft.

    ``nodes[part][node]`` is the node of the draft that represents a part's node; -1 if it is not drafted.
    ``guesses`` is the tree of all proposals. ``asked`` has the parts that draft in this step, with the best
    chance that a part before each stated; ``before`` has those that drafted in the step before.
    """

    sequence: Sequence
    states: list[Any]
    ledger: Ledger
    layers: Layers
    row_cost: float
    steps: int = 0
    proposals: list[Draft] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    guesses: Guesses = field(default_factory=Guesses)
    asked: dict[int, float] = field(default_factory=dict)
    before: Collection[int] = ()

    @property
    def turn(self) -> int:
        """The part that gets its minimum of nodes in this step, if there is one of this index."""
        return self.steps % _ROUND


@dataclass(frozen=True)
class Combined(OfParts[CombinedState]):
    """Several drafters at once: their trees are merged, and the likeliest nodes are drafted.

    Parts draft in their order, so give the cheapest first. Those after one that is sure do not draft, nor,
    under a governor, those that add less than their time is worth; but each does in its turn, every sixteenth
    step. A single part drafts as if it were not combined.

    Attributes:
        parts: the drafters, all different, as in ``combined:(lookahead:window=5)+(prompt_lookup)``.
        max_nodes: maximum number of tokens drafted per step, at least 1.
        row_cost: time of a further row as a share of a plain step, at least 0. Nodes are drafted, the
            likeliest first, while one more increases the tokens per time; with 0, all of them. None uses the
            governor's measurement, or without a governor 0.06 on a CPU (measured with a small model) and 0.01
            elsewhere.
        minimum: nodes that each part gets every sixteenth step in any case, so that a part that learns from
            its rows can recover.
        share: measure together all sequences of an engine that share a memory (``Speculation.memory``);
            otherwise each starts without measurements. (Under ``rejection`` the tokens of a seed depend on
            the drafts, and therefore, if shared, on earlier requests.)
        enough: chance of a part's first guess, as the part states it, from which the parts after it do not
            draft; with more than 1, no part is sure enough.
    """

    max_nodes: int = 64
    row_cost: float | None = None
    minimum: int = 4
    share: bool = True
    enough: float = 0.7

    when: ClassVar[str] = "to draft with several at once: the likeliest guesses of all, in one tree"
    needs: ClassVar[str] = "drafters, as in combined:(reference)+(suffix)"
    paper: ClassVar[str] = (
        "Miao et al. 2023, SpecInfer (arXiv 2305.09781), for the merged tree; Liu et al. 2025, Not-a-Bandit: "
        "Provably No-Regret Drafter Selection in Speculative Decoding for LLMs (arXiv 2510.20064), for the "
        "measuring"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        for place, part in enumerate(self.parts):
            if not isinstance(part, Drafter):
                raise OutpaceError(
                    f"combined: a part must be a drafter, as in load_drafter('lookahead'), not {part!r}"
                )
            if part in self.parts[:place]:
                raise OutpaceError(
                    f"combined: {type(part).__name__} is given twice with the same options; equal proposals "
                    "are drafted only once, so leave one out"
                )
        if not self.parts:
            raise OutpaceError("combined: give it parts, as in combined:(lookahead)+(prompt_lookup)")
        self.check_least(max_nodes=1, minimum=0)
        if self.row_cost is not None and not 0 <= self.row_cost < math.inf:
            raise OutpaceError(f"combined: row_cost must be a number of at least 0, not {self.row_cost}")
        if not self.enough > 0:
            raise OutpaceError(f"combined: enough must be above 0, not {self.enough}")

    @property
    def probabilities(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].probabilities

    @property
    def samples(self) -> bool:
        return self.probabilities

    @property
    def drops_distributions(self) -> bool:
        several = len(self.parts) > 1 and any(part.samples for part in self.parts)
        return several or any(part.drops_distributions for part in self.parts)

    @property
    def trees(self) -> bool:
        return len(self.parts) > 1 or self.parts[0].trees

    @property
    def widths(self) -> tuple[int, ...] | None:
        return self.parts[0].widths if len(self.parts) == 1 else None

    @property
    def narrow_widths(self) -> tuple[int, ...]:
        return self.parts[0].narrow_widths if len(self.parts) == 1 else ()

    def prepare(self, target: TargetModel) -> CombinedShared:
        prepared = [part.prepare(target) for part in self.parts]
        layers = [part.hidden_layers(own) for part, own in zip(self.parts, prepared, strict=True)]
        usual = _CPU_ROW if target.device.type == "cpu" else _ROW
        row_cost = usual if self.row_cost is None else self.row_cost
        return CombinedShared(prepared, Memories(Ledger), layers, row_cost)

    def renew(self, shared: CombinedShared, target: TargetModel) -> CombinedShared:
        prepared = [part.renew(own, target) for part, own in zip(self.parts, shared.prepared, strict=True)]
        return shared._replace(prepared=prepared, ledgers=Memories(Ledger))

    def hidden_layers(self, shared: CombinedShared) -> tuple[int, ...]:
        return tuple(sorted({layer for own in shared.layers for layer in own}))

    def drafts_unread(self, shared: CombinedShared) -> bool:
        return not all(shared.layers)

    def start(self, sequence: Sequence, shared: CombinedShared) -> CombinedState:
        ledger = shared.ledgers.memory_of(sequence) if self.share else Ledger()
        state = CombinedState(sequence, [], ledger, shared.layers, shared.row_cost)
        self._clear(state)
        try:
            for part, own in zip(self.parts, shared.prepared, strict=True):
                state.states.append(part.start(sequence, own))
        except BaseException:
            self.stop(state)
            raise
        return state

    def read(self, states: Seq[CombinedState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for place, layers in enumerate(states[0].layers):
            if layers:
                own = [{layer: rows[layer] for layer in layers} for rows in hidden]
                self.parts[place].read([state.states[place] for state in states], own)

    def stop(self, state: CombinedState) -> None:
        for part, own in zip(self.parts, state.states, strict=False):  # fewer states if a start failed
            part.stop(own)

    def revise(self, state: CombinedState, unchanged: int) -> bool:
        self._clear(state)
        own = zip(self.parts, state.states, strict=True)
        return all(part.revise(of_part, unchanged) for part, of_part in own)

    def catch_up(self, state: CombinedState) -> bool:
        return all(part.catch_up(own) for part, own in zip(self.parts, state.states, strict=True))

    def promise(self, state: CombinedState) -> float:
        return max(part.promise(own) for part, own in zip(self.parts, state.states, strict=True))

    def propose(self, states: Seq[CombinedState]) -> list[Draft]:
        for state in states:
            # No turn passes in which its part may not draft.
            state.steps += not state.sequence.prompt_unread
        measured = [state.sequence.row_cost for state in states]
        if len(self.parts) > 1:  # parts grow no guesses that the merged tree leaves out
            for state in states:
                state.sequence.row_cost = self._row_cost(state)
        proposals = [[_NOTHING] * len(self.parts) for _ in states]
        for place, part in enumerate(self.parts):
            asked = [i for i, state in enumerate(states) if self._asked(state, place, proposals[i])]
            if asked:
                began = time.perf_counter()  # by default the engine's clock, too
                found = part.propose([states[i].states[place] for i in asked])
                seconds = (time.perf_counter() - began) / len(asked)
                for i, draft in zip(asked, found, strict=True):
                    state = states[i]
                    # After a pause a part may first read what was emitted since.
                    if place in state.before and _usual(state.sequence):
                        state.ledger.gains.took(place, seconds)
                    state.asked[place] = _best(proposals[i])
                    proposals[i][place] = draft
        for state, row_cost in zip(states, measured, strict=True):
            state.sequence.row_cost = row_cost
        return [self._merge(state, drafts) for state, drafts in zip(states, proposals, strict=True)]

    def _asked(self, state: CombinedState, place: int, drafts: Seq[Draft]) -> bool:
        """True if a part can draft, and is the first, in its turn, or worth it after those before it."""
        if state.sequence.prompt_unread and state.layers[place]:
            return False
        if state.turn == place or not place:
            return True
        best, plain = _best(drafts), state.sequence.plain_seconds
        return best < self.enough and (plain is None or state.ledger.gains.pays(place, best, plain))

    def observe(self, states: Seq[CombinedState], steps: Seq[Step]) -> None:
        for place, part in enumerate(self.parts):
            own = [
                PartStep(step, state.proposals[place], state.nodes[place], state.layers[place])
                if step.draft.tokens or step.hidden
                else step  # there is nothing to restrict
                for state, step in zip(states, steps, strict=True)
            ]
            part.observe([state.states[place] for state in states], own)
        for state, step in zip(states, steps, strict=True):
            self._count(state, step)
            state.ledger.note(state.guesses, step.tokens)
            plain, row_cost = state.sequence.plain_seconds, state.sequence.row_cost
            if plain is not None and row_cost is not None:
                drafting = sum(map(state.ledger.gains.cost, state.asked)) / plain
                state.ledger.gains.step(len(step.tokens), 1 + row_cost * len(step.kept) + drafting)
            self._clear(state)

    def _count(self, state: CombinedState, step: Step) -> None:
        """Count the drafted and accepted nodes of each part."""
        if len(self.parts) > 1:
            verified, accepted = set(step.kept), {step.kept[node] for node in step.path}
            names = [part.name for part in self.parts]
            for place, (name, nodes) in enumerate(zip(names, map(set, state.nodes), strict=True)):
                twin = names[: place + 1].count(name)  # from 1; distinguishes parts of the same name
                name = name if twin == 1 else f"{name}_{twin}"
                state.sequence.stats.count(f"{name}_drafted", len(verified & nodes))
                state.sequence.stats.count(f"{name}_accepted", len(accepted & nodes))

    def _clear(self, state: CombinedState) -> None:
        state.proposals, state.nodes = [_NOTHING] * len(self.parts), [[]] * len(self.parts)
        state.guesses, state.asked, state.before = _NO_GUESSES, {}, state.asked.keys()

    def _merge(self, state: CombinedState, proposals: list[Draft]) -> Draft:
        """The draft of a sequence, the likeliest nodes first."""
        state.proposals = proposals
        if len(proposals) == 1:
            state.nodes = [list(range(len(proposals[0])))]
            return proposals[0]
        chosen = [_chosen(draft) for draft in proposals]
        state.guesses, maps = Guesses.merged(chosen)
        worth = state.ledger.worth(state.guesses)
        granted = maps[state.turn][: self.minimum] if state.turn < len(maps) else ()
        kept = self._choose(state, worth, granted)
        self._weigh(state, worth, kept)
        place = {node: new for new, node in enumerate(kept)} | {-1: -1}
        state.nodes = [[place.get(node, -1) for node in nodes] for nodes in maps]
        tokens, parents = state.guesses.tokens, state.guesses.parents
        return Draft(
            tuple(tokens[node] for node in kept),
            tuple(place[parents[node]] for node in kept),
            # With chances, the governor leaves out nodes that do not pay by its own measurements.
            chances=None if granted or self.row_cost is not None else tuple(worth[node] for node in kept),
        )

    def _weigh(self, state: CombinedState, worth: Seq[float], kept: Seq[int]) -> None:
        """Note what each part is expected to add to what the parts before it propose, net of its rows."""
        gains, guessers, row_cost = state.ledger.gains, state.guesses.guessers, state.sequence.row_cost
        if row_cost is None or not _usual(state.sequence):
            return
        for part, chance in state.asked.items():
            # The lowest bit is the first part that guessed a node. Some are drafted although they do not pay.
            own = [worth[node] for node in kept if guessers[node] & -guessers[node] == 1 << part]
            gains.added(part, chance, sum(max(0.0, each - row_cost * gains.speed) for each in own))

    def _choose(self, state: CombinedState, worth: Seq[float], granted: Collection[int]) -> list[int]:
        """The nodes of the merged tree to draft, parents first: no child is likelier than its parent."""
        budget = (
            self.max_nodes if state.sequence.budget is None else min(self.max_nodes, state.sequence.budget)
        )
        order = sorted(range(len(worth)), key=worth.__getitem__, reverse=True)  # stable
        wanted = order[: worthwhile([worth[node] for node in order], self._row_cost(state))]
        if not granted:
            return wanted[:budget]
        first = [node for node in order if node in granted]
        chosen = {*[*first, *(node for node in wanted if node not in granted)][:budget]}
        return [node for node in order if node in chosen]

    def _row_cost(self, state: CombinedState) -> float:
        """The cost of a row: as given, otherwise as measured, otherwise as assumed."""
        measured = state.sequence.row_cost if self.row_cost is None else None
        return state.row_cost if measured is None else measured


def _chosen(draft: Draft) -> Draft:
    """A part's draft without its distributions: the verifier ``match`` uses tokens alone."""
    return draft if draft.distributions is None else Draft(draft.tokens, draft.parents, chances=draft.chances)


def _best(drafts: Seq[Draft]) -> float:
    """The best chance that a draft states for a node; 0 if none states one."""
    return max((max(draft.chances or (0.0,)) for draft in drafts), default=0.0)


def _usual(sequence: Sequence) -> bool:
    """True unless drafts are shorter than usual: near the end of the output, or limited by the request."""
    return sequence.room > _SHORT and sequence.params.drafts.num_speculative_tokens is None
