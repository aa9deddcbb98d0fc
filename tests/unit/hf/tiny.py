"""Tiny random models in float64."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BOS, EOS, PAD = 256, 257, 258
SIZES = {"vocab_size": 259, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Of the 259 tokens these alone are likely, so that texts repeat themselves and drafts are accepted.
LIKELY = [*b" etaoinsh\n", EOS]


SEEDS = {"llama": 1, "gpt2": 0}  # with these some rows end before others
EOS_BIAS = -3.0
NEVER = 7  # a token that none of these models says


def make(family: str, **options: Any) -> Any:
    """A random model whose tokens depend on all of its text; the same under every version of transformers."""
    model: Any
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **SIZES, **options))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **SIZES, **options))
    bias = torch.full((259,), -30.0)
    bias[LIKELY] = 0
    bias[EOS] = EOS_BIAS
    random = torch.Generator().manual_seed(SEEDS[family])
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.25 if family == "llama" else 0.12, generator=random)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(259, 32, generator=random) * 0.3)
        model.lm_head.bias = torch.nn.Parameter(bias)
    return model.double().eval()


class Forwards:
    """Counts the forwards of a model."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._hook = model.register_forward_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def close(self) -> None:
        self._hook.remove()
