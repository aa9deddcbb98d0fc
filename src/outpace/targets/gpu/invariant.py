"""Bit-exact steps on a GPU: a model's layers on the kernels of ``invariant_kernels.py``.

Libraries for GPUs choose tiles and splits by the number of rows, and torch the threads that sum a row's
squares in a norm, so a row has other bits among other rows. These layers do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.core import UnsupportedModel
from outpace.targets.inputs.masks import INVARIANT
from outpace.targets.kernel import Kernel, StockKernel

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_CLOSE = 4  # units in the last place by which a norm may differ from the model's own

# A row's sums in these are not split by the number of rows, on any device.
_SUMS_BY_ROW = (nn.LayerNorm,)


class Triton(Kernel):
    """Products whose tiles do not depend on the number of rows."""

    name = "Triton"
    dtypes = StockKernel.dtypes
    copies = False
    alike = True

    def pack(self, weight: Tensor) -> Any:
        return weight

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        from outpace.targets.gpu.invariant_kernels import linear

        return linear(rows, packed, bias)


TRITON = Triton()


class InvariantNorm(nn.Module):
    """A root mean square norm; see ``invariant_kernels.norm``."""

    def __init__(self, weight: Tensor, epsilon: float, adds_one: bool, rounds: bool) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon
        self.adds_one, self.rounds = adds_one, rounds

    def forward(self, states: Tensor) -> Tensor:
        from outpace.targets.gpu.invariant_kernels import norm

        return norm(states, self.weight, self.epsilon, self.adds_one, self.rounds)


def invariant_norm(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """The replacement of a root mean square norm of rows of a dtype, found by a trial; None for others."""
    weight = getattr(module, "weight", None)
    epsilon = next((vars(module)[name] for name in _EPSILONS if name in vars(module)), None)
    if not _is_norm(module) or epsilon is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if len(list(module.parameters())) > 1:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, len(weight), generator=generator).to(weight.device, dtype)
    with torch.inference_mode():
        expected = module(rows)
        found = [
            InvariantNorm(weight, epsilon, adds_one, rounds)
            for adds_one in (False, True)
            for rounds in (True, False)
        ]
        off = [float((norm(rows).double() - expected.double()).abs().max()) for norm in found]
    best = min(range(len(off)), key=off.__getitem__)
    allowed = _CLOSE * torch.finfo(dtype).eps * float(expected.abs().max())
    return found[best] if expected.dtype == dtype and off[best] <= allowed else None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not isinstance(module, (*_SUMS_BY_ROW, InvariantNorm))


def why_norm_unproven(step: nn.Module) -> str | None:
    """The first norm whose sums may depend on the number of rows, and the reason; None if there is none."""
    for name, module in step.named_modules():
        if _is_norm(module):
            return f"{name} ({type(module).__name__}) sums as torch does, by the number of rows"
    return None


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``.

    Its mask is one of ``device_rows.in_order``. The other arguments are those of ``tree_attention``.

    Raises:
        UnsupportedModel: the model needs other features, or makes its own masks.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise UnsupportedModel(f"attention with {'dropout' if dropout else 'a bias'} has no bit-exact form")
    if attention_mask is None or attention_mask.dtype != torch.int32:
        raise UnsupportedModel("the model makes its own masks, which have no bit-exact attention")
    from outpace.targets.gpu.invariant_kernels import attend

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, attention_mask, scale, softcap, s_aux), None


AttentionInterface.register(INVARIANT, invariant_attention)
AttentionMaskInterface.register(INVARIANT, sdpa_mask)
