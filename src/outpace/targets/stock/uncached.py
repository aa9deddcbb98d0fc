"""Forwards of a stock model without a cache: for drafters that read or train through the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.base import TargetModel
from outpace.targets.inputs.config import family, several_states
from outpace.targets.rows import HiddenStates, Reading
from outpace.targets.step.modules import Modules


class UncachedForwards(TargetModel):
    """A target that runs its model without a cache, and shares its embeddings, states and head.

    Attributes:
        released: some of the model's own weights were freed, so that it cannot run as a whole.
    """

    released = False
    _modules: Modules
    _hidden_size: int
    _scale: Callable[[Tensor], Tensor]

    def through(
        self,
        states: Tensor,
        positions: Tensor,
        seen: Tensor,
        hidden_layers: Sequence[int] = (),
        weights: Mapping[str, Tensor] | None = None,
    ) -> Reading:
        self._need_weights()
        arguments = {
            "inputs_embeds": states,
            "output_hidden_states": bool(hidden_layers),
            **self._whole(positions, seen),
        }
        # Gradients reach only the given weights, not the model's own.
        frozen = {name: weight.detach() for name, weight in self.model.named_parameters()}
        output = torch.func.functional_call(self.model, frozen | dict(weights or {}), kwargs=arguments)
        return Reading(output.logits, {layer: output.hidden_states[layer] for layer in hidden_layers})

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        self._need_weights()
        logits: Tensor = self.model(input_ids=tokens, **self._whole(positions, seen)).logits
        return logits

    def states(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Inputs of the head, [B, N, hidden size], by ``read``'s forward."""
        self._need_weights()
        states: Tensor = self.model.base_model(input_ids=tokens, **self._whole(positions, seen))[0]
        return states

    def _need_weights(self) -> None:
        if self.released:
            raise OutpaceError(
                f"{family(self.model)} cannot be trained or read as a whole: its weights were released; load "
                "it again"
            )

    def _whole(self, positions: Tensor, seen: Tensor) -> dict[str, Any]:
        """Arguments of a forward without a cache, except its inputs."""
        mask = self._modules.model_masks.whole_mask(seen, positions)
        return {"attention_mask": mask, "position_ids": positions, "use_cache": False}

    @property
    def hidden(self) -> HiddenStates:
        if several_states(self.model):
            raise UnsupportedModel(
                f"{family(self.model)} passes several states of a row from layer to layer, so "
                "drafters cannot read them; use one without trained parts"
            )
        return self._inputs

    @property
    def _inputs(self) -> HiddenStates:
        """Size, dtype and device of the first layer's inputs."""
        return HiddenStates(self._hidden_size, self.model.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        embeddings: Any = self.model.get_input_embeddings()
        with torch.no_grad():
            embedded: Tensor = embeddings(tokens)
        return embedded

    def head(self, states: Tensor) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        logits: Tensor = head(states.to(head.weight.dtype))
        return self._scale(logits)


def scale_of(config: Any) -> Callable[[Tensor], Tensor]:
    """The function that a family applies to the logits of its head: a factor, and a soft cap."""
    # Cohere multiplies, Granite divides.
    factor = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)

    def scale(logits: Tensor) -> Tensor:
        logits = logits if factor == 1 else logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return scale
