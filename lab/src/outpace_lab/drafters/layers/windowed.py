"""Drafting with the target over a part of its cache (TriForce, Sun et al. 2024; MagicDec, Chen et al. 2024).

In a long text most of a step's time is attention to the committed rows. A draft attends to the first of them,
which collect attention whatever they contain (StreamingLLM, Xiao et al. 2024), and to the most recent ones;
the verification attends to all. There is no second model and no second cache.

Differences from the papers: the window is read from the full cache at each row, where they keep a smaller
copy; positions are those of the whole text. TriForce also retrieves chunks that the next token is likely to
attend to, and drafts for its window with a smaller model; here is neither.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from outpace.core import Draft
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise, check_confidence, log_confidence
from outpace.drafters.support.shapes import shape_of
from outpace.drafters.support.within import PartShared, Within, place_of
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace_lab.drafters.layers.chains import draft_by_part


@dataclass(frozen=True)
class Windowed(Drafter[Within]):
    """Drafting with the target, which then sees the beginning and the end of the text.

    Attributes:
        sinks: number of the first committed rows that a draft attends to, at least 1.
        recent: number of the most recent ones, at least 1. A shorter text is not drafted for.
        num_speculative_tokens: tokens in the chain, at least 1.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": its most probable tokens.
        min_confidence: in [0, 1]: the chain continues only if the best token has at least this probability.
    """

    sinks: int = 16
    recent: int = 512
    num_speculative_tokens: int = 2
    draws: Noise = "coupled"
    min_confidence: float = 0.0

    when: ClassVar[str] = "for long texts: the model drafts on a part of its text"
    paper: ClassVar[str] = (
        "Sun et al. 2024, TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical "
        "Speculative Decoding (arXiv 2404.11912); Chen et al. 2024, MagicDec (arXiv 2408.11049); Xiao et al. "
        "2024, Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_least(sinks=1, recent=1, num_speculative_tokens=1)
        self.check_choices("draws")
        check_confidence("windowed", self.min_confidence)

    def prepare(self, target: TargetModel) -> PartShared:
        return PartShared(
            shape=shape_of(self.num_speculative_tokens, method="windowed"),
            draws=Draws(self.draws, weigh=self.min_confidence > 0),
            least=log_confidence(self.min_confidence),
            by_path=False,
            part=target.over_window(self.sinks, self.recent),
            after=self.sinks + self.recent + 1,
        )

    def start(self, sequence: Sequence, shared: PartShared) -> Within:
        return Within(sequence, shared, place_of(sequence, "windowed"))

    def propose(self, states: Seq[Within]) -> list[Draft]:
        return draft_by_part(states)
