"""The matrix can fail: with a bug put in on purpose, tokens differ from plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from lossless.conftest import Lab
from lossless.test_matrix import SPECS
from outpace.cache import KVCache, Slot
from outpace.targets.inputs import forward as inputs
from outpace.targets.inputs import masks

PROMPTS = 4


def _wrong_rows_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of a forward stay, not those of the path."""
    keep = KVCache.keep

    def _first_rows(cache: KVCache, paths: Mapping[Slot, Sequence[int]]) -> None:
        keep(cache, {slot: range(len(path)) for slot, path in paths.items()})

    monkeypatch.setattr(KVCache, "keep", _first_rows)


def _wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's position is its place in the forward, not its depth."""
    flat: Callable[[Sequence[int]], list[int]] = lambda parents: list(range(len(parents)))  # noqa: E731
    monkeypatch.setattr(inputs, "depths", flat)


def _causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node attends to every node before it, not only to its ancestors."""
    monkeypatch.setattr(masks, "ancestor_mask", lambda parents: np.tri(len(parents), dtype=np.bool_))


@pytest.mark.parametrize("sampling", ["greedy", "penalty"])
@pytest.mark.parametrize(
    ("drafter", "bug"),
    [
        ("lookahead", _wrong_rows_kept),
        ("lookahead", _wrong_positions),
        ("lookahead", _causal_mask),
        # A tree of trained heads, whose paths stand that are not its first rows.
        ("hydra", _wrong_rows_kept),
    ],
)
def test_a_bug_changes_tokens(
    exact: Lab,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    bug: Callable[[pytest.MonkeyPatch], None],
    sampling: str,
) -> None:
    plain = [g.tokens for g in exact.plain(sampling, PROMPTS)]
    assert [g.tokens for g in exact.decode(SPECS[drafter], sampling, first=PROMPTS)] == plain
    bug(monkeypatch)
    assert [g.tokens for g in exact.decode(SPECS[drafter], sampling, first=PROMPTS)] != plain
