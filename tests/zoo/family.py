"""A model family as data, and how to build a small random model of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 96
WINDOW = 8  # of sliding attention: well below the prompts' length

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A family and a configuration of it.

    Attributes:
        config: name of its config class in transformers.
        options: of the config, beside the common ones.
        sdpa: whether it has sdpa attention; eager it has always.
        sliding: whether some of its layers see a window only.
        common: whether its config takes the usual names.
        seed: of the weights; 0 unless that model loops.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True
    sliding: bool = False
    common: bool = True
    seed: int = 0

    def load(self) -> PreTrainedModel:
        """A model as transformers makes it: its own choice of attention and experts, in float32."""
        model = transformers.AutoModelForCausalLM.from_config(self._config()).eval()
        randomise(model, self.seed)
        return model

    def _config(self) -> PretrainedConfig:
        options = {**(COMMON if self.common else {}), **self.options}
        config: PretrainedConfig = getattr(transformers, self.config)(**options)
        return config

    def build(self, dtype: torch.dtype = torch.float64, attention: str | None = None) -> PreTrainedModel:
        """A model with random weights, the same in every run."""
        config = self._config()
        config._attn_implementation = attention or ("sdpa" if self.sdpa else "eager")
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        if hasattr(model, "set_experts_implementation") and _has_experts(config):
            model.set_experts_implementation("batched_mm")  # the default has no float64 kernel
        randomise(model, self.seed)
        return model


def _has_experts(config: Any) -> bool:
    return any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that greedy output neither loops nor comes near a tie."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if parameter in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.7 * parameter.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.3)
