"""Ways to pass the position of each row to the decoder of an encoder-decoder model.

Such decoders use a row's index in the cache as its position. This is wrong in a tree, and in a batch of texts
of different lengths. There are several ways for several families; none patches a class. Where there is none,
a chain of one text at a time still has the right positions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.cache import Window
from outpace.core import in_progress
from outpace.targets.inputs.masks import Mask, column_positions
from outpace.targets.rows import Rows
from outpace.transfer import upload

_ARGUMENT = "decoder_position_ids"
# Names of a table's argument for the number of rows in the cache, from which it counts, by version.
_COUNTED = {"cache_length", "past_key_values_length"}
# Name of the argument by which FSMT's decoder takes a mask; its model makes none if there is a cache.
_MASK = "decoder_causal_mask"


class Positioning:
    """A way to pass positions; each implements one of the three methods. This one leaves them to the model.

    ``mask`` is that of a model without positions: [B, 1 or heads, width, columns], or one by kind of layer.
    """

    def arguments(self, positions: Tensor) -> dict[str, Any]:
        """Arguments for the model's forward. ``positions``: of the rows, [B, width]."""
        return {}

    @contextmanager
    def during(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Iterator[None]:
        """Context around the model's forward over tokens at positions, both [B, width], with a mask."""
        yield

    def mask(
        self, mask: Tensor | None, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """The decoder's mask, from that of a model without positions.

        None if the model's own mask and positions are right.
        """
        return mask


def positioning_of(model: PreTrainedModel) -> Positioning | str:
    """The way to pass positions that works for a model; the reason why there is none."""
    if _ARGUMENT in inspect.signature(model.forward).parameters:
        return ByArgument()
    decoder: Any = model.get_decoder()
    table = getattr(decoder, "embed_positions", None)
    if table is not None:
        taken = inspect.signature(table.forward).parameters
        if "position_ids" in taken and "inputs_embeds" not in taken:
            return ByHook(table)
        if _COUNTED.intersection(taken):
            return ByTable(decoder, table)
    biased = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]
    if len(biased) == 1 and hasattr(biased[0], "_relative_position_bucket"):
        return ByBias(biased[0], model.dtype)
    return "its positions cannot be set" if len(biased) < 2 else "each of its layers has a position bias"


class ByArgument(Positioning):
    """Whisper: its forward takes the decoder's positions."""

    def arguments(self, positions: Tensor) -> dict[str, Any]:
        return {_ARGUMENT: positions}


class ByHook(Positioning):
    """BART, Marian, MVP: a hook on the decoder's table of positions for the duration of a forward.

    The table's input is one line of positions shared by all sequences, [width]; the hook replaces it by the
    positions of each, flattened, and reshapes the output to [B, width, size]. The hook acts only in calls
    from the forward that set it: threads may share a model, and an interrupt may leave a hook behind.
    """

    def __init__(self, table: nn.Module) -> None:
        self._table = table
        self._signature = inspect.signature(table.forward)

    @contextmanager
    def during(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Iterator[None]:
        forward = sys._getframe(2)  # this function is a generator, which contextlib has called
        flat = positions.flatten()

        def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if not in_progress(forward):
                return None
            bound = self._signature.bind(*args, **kwargs)
            bound.arguments["position_ids"] = flat
            return bound.args, bound.kwargs

        def fold(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return output.reshape(*positions.shape, -1) if in_progress(forward) else None

        with _hooked(
            self._table.register_forward_pre_hook(ask, with_kwargs=True),
            self._table.register_forward_hook(fold),
        ):
            yield


class ByTable(Positioning):
    """M2M100, NLLB, LED, Pegasus-X, FSMT: a hook on a table that counts positions from the cache's length.

    The table is asked for the rows of a text from its beginning, and the hook returns those at the positions.
    Some such tables give pads other rows, and do not count them. So a table is asked for a pad alone, as in
    plain decoding, whose forwards have one token.
    """

    def __init__(self, decoder: nn.Module, table: nn.Module) -> None:
        self._decoder = decoder
        self._table = table
        self._pad = getattr(table, "padding_idx", None)
        self._counted = next(name for name in inspect.signature(table.forward).parameters if name in _COUNTED)
        self._masked = _MASK in inspect.signature(decoder.forward).parameters

    @contextmanager
    def during(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Iterator[None]:
        forward = sys._getframe(2)

        def pick(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if not in_progress(forward):
                return None
            rows = self._rows(args[0], int(positions.max()) + 1)[positions]
            if self._pad is not None:
                for sequence, row in (tokens == self._pad).nonzero().tolist():
                    before = {self._counted: int(positions[sequence, row])}
                    rows[sequence, row] = self._table.forward(tokens[sequence, row].view(1, 1), **before)
            return rows

        def mask_too(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return (args, {**kwargs, _MASK: mask}) if in_progress(forward) else None

        hooks = [self._table.register_forward_hook(pick)]
        if self._masked:
            hooks.append(self._decoder.register_forward_pre_hook(mask_too, with_kwargs=True))
        with _hooked(*hooks):
            yield

    def _rows(self, asked: Any, count: int) -> Tensor:
        """The table's rows of the first positions, [count, size].

        Args:
            asked: what the decoder gave to the table: tokens, their embeddings, or a shape.
        """
        if not isinstance(asked, Tensor):
            text: Any = torch.Size((1, count))
        else:  # any tokens but pads
            token = 0 if self._pad is None else self._pad + 1
            text = asked.new_full((1, count, *asked.shape[2:]), token)
        rows: Tensor = self._table.forward(text)  # without hooks
        return rows.reshape(count, -1)


@contextmanager
def _hooked(*hooks: Any) -> Iterator[None]:
    """Remove hooks at the end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class ByBias(Positioning):
    """T5: attention adds a bias per head that depends on the distance from query to key (Raffel et al. 2020,
    section 2.1), counted in rows of the cache.

    The first layer computes it; all add it and their mask. So the mask subtracts the bias of the distance in
    rows and adds that of the distance in positions.
    """

    def __init__(self, attention: Any, dtype: torch.dtype) -> None:
        self._attention = attention
        self._dtype = dtype

    def mask(
        self, mask: Tensor | None, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]]
    ) -> Tensor | None:
        if mask is None:
            return None
        queries = np.asarray(positions)
        columns = np.arange(window.columns)
        counted = _distances(columns[window.columns - window.width :], columns)
        true = _distances(queries, column_positions(rows, window, queries))
        if (true == counted).all():
            return mask
        if mask.dtype == torch.bool:
            shut = torch.finfo(self._dtype).min
            mask = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, shut)
        return mask + self._bias(true, mask.device) - self._bias(counted[None], mask.device)

    def _bias(self, distances: NDArray[np.int64], device: torch.device) -> Tensor:
        """The model's bias at distances [B, width, columns]: [B, heads, width, columns]."""
        attention = self._attention
        weights = attention.relative_attention_bias
        table = weights(
            attention._relative_position_bucket(
                -torch.arange(int(distances.max()) + 1, device=weights.weight.device),
                bidirectional=False,
                num_buckets=attention.relative_attention_num_buckets,
                max_distance=attention.relative_attention_max_distance,
            )
        ).to(device)
        bias: Tensor = table[upload(distances, device)]
        return bias.movedim(-1, 1)


def _distances(queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distances from each query [..., width] back to each key [..., columns]; 0 for later, masked keys."""
    back: NDArray[np.int64] = queries[..., :, None] - keys[..., None, :]
    return back.clip(min=0)
