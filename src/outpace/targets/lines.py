"""Forwards without padding: the rows of all sequences in one line, padded only in the attention.

In a batch of uneven drafts most rows of a padded forward are padding, and on a CPU each costs about as much
as a real one. In a line the model's layers compute the real rows alone, as one sequence; its attention gets
them back in their places, [B, width], so that it remains the one that it was.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.cache import Window
from outpace.targets.attention import EXACT, exact_attention
from outpace.targets.masks import Mask

_WORTH = 0.8  # a line must have at most this share of the rows of the padded forward
# A model's attention -> the same for rows in a line, and its name.
_INNER = {"sdpa": sdpa_attention_forward, EXACT: exact_attention}
_NAMES = {name: f"outpace_line_{name}" for name in _INNER}
_CELLS = "_outpace_cells"


def line_attention(model: Any) -> str | None:
    """The attention with which a model takes lines of rows; None if it cannot."""
    return _NAMES.get(model.config.get_text_config(decoder=True)._attn_implementation)


def cells_of(window: Window, multiple: int = 1, least: int = 1) -> Tensor | None:
    """The places of a line's rows in the padded forward, as indices into [B * width].

    Args:
        multiple: padding is appended until the number of rows is a multiple of this.
        least: and at least this.

    Returns:
        None if a line would save little.
    """
    width, count = window.width, sum(window.widths)
    total = width * len(window.widths)
    spare = max(least - count, 0)
    spare += -(count + spare) % multiple
    if window.span is not None or count + spare > _WORTH * total:
        return None
    real = [place * width + row for place, own in enumerate(window.widths) for row in range(own)]
    padding = (place * width + row for place, own in enumerate(window.widths) for row in range(own, width))
    return torch.tensor([*real, *itertools.islice(padding, spare)])


def mark(mask: Mask, cells: Tensor) -> Mask:
    """Tell the attention of a line, through its mask, where the rows belong."""
    for tensor in mask.values() if isinstance(mask, dict) else [mask]:
        assert tensor is not None  # only even rows need none
        vars(tensor)[_CELLS] = cells
    return mask


def cells_in(mask: Tensor) -> Tensor | None:
    """The cells that ``mark`` told; None if the rows are not in a line."""
    return vars(mask).get(_CELLS)


def _attention(inner: Any) -> Any:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        """Attention of rows in a line: [1, heads, N, size] to keys and values [B, heads, columns, size]."""
        cells: Tensor = vars(attention_mask)[_CELLS]
        batch, width = len(key), attention_mask.shape[2]
        padded = query.new_zeros((batch * width, query.shape[1], query.shape[3]))
        padded[cells] = query[0].transpose(0, 1)
        grid = padded.unflatten(0, (batch, width)).transpose(1, 2)
        result, _ = inner(module, grid, key, value, attention_mask, **more)
        return result.flatten(0, 1)[cells][None], None

    return attend


for _name, _inner in _INNER.items():
    AttentionInterface.register(_NAMES[_name], _attention(_inner))
    AttentionMaskInterface.register(_NAMES[_name], sdpa_mask)
