"""A model for tests that needs no transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outpace.cache import Cache, KVCache, LayerShape, RowShape, Window
from outpace.core import OutpaceError
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.inputs.forward import inputs_of, laid_out, rows_of
from outpace.targets.inputs.masks import hide, tree_masks
from outpace.targets.rows import HiddenStates, Output, extra_rows

_SIZE = 16
_HEADS = 2
_KEY, _VALUE = 4, 6  # size of a head's key and value; different, so that both shapes are tested
_LAYERS = 2
_HABIT = 5.0  # logit of a token's usual successor; the logits that depend on the context spread by about 2


class ToyTarget(TargetModel):
    """A small deterministic attention model in float64, without transformers.

    Each token has a usual successor, so text repeats itself and drafters find something to draft. The rest of
    the logits depends on every row attended to and on its position, chaotically: one wrong row, position or
    bit of the mask soon leads to a different token.

    Args:
        vocabulary: number of token ids, at least 2.
        context: number of positions; None for no limit.
        seed: of the weights.
        eos: the token that ends a sequence, which is never the usual successor; None for none.
        surprise: the weight of the context. At 0 it is a bigram model; a value between 0 and the target's
            makes a draft model that often agrees.
    """

    def __init__(
        self,
        vocabulary: int = 32,
        context: int | None = 128,
        seed: int = 0,
        eos: int | None = 0,
        surprise: float = 1.0,
    ) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.eos_token_ids = frozenset(() if eos is None else (eos,))
        self.surprise = surprise
        self._kept: Seq[int] = range(_LAYERS)
        self._window: tuple[int, int] | None = None  # numbers of first and of recent rows that are seen
        random = np.random.default_rng(seed)

        def weights(*shape: int) -> Tensor:
            return torch.from_numpy(random.standard_normal(shape))

        usual = [token for token in random.permutation(vocabulary).tolist() if token != eos]
        self._habit = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
        self._habit[usual, usual[1:] + usual[:1]] = _HABIT
        self._embeddings = weights(vocabulary, _SIZE)
        self._table = self._embeddings[:0]  # embeddings of ids beyond the vocabulary
        self._frequencies = weights(_SIZE)
        self._queries = weights(_LAYERS, _SIZE, _HEADS * _KEY)
        self._keys = weights(_LAYERS, _SIZE, _HEADS * _KEY)
        self._values = weights(_LAYERS, _SIZE, _HEADS * _VALUE)
        self._mix = weights(_LAYERS, _HEADS * _VALUE, _SIZE)
        self._head = weights(_SIZE, vocabulary) / 2

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> KVCache:
        device = torch.device("cpu")
        keys = RowShape(_HEADS, _KEY, torch.float64, device)
        values = RowShape(_HEADS, _VALUE, torch.float64, device)
        return KVCache([LayerShape(keys, values)] * _LAYERS, slots, length, capacity=capacity)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def layers(self) -> int:
        return _LAYERS

    def some_layers(self, layers: Seq[int]) -> ToyTarget:
        if list(layers) != sorted(set(layers)) or any(not 0 <= layer < _LAYERS for layer in layers):
            raise OutpaceError(
                f"layers must be ascending numbers from 0 to {_LAYERS - 1}, not {list(layers)}"
            )
        part = copy.copy(self)
        part._kept = tuple(layers)
        return part

    def over_window(self, sinks: int, recent: int) -> ToyTarget:
        part = copy.copy(self)
        part._window = sinks, recent
        return part

    def with_embeddings(self, table: Tensor | int) -> ToyTarget:
        more = extra_rows(self._embeddings, table)
        part = copy.copy(self)
        part._table = more
        part.extra = len(more)
        part._habit = torch.cat([self._habit, self._habit.new_zeros(len(more), self.vocabulary)])
        return part

    @property
    def hidden(self) -> HiddenStates:
        return HiddenStates(_SIZE, torch.float64, torch.device("cpu"))

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embeddings[tokens]

    def head(self, states: Tensor) -> Tensor:
        """The part of the logits that depends on the context; the usual successor is not in the states."""
        return self.surprise * (states.double() @ self._head)

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Seq[int] = (),
    ) -> Output:
        widths = batch.width_by_slot
        windows = checked_cache(self, cache, KVCache).begin(widths)
        return Output.join([self._pass(window, batch, hidden_layers) for window in windows])

    def _pass(self, window: Window, batch: Batch, hidden_layers: Seq[int]) -> Output:
        tokens, positions, mask = _arrange(window, batch)
        if self._window is not None:
            hide(mask, window.offsets, *self._window)
        embeddings = torch.cat([self._embeddings, self._table.to(self._embeddings)])
        states = embeddings[tokens] + torch.sin(positions[..., None] * self._frequencies)
        hidden = [states]
        for layer in self._kept:
            states = states + self._attend(window, layer, states, mask)
            hidden.append(states)
        found = {layer: hidden[layer] for layer in hidden_layers}
        logits = self._habit[tokens] + self.head(states) if len(batch.read) else None
        return laid_out(window.slots, batch, logits, 0, found)

    def _attend(self, window: Window, layer: int, states: Tensor, mask: Tensor) -> Tensor:
        """[B, width, size]: a chaotic function of every row that the mask [B, width, columns] allows."""
        batch, width, _ = states.shape

        def heads(weights: Tensor) -> Tensor:
            return (states @ weights[layer]).view(batch, width, _HEADS, -1).transpose(1, 2)

        keys, values = window.append(layer, heads(self._keys), heads(self._values))
        scores = torch.tanh(heads(self._queries) @ keys.transpose(2, 3))
        # A sum, not a mean: a row has the same weight in a long text as in a short one.
        summed = torch.where(mask[:, None], 1 + scores / 2, 0.0) @ values
        return torch.sin(summed.transpose(1, 2).reshape(batch, width, -1) @ self._mix[layer])


def _arrange(window: Window, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions [B, width], and the attention mask [B, width, columns]."""
    rows = rows_of(window, batch.rows)
    tokens, positions = inputs_of(rows, window)
    mask, _ = tree_masks(rows, window, positions, sliding=None)
    return torch.tensor(tokens), torch.tensor(positions), mask[:, 0]
