"""Speculative decoding with a draft model (Leviathan et al. 2023; Chen et al. 2023; Daliri et al. 2024).

A smaller model decodes a chain or a tree of tokens for the target to verify, with one forward per depth for
all sequences. It has its own cache, which is cut back to the accepted tokens; the one or two tokens that it
has not read are fed with the next root.

Differences from the papers: by default the draft model draws with the target's own noise, so the two choose
the same token far more often than with independent draws (Daliri et al. 2024), and the tokens are those of
plain decoding. On a tree, a node's candidates are the best of its scores with that noise: draws without
replacement (Kool et al. 2019), where SpecInfer and multi-candidate decoding draw independently of the
target. A verifier that needs independent drafts gets independent draws.

A model that was adapted to it (PARD) decodes all depths in one forward: masks stand for the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, check_confidence, check_grown, log_confidence
from outpace.drafters.support.forest import Grown, grow_from, grow_on_device
from outpace.drafters.support.growth import GrowthShared, GrowthState, feed_of, grow, grow_whole
from outpace.drafters.support.plans import GrowthPlan
from outpace.drafters.support.programs import grow_by_model, warm
from outpace.drafters.support.runner import DraftRunner, Feed
from outpace.drafters.support.sequoia import count_ranks
from outpace.drafters.support.shapes import Growing, TreeShape, shape_of
from outpace.drafters.support.vocabulary import Vocabulary, part_of, vocabulary_of
from outpace.embedded import nano_draft_path
from outpace.learned.published import find_model
from outpace.learned.vocabulary import drafted_ids, mask_token
from outpace.sequence import Sequence, Step
from outpace.targets import TargetModel
from outpace.targets.weights.pretrained import load_model, load_tokenizer
from outpace.transfer import upload


def grow_masked(active: Seq[GrowthState], mask: int) -> None:
    """Grow the trees of texts by one forward of a model that fills masked places (PARD, An et al. 2025).

    Tokens that are not drafted yet are masks, so what a place predicts does not depend on those before it.

    Args:
        mask: the token of a masked place.
    """
    shared = active[0].shared
    runner, masks = shared.runner, [state.tree.layers - 1 for state in active]
    feeds = [
        Feed(state.text[state.track.stem :], [mask] * count, range(-1, count - 1))
        for state, count in zip(active, masks, strict=True)
    ]
    rows = runner.feed([state.track for state in active], feeds)
    ends = list(accumulate(count + 1 for count in masks))
    first = {id(state): end - count - 1 for state, end, count in zip(active, ends, masks, strict=True)}

    def run(plan: GrowthPlan, members: Seq[GrowthState]) -> Grown:
        own, ids = shared.vocabulary.drafted(rows)
        spans = [[first[id(state)], first[id(state)] + state.tree.layers - 1] for state in members]
        begin, last = upload(spans, rows.device).unbind(1)

        def after(owners: Tensor, paths: Tensor) -> Tensor:
            return own[(begin + paths.shape[1] - 1).minimum(last)[owners]]

        return grow_from(plan, members, ids, rows.device, after)

    def rows_of(growing: Seq[GrowthState]) -> Tensor:
        places = [first[id(state)] + state.tree.depth for state in growing for _ in state.tree.front]
        return rows[upload(places, rows.device)]

    left = list(active)
    if runner.model.plays(len(active)):
        left = grow_on_device(left, run, graphs=False)
    grow_whole(left, rows_of)


@dataclass(frozen=True)
class DraftModel(Drafter[GrowthState]):
    """A smaller model that drafts.

    Attributes:
        model: a target, a loaded model, or a name or path for transformers to load (safetensors only), in the
            target's dtype and on its device. None is the embedded draft model.
        num_speculative_tokens: K, tokens on a path of the draft, at least 1. The draft is a chain of them,
            unless one of ``branching``, ``acceptance`` and ``expand`` makes it a tree.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens. (All are the same if
            decoding is greedy.) "coupled" falls back to "greedy" with vocabulary="text", since noise is keyed
            by token id, and with ``expand`` under a verifier that needs independent draws.
        branching: children of the root, of each of its children, and so on, as "4x2": a static tree. One
            child per node at deeper levels.
        acceptance: measured acceptance rates by a candidate's rank, as "0.6/0.2/0.1", from which the best
            static tree of ``max_nodes`` nodes is computed (Sequoia, Chen et al. 2024). Drafting with a tree
            measures them: see ``outpace.drafters.support.sequoia.acceptance_by_rank``.
        expand: grow the tree by the draft model's confidence (EAGLE-2, Li et al. 2024): N nodes of each layer
            get N children each, and the ``max_nodes`` best nodes are kept.
        max_nodes: nodes in the tree, with ``acceptance`` or ``expand``.
        replacement: whether siblings are drawn with replacement (SpecInfer). Needs draws="independent".
        min_confidence: in [0, 1]: a node is continued only if the draft model's best token has at least this
            probability among the ids drafted; otherwise it falls back to the target (BiLD, Kim et al. 2023).
        confidence: "path": the product of that token's probability and those of the tokens before it on the
            path; "token": its probability alone.
        vocabulary: "same" as the target's; "intersection": only tokens that both have are drafted; "text":
            the draft is translated. (TLI and SLEM of Timor et al. 2025.)
        tokenizer: the draft model's tokenizer or its name; needed for different vocabularies. By default the
            one in the model's folder.
        target_tokenizer: the same for the target.
        device: of a draft model that is named, as torch writes it ("cuda:1"); None for the target's.
    """

    model: Any = field(default=None, repr=False)
    num_speculative_tokens: int = 4
    draws: Literal["coupled", "independent", "greedy"] = "coupled"
    branching: str | tuple[int, ...] = ()
    acceptance: str | tuple[float, ...] = ()
    expand: int | None = None
    max_nodes: int | None = None
    replacement: bool = False
    min_confidence: float = 0.0
    confidence: Literal["path", "token"] = "path"
    vocabulary: Literal["same", "intersection", "text"] = "same"
    tokenizer: Any = field(default=None, repr=False)
    target_tokenizer: Any = field(default=None, repr=False)
    device: str | None = None

    when: ClassVar[str] = "with a smaller model of the same vocabulary"
    needs: ClassVar[str] = "that model"
    paper: ClassVar[str] = (
        "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding "
        "(arXiv 2211.17192); Chen et al. 2023, Accelerating Large Language Model Decoding with Speculative "
        "Sampling (arXiv 2302.01318); coupled draws: Daliri et al. 2024 (arXiv 2408.07978); trees: Miao et "
        "al. 2023, SpecInfer (arXiv 2305.09781), Yang et al. 2024, Multi-Candidate Speculative Decoding "
        "(arXiv 2401.06706), Li et al. 2024, EAGLE-2 (arXiv 2406.16858), Chen et al. 2024, Sequoia "
        "(arXiv 2402.12374); vocabularies: Timor et al. 2025 (arXiv 2502.05202); in one forward: An et al. "
        "2025, PARD (arXiv 2504.18583)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = self._shape()
        self.check_choices("draws", "confidence", "vocabulary")
        check_confidence("draft_model", self.min_confidence)
        if self.replacement and self.draws != "independent":
            raise OutpaceError(
                "draft_model: coupled siblings are drawn without replacement; for replacement=true "
                "give draws=independent"
            )
        if self.replacement and not shape.branches:
            raise OutpaceError(
                "draft_model: replacement applies to siblings, and a chain has none; give branching or "
                "acceptance"
            )
        if self.confidence != "path" and not self.min_confidence:
            raise OutpaceError(
                f"draft_model: confidence={self.confidence} applies to min_confidence; give that too, or "
                "leave both out"
            )
        check_grown("draft_model", shape.weighs, self.draws)
        if self.vocabulary == "text" and shape.branches:
            raise OutpaceError(
                "draft_model: vocabulary=text drafts chains; leave out branching, acceptance, expand"
            )

    def _shape(self) -> TreeShape:
        return shape_of(
            self.num_speculative_tokens, self.branching, self.acceptance, self.expand, self.max_nodes
        )

    @property
    def trees(self) -> bool:
        return self._shape().branches

    def load(self, target: TargetModel) -> TargetModel:
        named = nano_draft_path() if self.model is None else self.model
        if isinstance(named, str | Path):
            named = find_model(named, self.name)
        return load_model(named, target, self.device)

    def translation(self, model: TargetModel, target: TargetModel) -> Vocabulary:
        """The draft model's vocabulary in terms of the target's.

        Raises:
            OutpaceError: they differ in a way that the options do not allow for, or a tokenizer is missing.
        """
        needed = self.vocabulary != "same"
        named = nano_draft_path() if self.model is None else self.model
        own = load_tokenizer(self.tokenizer, model if model.tokenizer else named, needed)
        theirs = load_tokenizer(self.target_tokenizer, target, needed)
        return vocabulary_of(self.vocabulary, model, target, own, theirs)

    def prepare(self, target: TargetModel) -> GrowthShared:
        model = self.load(target)
        ids = drafted_ids(model.model)
        if ids is not None and self.vocabulary != "same":
            raise OutpaceError(
                f"draft_model: {model.name} drafts a part of its target's vocabulary; leave out "
                f"vocabulary={self.vocabulary}"
            )
        vocabulary = self.translation(model, target)
        if ids is not None:
            vocabulary = part_of(ids, target.vocabulary)
        shape = self._shape()
        if shape.branches and model.why_chains_only:
            raise OutpaceError(
                f"draft_model: {model.name} takes chains only, since {model.why_chains_only}; leave out "
                "branching, acceptance and expand"
            )
        weigh = shape.weighs or self.min_confidence > 0
        draws = Draws(self.draws, self.replacement, weigh, independent=not shape.weighs)
        if vocabulary.text and self.draws == "coupled":
            draws = replace(draws, noise="greedy")
        # Rows of a draft that grows as one graph or from masks are dropped; accepted tokens are fed again.
        mask = mask_token(model)
        dropped = mask is not None or model.plays(1)
        late = max(vocabulary.late, shape.depth + 1) if dropped else vocabulary.late
        return GrowthShared(
            shape=shape,
            draws=draws,
            vocabulary=vocabulary,
            least=log_confidence(self.min_confidence),
            by_path=self.confidence == "path",
            runner=DraftRunner(model, late, ids),
            mask=mask,
        )

    def renew(self, shared: GrowthShared, target: TargetModel) -> GrowthShared:
        return replace(shared, runner=shared.runner.renewed())

    def warm(self, shared: GrowthShared, slots: int) -> None:
        if shared.mask is None:
            warm(shared, slots)
        else:
            shared.runner.warm(slots)

    def start(self, sequence: Sequence, shared: GrowthShared) -> GrowthState:
        return GrowthState(sequence, shared, shared.runner.open(), shared.vocabulary.reader(sequence))

    def stop(self, state: GrowthState) -> None:
        state.shared.runner.close(state.track)

    def revise(self, state: GrowthState, unchanged: int) -> bool:
        state.reader.revise(unchanged)
        return True

    def catch_up(self, state: GrowthState) -> bool:
        if not state.text:
            state.text, _ = state.reader.read()
        return not state.text or state.shared.runner.advance([state.track], [state.text])

    def propose(self, states: Seq[GrowthState]) -> list[Draft]:
        active = []
        for state in states:
            state.text, unchanged = state.reader.read()
            state.tree = self._begin(state)
            if state.text:
                state.shared.runner.rewind(state.track, state.text, unchanged)
            if state.tree.layers > 0:
                active.append(state)
        if active:
            runner = active[0].shared.runner
            runner.catch_up([state.track for state in active], [state.text for state in active])
            if active[0].shared.mask is not None:
                grow_masked(active, active[0].shared.mask)
                active = []
            elif runner.model.plays(len(active)):
                active = grow_on_device(active, grow_by_model, graphs=True)
        feeds = [Feed(state.text[state.track.stem :]) for state in active]
        while active:
            rows = runner.feed([state.track for state in active], feeds)
            grow(active, rows)
            active = [state for state in active if state.tree.front]
            feeds = [feed_of(state) for state in active]
        return [self._finish(state) for state in states]

    def observe(self, states: Seq[GrowthState], steps: Seq[Step]) -> None:
        if states and states[0].shared.shape.branches:
            for step in steps:
                count_ranks(step)

    def _begin(self, state: GrowthState) -> Growing:
        """An empty tree within the draft model's context; without layers if there is no text."""
        tree, context = state.shared.begin(state.sequence), state.shared.model.context
        if not state.text:
            tree.layers = 0
        elif context is not None:
            # The last layer is not fed: with the root, K layers take K - 1 positions more than the text.
            tree.layers = min(tree.layers, context - len(state.text) + 1)
        return tree

    def _finish(self, state: GrowthState) -> Draft:
        return state.shared.vocabulary.draft(state.reader, state.tree.finish(self.replacement))
