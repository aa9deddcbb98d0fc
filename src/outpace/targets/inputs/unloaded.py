"""Refusals by a model's class and config alone, before a weight is read or memory spent."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from outpace.core import UnsupportedModel
from outpace.targets.inputs.config import cache_argument, family
from outpace.targets.inputs.refusals import keeps_states, not_taken, refuse_state, why_chains_only

# Type of a family -> the reason why it is refused, where neither its class nor its config shows it.
KNOWN = MappingProxyType({
    "prophetnet": "takes one token at a time once there is a cache",
    "moshi": "has a window other than its config's",
    "cpmant": "takes no mask that fits what is in a cache",
})  # fmt: skip


def refuse_unloaded(loader: Any, config: Any) -> None:
    """Refuse a model that would be refused once it is loaded.

    Args:
        loader: transformers' class that would load it, such as AutoModelForCausalLM.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """
    mapping = getattr(loader, "_model_mapping", {})
    if type(config) not in mapping.keys():
        return  # code that comes with the model
    kinds = mapping[type(config)]
    kind = kinds[0] if isinstance(kinds, tuple) else kinds
    model = _without_parts(kind, config)
    if why := KNOWN.get(config.model_type):
        raise UnsupportedModel(f"{family(model)} {why}")
    states = keeps_states(model)
    refuse_state(model, states)
    if missing := not_taken(model, [cache_argument(model)]):
        raise UnsupportedModel(
            f"{family(model)} takes no {missing}, so a draft cannot follow what is in a cache"
        )
    if not getattr(config, "is_encoder_decoder", False):
        why_chains_only(model, states=states)


def _without_parts(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """An instance of a class with a config and without modules, for questions that need no more."""
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model
