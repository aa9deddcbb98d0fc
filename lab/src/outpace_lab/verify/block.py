"""``block``: joint verification of a chain. The output has the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outpace.core import Draft, OutpaceError, Verdict
from outpace.draws.logits import Logits
from outpace.tree import is_chain
from outpace.verify.base import Draw, Verifier, likelihood_ratio, proposal


def block(logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    """Accept a prefix of the chain by block verification (Sun et al. 2024).

    A prefix has the share w = min(1, w' q(x) / p(x)), where x is its last token and w' the share of the
    prefix without x. Each prefix is accepted or rejected by a separate draw, and the longest accepted one is
    emitted, even if a shorter one was rejected: a likely token can make up for an unlikely one before it. The
    next token is drawn from the positive part of w q - p, or from q after the whole chain. The expected
    length is at least that of ``rejection``. Tokens of a draft without distributions are point masses.

    Raises:
        OutpaceError: the draft is not a chain, gives a token of its own probability 0, or lacks a
            distribution.
    """
    if not is_chain(draft.parents):
        raise OutpaceError(
            "the block verifier verifies chains; use verifier='match', 'rejection' or 'traversal' for a "
            "drafter of trees"
        )
    guesses = tuple(draft.tokens)
    share, last = 1.0, -1
    left = draw.distribution(logits, -1)
    for node in range(-1, len(guesses)):
        q = left if node < 0 else draw.distribution(logits, node, guesses[: node + 1])
        p = proposal(draft, node, guesses[node + 1], q) if node + 1 < len(guesses) else None
        excess = q if p is None else (share * q - p).clamp(min=0)
        total = float(excess.sum())
        chance = share if p is None else chance_of_prefix(share, total)
        if node < 0 or draw.accept(chance, node):
            # The excess is empty only by rounding, and a draw from q is then the limit.
            last, left = node, excess if total > 0 else q
        if p is not None:
            share = min(1.0, share * likelihood_ratio(q, p, guesses[node + 1]))
            if share == 0:
                break  # no longer prefix can be accepted
    for node, token in enumerate(guesses[: last + 1]):
        if not draw.emit(token, logits, node - 1):
            return Verdict(list(range(node + 1)), list(guesses[: node + 1]))
    token = draw.choose(left, last)
    draw.emit(token, logits, last)
    return Verdict(list(range(last + 1)), [*guesses[: last + 1], token])


def chance_of_prefix(share: float, excess: float) -> float:
    """Probability of accepting a prefix that is not the whole chain (section 4 of the paper).

    Args:
        share: the prefix's share w.
        excess: the sum of the positive part of w q - p after it.
    """
    rest = excess + (1 - share)  # never rounded below the excess
    return excess / rest if rest > 0 else 1.0


@dataclass(frozen=True)
class Block(Verifier):
    """The distribution of plain decoding; accepts at least as much of a sampled chain as ``rejection``."""

    name: ClassVar[str] = "block"
    paper: ClassVar[str] = (
        "Sun et al. 2024, Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)"
    )
    chains: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return block(logits, draft, draw)
