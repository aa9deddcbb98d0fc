"""The target's head as drafters use it: its weights, and the part of it for the ids that are drafted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outpace.targets.base import TargetModel
from outpace.targets.cpu.linear import pack_drafter
from outpace.targets.inputs.changes import WatchedWeights


@torch.no_grad()
def head_weights(target: TargetModel) -> tuple[Tensor, Tensor] | None:
    """The target's head as a matrix [vocabulary, hidden size] and a bias [vocabulary].

    Drafters initialise their own heads from it. None if the head is not affine, for example with a soft cap.
    """
    hidden = target.hidden
    if (own := _output_layer(target)) is not None:
        places = torch.arange(0, hidden.size, max(1, hidden.size // 8), device=hidden.device)
        # Large inputs, so that a soft cap shows; and none, for the bias.
        tried = torch.zeros(len(places) + 1, hidden.size, dtype=hidden.dtype, device=hidden.device)
        tried[1:].scatter_(1, places[:, None], 1000.0)
        if torch.allclose(target.head(tried), functional.linear(tried, *own), rtol=0.02):
            return own
    units = torch.eye(hidden.size, dtype=hidden.dtype, device=hidden.device)
    bias = target.head(torch.zeros_like(units[0]))
    columns = target.head(units) - bias
    linear = torch.allclose(target.head(-4 * units) - bias, -4 * columns, rtol=1e-4, atol=1e-4)
    return (columns.T, bias) if linear else None


def _output_layer(target: TargetModel) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of the model's output layer, as ``hidden`` describes states; None if it is not plain.

    The target's head need not be this layer alone. Where it is, this saves applying it to all units, which
    takes most of a second even for a small model.
    """
    hidden = target.hidden
    layer = getattr(target.model, "get_output_embeddings", lambda: None)()
    if type(layer) is not nn.Linear or layer.weight.is_meta:
        return None
    if layer.weight.shape != (target.vocabulary, hidden.size):
        return None
    weight = layer.weight.detach().to(hidden.device, hidden.dtype)
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().to(weight)
    return weight, bias


class PartialHead:
    """The target's head restricted to some ids, without the cost of the others if it is a matrix.

    Args:
        ids: [n]; None for all of them.
    """

    def __init__(self, target: TargetModel, ids: Tensor | None) -> None:
        self._target = target
        self._ids = ids
        self._reads = 0
        self._read()

    def _read(self) -> None:
        """Copy the ids' part of the head."""
        self._reads += 1
        layer = getattr(self._target.model, "get_output_embeddings", lambda: None)()
        self._weights = WatchedWeights([] if layer is None else [layer])
        whole = None if self._ids is None else head_weights(self._target)
        self._own = None if whole is None else (whole[0][self._ids], whole[1][self._ids])
        self._packed: nn.Module | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether it is computed for the ids alone, from the input of the target's head."""
        return self._own is not None

    def revision(self) -> int:
        """The number of times that the head was copied, after a look whether it has changed."""
        if self._ids is not None and self._weights.changed(thorough=False):
            self._read()
        return self._reads

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [..., n] of inputs of the head, [..., hidden size]. Gradients reach the inputs."""
        self.revision()
        if self._own is None:
            return self.among(self._target.head(states))
        if torch.is_inference_mode_enabled() and states.dtype == self._own[0].dtype:
            logits: Tensor = self._drafting()(states)
            return logits
        matrix, bias = (part.to(states.dtype) for part in self._own)
        return functional.linear(states, matrix, bias)

    def _drafting(self) -> nn.Module:
        """The matrix as a layer."""
        if self._packed is None:
            assert self._own is not None
            self._packed = drafting_layer(*self._own)
        return self._packed

    def among(self, logits: Tensor) -> Tensor:
        """The ids' logits, [..., n], among all of them, [..., vocabulary]."""
        return logits if self._ids is None else logits[..., self._ids]


def drafting_layer(matrix: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A matrix [outputs, inputs] as a layer, packed on a CPU as ``pack_drafter`` does."""
    layer = nn.Linear(matrix.shape[1], len(matrix), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    made = nn.Sequential(layer)
    if matrix.device.type == "cpu":
        pack_drafter(made)
    return made
