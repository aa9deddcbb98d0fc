"""A step of a draft model that itself decodes by draft-then-verify."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outpace.core import Draft
from outpace.draws.logits import Logits
from outpace.sequence import Step
from outpace.verify.match import match
from outpace_lab.drafters.provisional import Provisional, RecordingDraw


def verify(text: Provisional, draft: Draft, kept: Seq[int], logits: Logits) -> tuple[Step, list[Tensor]]:
    """Verify a draft for the draft model, which emits the tokens that it would have emitted alone.

    Args:
        draft: the inner drafter's draft after ``text``.
        kept: for each node, its node in the inner drafter's proposal.
        logits: the draft model's rows, root first.

    Returns:
        The step, for the inner drafter, and the distribution that each token was drawn from; none if greedy.
    """
    draw = RecordingDraw(text)
    verdict = match(logits, draft, draw)
    text.stats.record(len(draft), len(verdict.path), len(verdict.tokens))
    step = Step(
        draft=draft,
        kept=kept,
        path=verdict.path,
        tokens=verdict.tokens,
        logits=logits,
        root=draw.root,
        sequence=text,
        hidden={},
    )
    return step, draw.distributions
