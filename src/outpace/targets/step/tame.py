"""A copy of a model with random weights of a size at which nothing hides: rounding stays small in float32.

Whether masks, positions and a cache are honoured does not depend on weights, but whether it can be seen does:
attention that weighs one token alone hides a wrong bit of its mask, and a deep stack may amplify rounding
to the size of a mistake. So the copy's attention weighs all tokens about alike, and its layers, which share
their weights, add about as much as they are given.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.inputs.config import config_of
from outpace.targets.inputs.forward import device_of
from outpace.targets.inputs.masks import TREE
from outpace.targets.inputs.surgery import exchange

SLIDING = 8  # of sliding attention, at most: the test's texts reach past it
ROWS = 512  # of a table of embeddings, at most
_OUTPUTS = 64  # of a head, at most
# Implementations of attention that compute nothing in float32, or nothing on a CPU; they take sdpa's masks.
_NARROW = (TREE, "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def tame(model: Any, dtype: torch.dtype = torch.float32, gain: float = 0.5) -> Any:
    """Copy a model with random weights, on one device; the layers of one kind share them.

    Its sliding window is at most ``SLIDING``, and its tables and its head have few rows.

    Args:
        dtype: of the weights; half precision stays as it is in buffers.
        gain: of linear layers; the scores of attention spread by about its square (T5's, which does not scale
            them, by more).
    """
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    copied = exchange(model, _unquantised, "sdpa" if attention in _NARROW else attention)
    if dtype == torch.float64 and getattr(copied.config, "_experts_implementation", None):
        copied.set_experts_implementation("batched_mm")  # others have no kernel for it
    made = _Made(dtype, gain, device_of(model.get_input_embeddings()))
    # A bias may be added to all outputs of an encoder-decoder model's head.
    head = None if model.config.is_encoder_decoder else copied.get_output_embeddings()
    for name, module in copied.named_modules():
        most = ROWS if isinstance(module, nn.Embedding) else _OUTPUTS if module is head else None
        fields = vars(module)
        fields["_parameters"] = {
            part: None if weight is None else made.weight(f"{name}.{part}", weight, module, most)
            for part, weight in module._parameters.items()
        }
        fields["_buffers"] = {
            part: None if buffer is None else made.buffer(buffer) for part, buffer in module._buffers.items()
        }
        for size in {"out_features", "num_embeddings"}.intersection(fields if most else ()):
            fields[size] = len(fields["_parameters"]["weight"])
        if most and isinstance(pad := fields.get("padding_idx"), int) and pad >= most:
            fields["padding_idx"] = None  # it matters to gradients alone, but must be in the table
        fields.pop("forward", None)  # accelerate's, which runs the model's own module
        if isinstance(window := fields.get("sliding_window"), int):
            fields["sliding_window"] = min(window, SLIDING)
    # The decoder of a model that reads more than text has a copy of its own.
    for config in (copied.config.get_text_config(decoder=True), config_of(copied.get_decoder(), copied)):
        if getattr(config, "sliding_window", None):
            vars(config)["sliding_window"] = min(config.sliding_window, SLIDING)
    return copied


def _unquantised(module: nn.Module) -> nn.Module | None:
    """A linear layer of floats in place of one whose weights are something else."""
    inputs, outputs = (getattr(module, name, None) for name in ("in_features", "out_features"))
    if isinstance(module, nn.Linear) and module.weight.is_floating_point():
        return None
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        return None
    return nn.Linear(inputs, outputs, bias=getattr(module, "bias", None) is not None, device="meta")


class _Made:
    """The random weights of a copy."""

    def __init__(self, dtype: torch.dtype, gain: float, device: torch.device) -> None:
        self._dtype, self._gain, self._device = dtype, gain, device
        self._known: dict[Any, nn.Parameter] = {}

    def weight(self, name: str, weight: Tensor, module: nn.Module, most: int | None) -> nn.Parameter:
        """Random numbers in place of a weight, the same for weights of one name in different layers.

        Args:
            most: number of its rows, at most; None for all.
        """
        if not weight.is_floating_point():
            return nn.Parameter(weight.detach().to(self._device), requires_grad=False)
        shape = tuple(weight.shape) if most is None else (min(weight.shape[0], most), *weight.shape[1:])
        key = re.sub(r"\.\d+\.", ".", name), shape
        if key not in self._known:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(self._known)))
            if len(shape) < 2:
                noise = 0.1 * noise + float(name.endswith("weight"))  # a norm's is about 1
            elif not isinstance(module, nn.Embedding):
                noise *= self._gain * (shape[-1] * shape[-2]) ** -0.25  # either may be the number of inputs
            self._known[key] = nn.Parameter(noise.to(self._device, self._dtype), requires_grad=False)
        return self._known[key]

    def buffer(self, buffer: Tensor) -> Tensor:
        half = buffer.dtype in (torch.float16, torch.bfloat16)
        wide = self._dtype if half or buffer.dtype == torch.float64 else buffer.dtype
        return buffer.to(self._device, wide)
