"""Recurrent layers of stock models over a tree of tokens: each node starts from the state of its parent.

All families of transformers call a causal convolution, and one of few recurrences (``scans.py``), by a global
name. In a copy of the model the forward of such a layer has other globals: these two functions ask the cache
object of the running forward, which knows the tree (``state_rows.py``). No weight is read twice for that,
since the layers' products see plain rows. The model is unchanged, and so is the copy without such a cache
object.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache

from outpace.cache import LayerShape, StateShape
from outpace.core import UnsupportedModel
from outpace.targets.inputs.config import family
from outpace.targets.inputs.context import forward_context
from outpace.targets.inputs.probe import Probe
from outpace.targets.inputs.scans import SCANS, Scan, convolved, softplus, taps_of
from outpace.targets.inputs.surgery import exchange

CONVOLUTION = "causal_conv1d_fn"
Key = tuple[str, int, int]  # "conv" or "scan"; the layer; which of its convolutions or scans


def with_states(model: Any) -> Any:
    """A copy of a model whose recurrent layers ask the cache object for convolutions and recurrences.

    Raises:
        UnsupportedModel: no layer calls them by the names that are known, or transformers is too old.
    """
    if not hasattr(Cache, "get_recurrent_state"):
        remedy = "pip install -U transformers" if sys.version_info >= (3, 11) else "it needs Python 3.11"
        raise UnsupportedModel(
            f"{family(model)} keeps a recurrent state, which can be followed since transformers 5.22; "
            f"this is {transformers.__version__}: {remedy}"
        )
    if has_states(model):
        return model
    copied = exchange(model, lambda _: None, None)
    found = [module for module in copied.modules() if CONVOLUTION in _names_of(module)]
    if not found:
        raise UnsupportedModel(
            f"{family(model)} keeps a recurrent state by functions that outpace does not know, so a rejected "
            "draft could not be taken out of it"
        )
    for module in found:
        module.__class__ = _adapted(type(module))
    return copied


class _Adapted:
    """Base of the classes of layers that ask the cache object."""


def is_adapted(module: Any) -> bool:
    """True for a layer that asks the cache object."""
    return isinstance(module, _Adapted)


def has_states(model: Any) -> bool:
    """True if ``with_states`` made a model, or it was copied from one that it made."""
    return any(map(is_adapted, model.modules()))


def convolutions_of(model: Any) -> list[nn.Module]:
    """The convolutions of a model's adapted layers, which are computed here."""
    layers = filter(is_adapted, model.modules())
    return [child for layer in layers for child in layer.children() if isinstance(child, nn.Conv1d)]


def reads_step_weight(module: Any) -> bool:
    """True for a layer that multiplies the weight of its ``dt_proj`` itself, as Mamba's do."""
    return is_adapted(module) and "mamba_selective_scan" in _names_of(module) and hasattr(module, "dt_proj")


def _names_of(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of layers whose forward has other globals."""
    forward: Any = inspect.unwrap(kind.forward)
    changed = dict(forward.__globals__)
    changed[CONVOLUTION] = partial(_convolve, changed[CONVOLUTION])
    if changed.get("F") is nn.functional:
        changed["F"] = _Functional()
    for name, scan in SCANS.items():
        if name in forward.__code__.co_names:
            changed[name] = partial(_scan, scan, changed[name], _parameters_of(changed[name]))
    copied = types.FunctionType(
        forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind, _Adapted), {"forward": copied, "__module__": kind.__module__})


class _Functional:
    """torch.nn.functional, with a softplus whose bits for a number depend on no other number."""

    softplus = staticmethod(softplus)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)


def _parameters_of(function: Any) -> dict[str, Any]:
    """A function's parameters, in order, with their default values."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _convolve(
    original: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    states: StatesOfLayers | None = forward_context().states
    if states is None:
        return original(rows, weight, bias, activation=activation, **options)
    return states.convolve(rows, weight, bias, activation)


def _scan(
    scan: Scan, original: Callable[..., Any], parameters: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    states: StatesOfLayers | None = forward_context().states
    if states is None:
        return original(*args, **options)
    given = dict(parameters) | dict(zip(parameters, args, strict=False)) | options
    return states.scan(scan, original, {name: each for name, each in given.items() if name in parameters})


class StatesOfLayers:
    """The part of transformers' cache that recurrent layers use: it has no state, so they compute all rows.

    A layer asks for its states before it calls the functions that ``with_states`` has replaced.
    """

    _conv: Key
    _layer = _scans = -1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._layer, self._scans = layer_idx, 0

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._conv = "conv", layer_idx, state_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if self._layer != layer_idx or not self._scans:
            raise UnsupportedModel(
                f"layer {layer_idx} keeps a recurrent state by a function that outpace does not know"
            )
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def _next_scan(self) -> Key:
        self._scans += 1
        return "scan", self._layer, self._scans - 1

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The causal convolution of rows, [B, channels, R], each with its own ancestors."""
        raise NotImplementedError

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """The output of a recurrence for all rows, and a state, which nothing reads."""
        raise NotImplementedError


class StateProbe(StatesOfLayers, Probe):
    """Recorder of the rows and the states of each layer.

    Attributes:
        states: shape of each state.
        grid: prompts are computed in pieces that begin at multiples of this; 0 where the recurrences compute
            one token after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.context.states = self
        self.states: dict[Key, StateShape] = {}
        self.grid = 0

    def layout(self, model: Any) -> tuple[dict[int, int], list[LayerShape]]:
        if not self.rows:  # no layer attends
            return {}, []
        return super().layout(model)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        size = rows.shape[1], weight.shape[-1] - 1
        self.states[self._conv] = StateShape(size, rows.dtype, rows.device)
        before = rows.new_zeros((rows.shape[0], *size))
        return convolved(
            taps_of(torch.cat([before, rows], -1), weight.shape[-1], None), weight, bias, activation
        )

    def scan(self, scan: Scan, original: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        out, state = original(**{**given, scan.final: True})
        wide = torch.promote_types(state.dtype, torch.float32)
        self.states[self._next_scan()] = StateShape(tuple(state.shape[1:]), wide, state.device)
        if scan.chunked:
            self.grid = math.lcm(self.grid or 1, given["chunk_size"])
        return out, state
