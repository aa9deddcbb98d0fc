"""Attention for rows in a line: each window is padded for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.targets.cpu.exact_attention import EXACT, exact_attention
from outpace.targets.inputs.line import windows_in
from outpace.targets.inputs.shared import shared_here

# A model's attention -> the same for rows in a line, and its name.
_INNER = {"sdpa": sdpa_attention_forward, EXACT: exact_attention}
_NAMES = {name: f"outpace_line_{name}" for name in _INNER}


def line_attention(model: Any) -> str | None:
    """The attention with which a model takes lines of rows; None if it cannot."""
    return _NAMES.get(model.config.get_text_config(decoder=True)._attn_implementation)


def _attention(inner: Any) -> Any:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        """Attention of rows in a line: [1, heads, N, size] to keys and values [B, heads, columns, size]."""
        results, shared = [], shared_here()
        # A family that computes other keys from the cached ones loses those of further windows.
        tensors = [(key, value), *shared.get(key, ())]
        for in_line, (keys, values) in zip(windows_in(attention_mask, shared), tensors, strict=True):
            rows = query[:, :, in_line.span]
            if in_line.cells is not None:
                width = in_line.window.width
                padded = query.new_zeros((len(keys) * width, query.shape[1], query.shape[3]))
                padded[in_line.cells] = rows[0].transpose(0, 1)
                rows = padded.unflatten(0, (len(keys), width)).transpose(1, 2)
            result, _ = inner(module, rows, keys, values, in_line.mask, **more)
            results.append(result if in_line.cells is None else result.flatten(0, 1)[in_line.cells][None])
        line = torch.cat(results, dim=1)
        return nn.functional.pad(line, (0, 0, 0, 0, 0, query.shape[2] - line.shape[1])), None

    return attend


for _name, _inner in _INNER.items():
    AttentionInterface.register(_NAMES[_name], _attention(_inner))
    AttentionMaskInterface.register(_NAMES[_name], sdpa_mask)
