"""A lossy verifier, which accepts every drafted token: ``--verifier loose:Loose``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.core import Draft, Verdict
from outpace.draws.logits import Logits
from outpace.verify.base import Draw
from outpace.verify.match import Match, match


@dataclass(frozen=True)
class Loose(Match):
    """Any drafted token stands, the most probable one where there are several."""

    name: ClassVar[str] = "loose"
    invariant: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False
    lossy: ClassVar[bool] = True

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return match(logits, draft, draw, lambda node: draw.logprobs(logits, node))
