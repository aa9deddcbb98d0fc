"""The recurrences of transformers' models, and the convolutions before them.

A function of a recurrence computes the output of one token, and the state after it, from its parent's state.
It takes the arguments of a family's function of many tokens, without their dimension of rows: [N, ...] for N
tokens that are computed together, each from a state of its own. All sums are over dimensions of a token, in
one order, so that a token has the same bits whatever is computed beside it. States are in float32 or wider,
as those of transformers' functions are inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

_LARGE = 20.0  # from here on softplus is the number itself
Step = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scan:
    """A recurrence that families of transformers call by a global name.

    Attributes:
        step: state [N, ...] and arguments of one token -> its output [N, ...], and the state after it.
        rows: arguments that have a dimension of rows, and ``dim``, which one it is; that of the output too.
        initial: argument for the state to begin with; empty if there is none.
        final: argument that asks for the last state.
        chunked: the function of many tokens computes whole chunks, faster than one token after another.
    """

    step: Step
    rows: tuple[str, ...]
    dim: int
    final: str
    initial: str = ""
    chunked: bool = True


def softplus(inputs: Tensor) -> Tensor:
    """log(1 + exp(x)) of each number.

    torch's own, as its SiLU, rounds the last numbers of a tensor otherwise than those that fill a vector of
    the processor; its exponential and its logarithm do not.
    """
    return torch.where(inputs > _LARGE, inputs, inputs.exp().log1p())


def silu(inputs: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of each number, in float32 or wider; see ``softplus``."""
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    return (wide / (1 + (-wide).exp())).to(inputs.dtype)


def _delta_rule(state: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464, equation 10).

    Kimi's form (Kimi Team 2025, arXiv 2510.26692, equation 1) has a decay for each channel of the keys.

    Args:
        state: [N, heads, size of keys, size of values].
        given: query, key [N, heads of keys, size], value [N, heads, size], beta [N, heads], and g, the
            logarithm of the decay, [N, heads] or [N, heads, size of keys].
    """
    query, key, value, beta, decay = (
        given[name].to(state.dtype) for name in ("query", "key", "value", "beta", "g")
    )
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) for rows in (query, key))
    query = query / query.shape[-1] ** 0.5
    if groups := value.shape[1] // key.shape[1] - 1:
        query, key = (rows.repeat_interleave(groups + 1, dim=1) for rows in (query, key))
    decay = decay.exp()[..., None]
    state = state * (decay if decay.dim() == state.dim() else decay[..., None])
    read = (state * key[..., None]).sum(-2)
    state = state + key[..., None] * ((value - read) * beta[..., None])[..., None, :]
    return (state * query[..., None]).sum(-2).to(given["query"].dtype), state


def _mamba2(state: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 2).

    Args:
        state: [N, heads, size of a head, size of the state].
        given: hidden_states [N, heads, size of a head], dt [N, heads], B, C [N, groups, size of the state],
            A, D, dt_bias [heads], and dt_limit, the least and the greatest dt.
    """
    heads = state.shape[1]
    values, keys, queries = (given[name].to(state.dtype) for name in ("hidden_states", "B", "C"))
    keys, queries = (rows.repeat_interleave(heads // rows.shape[1], dim=1) for rows in (keys, queries))
    step = _step_of(given["dt"], given.get("dt_bias"), given.get("dt_softplus"))
    step = step.clamp(*given.get("dt_limit", (0.0, float("inf")))).to(state.dtype)
    state = state * (given["A"].to(state.dtype) * step).exp()[..., None, None]
    state = state + (values * step[..., None])[..., None] * keys[:, :, None]
    out = (state * queries[:, :, None]).sum(-1)
    if (skipped := given.get("D")) is not None:
        out = out + skipped[:, None] * values
    return out, state


def _mamba(state: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The scan of Mamba (Gu and Dao 2023, arXiv 2312.00752, section 3).

    Args:
        state: [N, channels, size of the state].
        given: hidden_states, dt, z [N, channels], B, C [N, size of the state], A [channels, size of the
            state], D, delta_bias [channels].
    """
    values, keys, queries = (given[name].to(state.dtype) for name in ("hidden_states", "B", "C"))
    step = _step_of(given["dt"], given.get("delta_bias"), given.get("delta_softplus")).to(state.dtype)
    state = state * (step[..., None] * given["A"].to(state.dtype)).exp()
    state = state + (step[..., None] * keys[:, None]) * values[..., None]
    out = (state * queries[:, None]).sum(-1)
    if (skipped := given.get("D")) is not None:
        out = out + values * skipped
    if (gate := given.get("z")) is not None:
        out = out * silu(gate)
    return out.to(given["hidden_states"].dtype), state


def _step_of(step: Tensor, bias: Tensor | None, positive: bool | None) -> Tensor:
    step = step if bias is None else step + bias.to(step.dtype)
    return softplus(step) if positive else step


_DELTA = Scan(_delta_rule, ("query", "key", "value", "g", "beta"), 1, "output_final_state", "initial_state")
# Function of many tokens, or of one -> its recurrence. Mamba's of many tokens starts from no state.
SCANS: Mapping[str, Scan] = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "torch_recurrent_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "recurrent_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(
        _mamba2, ("hidden_states", "dt", "B", "C"), 1, "return_final_states", "initial_states"
    ),
    "mamba_selective_scan": Scan(
        _mamba, ("hidden_states", "dt", "B", "C", "z"), 2, "return_last_state", chunked=False
    ),
}


def taps_of(seen: Tensor, size: int, columns: Tensor | None) -> list[Tensor]:
    """The inputs of each weight of a convolution, [B, channels, R].

    Args:
        seen: columns before the rows, then the rows, [B, channels, size - 1 + R].
        columns: those that each row sees, [B, size, R]; None if these are the ones before it and itself.
    """
    if columns is None:
        width = seen.shape[-1] - size + 1
        return [seen[..., tap : tap + width] for tap in range(size)]
    shape = *seen.shape[:2], columns.shape[2]
    return [seen.gather(2, columns[:, tap, None].expand(shape)) for tap in range(size)]


def convolved(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """A convolution of each channel by itself, in one order of sums whatever the number of rows."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = taps[0].to(wide) * weight[:, 0, None].to(wide)
    for tap in range(1, len(taps)):
        out = out + taps[tap].to(wide) * weight[:, tap, None].to(wide)
    if bias is not None:
        out = out + bias[:, None].to(wide)
    out = out.to(weight.dtype)
    if activation is not None:
        out = silu(out) if activation in ("silu", "swish") else ACT2FN[activation](out)
    return out.to(taps[0].dtype)
