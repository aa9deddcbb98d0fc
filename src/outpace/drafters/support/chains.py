"""Chains drawn on the device, all sequences together, which reach the host in one transfer per draft.

Drawn one by one, each token is read on the host before the next forward is launched, and the device waits.
Here the drawn ids stay on the device, where the next forward reads them, and its launch waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.support.draws import Draws
from outpace.drafters.support.growth import G
from outpace.drafters.support.shapes import Static
from outpace.drafters.support.vocabulary import Subset, Vocabulary
from outpace.draws.many_rows import draw_rows, has_kernels, is_cut, keys_of
from outpace.draws.sampling import TINY_TEMPERATURE, warp
from outpace.sequence import Sequence
from outpace.transfer import gather, upload


class Chains(Generic[G]):
    """The chains of sequences during a draft.

    Args:
        states: of sequences whose trees grow, for which ``drawn_together`` is true.
        device: of the logits.

    Attributes:
        active: the states whose chains go on.
    """

    def __init__(self, states: Seq[G], device: torch.device) -> None:
        self.active = self._states = list(states)
        self._draws: Draws = states[0].shared.draws
        self._vocabulary: Vocabulary = states[0].shared.vocabulary
        self._drawn: list[tuple[list[G], Tensor, Tensor | None]] = []
        self._plain = all(not self._draws.draws_from(state.sequence) for state in states)
        self._keys = torch.empty(0)
        if not self._plain:
            params = [state.sequence.params for state in states]
            layers = range(max(state.tree.layers for state in states))
            words = [[self._word(state, depth) for state in states] for depth in layers]
            self._keys = upload(np.stack([keys_of(params, own) for own in words]), device)

    @property
    def depth(self) -> int:
        """Number of tokens drawn for each active sequence."""
        return len(self._drawn)

    def _word(self, state: G, depth: int) -> int:
        root = state.sequence.output_length
        return self._draws.word(state.sequence, root, depth, depth)

    def draw(self, rows: Tensor) -> Tensor:
        """Draw the next token of each active chain, and return those of the chains that go on, [n].

        Args:
            rows: logits after the active chains, [active, vocabulary].
        """
        chosen, ids = self._vocabulary.drafted(rows)
        if self._plain:
            tokens, chances = chosen.argmax(dim=-1), None
        else:
            tokens, chances = self._sampled(chosen.float(), ids)
        tokens = tokens if ids is None else torch.where(tokens < 0, tokens, ids[tokens.clamp(min=0)])
        self._drawn.append((self.active, tokens, chances))
        going = [place for place, state in enumerate(self.active) if state.tree.layers > self.depth]
        if len(going) < len(self.active):
            self.active = [self.active[place] for place in going]
            tokens = gather(tokens, going) if going else tokens[:0]
            if going and not self._plain:
                self._keys = self._keys.index_select(1, upload(going, tokens.device))
        return tokens.clamp(min=0)

    def _sampled(self, scores: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Draws from rows of logits, and the distributions that independent ones came from."""
        params = [state.sequence.params for state in self.active]
        keys = self._keys[self.depth]
        shared = all(self._draws.shares(state.sequence) for state in self.active)
        if (
            shared
            and has_kernels(scores.device)
            and all(own.temperature >= TINY_TEMPERATURE for own in params)
        ):
            from outpace.draws.draw_kernel import draw

            return draw(scores, keys, ids, sure=False, cut=any(map(is_cut, params))), None
        if len({(own.temperature, own.top_k, own.top_p, own.min_p) for own in params}) == 1:
            warped = warp(scores, params[0])
        else:
            warped = torch.stack([warp(row, own) for row, own in zip(scores, params, strict=True)])
        return draw_rows(warped, keys[:, 0], ids), None if shared else warped.double().softmax(dim=-1)

    def finish(self) -> list[list[int]]:
        """Hang the tokens on the trees, after one transfer: up to a token that ends the text, or to a gap.

        Returns:
            All tokens that were drawn for each state, 0 in place of a gap.
        """
        found = iter(torch.cat([tokens for _, tokens, _ in self._drawn]).tolist())
        drawn: dict[int, list[int]] = {id(state): [] for state in self._states}
        ended: set[int] = set()
        for states, _, distributions in self._drawn:
            for place, (state, token) in enumerate(zip(states, found, strict=False)):
                drawn[id(state)].append(max(token, 0))
                if id(state) in ended or token < 0:
                    ended.add(id(state))
                    continue
                if distributions is not None:
                    node = len(state.tree.tokens) - 1
                    state.tree.distributions[node] = self._vocabulary.whole(distributions[place])
                state.tree.add(len(state.tree.tokens) - 1, [token], [0.0])
                if token in state.shared.ends(state.sequence):
                    ended.add(id(state))
        return list(drawn.values())


def drawn_together(states: Seq[Any]) -> bool:
    """True if the sequences' trees, which grow, are chains each of whose tokens follows from logits alone."""
    if not states:
        return False
    shared = states[0].shared
    if shared.draws.weigh or shared.draws.replacement or type(shared.vocabulary) not in (Vocabulary, Subset):
        return False
    kinds = {shared.draws.draws_from(state.sequence) for state in states}
    return len(kinds) == 1 and all(_free(state.sequence) and _chain(state.tree.shape) for state in states)


def _free(sequence: Sequence) -> bool:
    """True if a sequence's scores do not depend on the tokens before them."""
    return not sequence.processor.adjusts


def _chain(shape: Any) -> bool:
    return isinstance(shape, Static) and not shape.branches
