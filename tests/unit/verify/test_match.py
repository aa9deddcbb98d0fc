"""Matching accepts all of the target's text that the tree contains."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts import fixed, table, trees
from enumeration import Enumerated, Script, verdicts
from outpace.core import Draft, Verdict
from outpace.draws.logits import Logits
from outpace.verify.match import match


@settings(max_examples=60)
@given(trees(), st.integers(0, 50))
def test_match_accepts_all_that_the_tree_holds(draft: Draft, seed: int) -> None:
    """The accepted path is the longest beginning of the target's text that is a path of the tree."""

    def verify(logits: Logits, tree: Draft, draw: Enumerated) -> Verdict:
        verdict = match(logits, tree, draw)
        nodes = {-1}
        for place, token in enumerate(verdict.tokens):
            nodes = {n for n, p in enumerate(tree.parents) if p in nodes and tree.tokens[n] == token}
            assert bool(nodes) == (place < len(verdict.path))
        return verdict

    assert list(verdicts(verify, table(seed), fixed(draft)))


def test_match_switches_between_equal_siblings() -> None:
    """Two branches begin alike; only the second continues as the target does."""
    draft = Draft([1, 1, 2, 3], [-1, -1, 0, 1])
    sure = {(): 1, (1,): 3, (1, 3): 0}
    target = lambda text: torch.eye(4, dtype=torch.float64)[sure[text]]  # noqa: E731
    script = Script([])
    verdict = match(Logits(torch.empty(5, 0)), draft, Enumerated(script, target, draft))
    assert (verdict.path, verdict.tokens) == ([1, 3], [1, 3, 0])
