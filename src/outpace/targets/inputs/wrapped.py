"""The model in PEFT's wrapper."""

from __future__ import annotations

import sys
from typing import Any

from outpace.core import UnsupportedModel


def unwrapped(model: Any) -> Any:
    """The transformers model in PEFT's wrapper, whose modules have the adapters; any other model as it is.

    Raises:
        UnsupportedModel: the adapters are more than updates of weights.
    """
    peft = sys.modules.get("peft")  # its models are there only once it has been imported
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModel(
                f"{type(model).__name__}: {type(config).__name__} changes what the model reads, not only its "
                "weights; use a LoRA of weights alone, or transformers' own generate()"
            )
    return model.base_model.model
