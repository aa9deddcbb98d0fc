"""Ways to pass the position of each row to the decoder of an encoder-decoder model.

Such decoders use a row's index in the cache as its position. This is wrong in a tree, and in a batch of texts
of different lengths. There are three ways for three families; none patches a class.
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
from outpace.core import UnsupportedModel, in_progress
from outpace.targets.base import Rows
from outpace.targets.checks import family
from outpace.targets.masks import column_positions

_ARGUMENT = "decoder_position_ids"


class Placement:
    """A way to pass positions; each implements one of the three methods."""

    def arguments(self, places: Tensor) -> dict[str, Any]:
        """Arguments for the model's forward. ``places``: positions, [B, width]."""
        return {}

    @contextmanager
    def during(self, places: Tensor) -> Iterator[None]:
        """Context around the model's forward."""
        yield

    def mask(
        self, mask: Tensor | None, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """The decoder's mask, from that of a model without positions: [B, 1 or heads, width, columns].

        None if the model's own mask and positions are right.
        """
        return mask


def placement_of(model: PreTrainedModel) -> Placement:
    """The way to pass positions that works for a model.

    Raises:
        UnsupportedModel: none is known.
    """
    if _ARGUMENT in inspect.signature(model.forward).parameters:
        return ByArgument()
    decoder: Any = model.get_decoder()
    table = getattr(decoder, "embed_positions", None)
    if table is not None and "position_ids" in inspect.signature(table.forward).parameters:
        return ByHook(table)
    biased = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]
    if len(biased) == 1 and hasattr(biased[0], "_relative_position_bucket"):
        return ByBias(biased[0], model.dtype)
    many = "a position bias of each layer's own" if len(biased) > 1 else "positions that cannot be set"
    raise UnsupportedModel(f"{family(model)} has {many}, so a tree cannot be placed")


class ByArgument(Placement):
    """Whisper: its forward takes the decoder's positions."""

    def arguments(self, places: Tensor) -> dict[str, Any]:
        return {_ARGUMENT: places}


class ByHook(Placement):
    """BART, Marian: a hook on the decoder's table of positions for the duration of a forward.

    The table's input is one line of positions shared by all sequences, [width]; the hook replaces it by the
    positions of each, flattened, and reshapes the output to [B, width, size]. The hook acts only in calls
    from the forward that set it: threads may share a model, and an interrupt may leave a hook behind.
    """

    def __init__(self, table: nn.Module) -> None:
        self._table = table

    @contextmanager
    def during(self, places: Tensor) -> Iterator[None]:
        forward = sys._getframe(2)  # this function is a generator, which contextlib has called
        line = places.flatten()

        def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if not in_progress(forward):
                return None
            if "position_ids" not in kwargs:
                raise UnsupportedModel("the decoder does not hand position_ids to its table by name")
            return args, {**kwargs, "position_ids": line}

        def fold(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return output.reshape(*places.shape, -1) if in_progress(forward) else None

        hooks = [
            self._table.register_forward_pre_hook(ask, with_kwargs=True),
            self._table.register_forward_hook(fold),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class ByBias(Placement):
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
        bias: Tensor = table[torch.from_numpy(distances).to(device)]
        return bias.movedim(-1, 1)


def _distances(queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distances from each query [..., width] back to each key [..., columns]; 0 for later, masked keys."""
    back: NDArray[np.int64] = queries[..., :, None] - keys[..., None, :]
    return back.clip(min=0)
