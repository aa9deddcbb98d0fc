"""A stock model whose layers run on given inputs, each for itself, in its own dtype or in a wider one.

Rounding grows from layer to layer; in some models the logits in bfloat16 are then as far from those in
float32 as from another text's. A layer that gets the very inputs of another computation shows only its own
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.targets.inputs.config import config_of
from outpace.targets.inputs.surgery import exchange

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_OUTPUTS = 1 << 13  # outputs of a head whose weights are converted at once


def wider(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """A dtype whose rounding is negligible beside that of ``dtype``; None if there is none on a device."""
    found = _WIDER.get(dtype)
    return None if found is torch.float64 and device.type == "mps" else found


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a model's decoder, in their order; empty if they are not told apart."""
    decoder: Any = model.get_decoder()
    config, names = config_of(decoder, model), ["num_decoder_layers", "decoder_layers", "num_hidden_layers"]
    if not model.config.is_encoder_decoder:
        config, names = config.get_text_config(decoder=True), names[2:]
    count = next((size for name in names if (size := getattr(config, name, None))), 0)
    lists = [
        module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    inside = {id(part) for module in lists for part in module.modules() if part is not module}
    outer = [module for module in lists if id(module) not in inside]
    return list(outer[0]) if len(outer) == 1 and count else []


_ALL = 8  # layers of a model of which none is left out


def kinds_of(model: Any) -> list[Any]:
    """What tells layers of a model apart: their kind in its config, classes and settings of modules."""
    layers = layers_of(model)
    named = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    named = named if len(named) == len(layers) else [""] * len(layers)

    def settings(module: nn.Module) -> Any:
        own = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and "layer_id" not in name
        }
        own.pop("layer_idx", None)
        return type(module), tuple(sorted(own.items(), key=lambda item: item[0]))

    return [
        (kind, *((name, settings(module)) for name, module in layer.named_modules()))
        for kind, layer in zip(named, layers, strict=True)
    ]


def shown(model: Any) -> list[int]:
    """The layers that stand for the others: the first, one between and the last, and these of each kind."""
    kinds = kinds_of(model)
    if len(kinds) <= _ALL:
        return list(range(len(kinds)))
    places: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        places.setdefault(kind, []).append(number)
    chosen = {numbers[at] for numbers in places.values() for at in (0, len(numbers) // 2, -1)}
    return sorted(chosen | {0, len(kinds) - 1})


class Replay:
    """A copy of a model that runs its layers on given inputs; all weights are shared.

    Args:
        model: a loaded model, which stays unchanged.
        layers: its decoder's layers.
        dtype: modules run as copies in this dtype, one at a time; None for their own.
        shown: the layers that run; the others give back their inputs, if the first one gives one tensor.
        after: called with each layer that ran.

    Attributes:
        ran: the layers that ran.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        dtype: torch.dtype | None = None,
        shown: Sequence[int] | None = None,
        after: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.inputs: Sequence[Tensor] = ()
        self.noted: list[Tensor] = []
        self.ran: set[int] = set()
        self.shown = set(range(len(layers)) if shown is None else shown)
        self.after = after
        self.plain = False  # a layer gives one tensor
        numbers = {id(layer): number for number, layer in enumerate(layers)}
        around = {
            id(module) for module in model.modules() if any(id(part) in numbers for part in module.modules())
        }

        def change(module: nn.Module) -> nn.Module | None:
            if id(module) in numbers:
                return _Layer(self, numbers[id(module)], module, dtype)
            # Tables are read, not computed with; a copy of one would be large.
            apart = id(module) not in around and module is not model and not isinstance(module, nn.Embedding)
            if dtype is None or not apart or next(module.parameters(), None) is None:
                return None
            return _Wide(module, dtype)

        self._model = exchange(model, change, None)

    def __call__(self, run: Callable[[Any], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The input of each layer as it follows from the given input of the one before, then the logits.

        After a layer that did not run, the given input.

        Args:
            run: the logits of a copy of the model.
            inputs: input of each layer, [B, n, hidden size].

        Raises:
            UnsupportedModel: the model runs some layer several times, as Dory does, or not at all.
        """
        self.inputs, self.noted = inputs, []
        logits = run(self._model)
        if len(self.noted) != len(inputs):
            raise UnsupportedModel(f"{len(inputs)} layers ran {len(self.noted)} times in one forward")
        followed = (number - 1 in self.ran or not number for number in range(len(inputs)))
        return [
            *(
                noted if told else given
                for told, noted, given in zip(followed, self.noted, inputs, strict=True)
            ),
            logits,
        ]


class _Around(nn.Module):
    """A module in place of another, whose attributes it has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        vars(self)["inner"] = inner  # not a child, whose weights would be counted as the model's

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


class _Wide(_Around):
    """A module that runs as a copy in another dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(inner)
        vars(self)["dtype"] = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner, dtype = vars(self)["inner"], vars(self)["dtype"]
        args, kwargs = _converted(args, dtype), _converted(kwargs, dtype)
        if type(inner) is not nn.Linear or inner.out_features <= _OUTPUTS:
            kept: dict[int, Any] = {
                id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False)
                for weight in inner.parameters()
                if type(weight) is nn.Parameter and weight.is_floating_point()
            }  # so that a copy in the own dtype is not made first
            return copy.deepcopy(inner, kept).to(dtype)(*args, **kwargs)
        parts = [nn.functional.linear(args[0], part.to(dtype)) for part in inner.weight.split(_OUTPUTS)]
        product = torch.cat(parts, dim=-1)
        return product if inner.bias is None else product + inner.bias.to(dtype)


class _Layer(_Around):
    """A layer that runs on its given input, and notes the one that it would have had."""

    def __init__(self, replay: Replay, number: int, inner: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__(inner)
        vars(self).update(run=inner if dtype is None else _Wide(inner, dtype), replay=replay, number=number)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fields = vars(self)
        replay: Replay = fields["replay"]
        number: int = fields["number"]
        replay.noted.append(args[0] if args else kwargs.pop("hidden_states"))
        if replay.plain and number not in replay.shown:
            return replay.inputs[number]
        replay.ran.add(number)
        result = fields["run"](replay.inputs[number], *args[1:], **kwargs)
        replay.plain = isinstance(result, Tensor)
        if replay.after is not None:
            replay.after(fields["inner"])
        return result


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating tensors among nested arguments."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_converted(item, dtype) for item in value)
    if type(value) is dict:
        return {name: _converted(item, dtype) for name, item in value.items()}
    return value
