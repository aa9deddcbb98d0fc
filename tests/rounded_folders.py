"""Tiny models whose weights are rounded by groups, saved in the layouts that others publish them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from folders import byte_tokenizer

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq zeros": {**GPTQ, "sym": False, "checkpoint_format": "gptq"},
    "gptq_v2 zeros": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq whole": {**GPTQ, "group_size": -1},
    "gptq 8": {**GPTQ, "bits": 8},
    "awq": AWQ,
    "packed": {},
    "packed zeros": {},
    "packed 8": {},
    "int": {},
}


def packed_config(bits: int = 4, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """The config of a checkpoint of compressed-tensors; ``weights`` are entries of its scheme of weights."""
    usual = {"type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    scheme = {"num_bits": bits, **usual, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


CONFIGS["packed"] = packed_config()
CONFIGS["packed zeros"] = packed_config(symmetric=False)
CONFIGS["packed 8"] = packed_config(8)
CONFIGS["int"] = packed_config(8, "int-quantized", strategy="channel", group_size=None)


def rounded_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random model whose greedy text does not settle into one token; one layer has a bias."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attention_bias=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(weight)
    return model


def save_rounded(folder: Path, kind: str) -> LlamaForCausalLM:
    """Write a model in the layout of ``CONFIGS[kind]``, and return it in float32 with the same weights."""
    model, config = rounded_llama(), CONFIGS[kind]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    wide = model.float()
    for name, module in wide.named_modules():
        if isinstance(module, nn.Linear) and module is not wide.lm_head:
            bits = 8 if kind in ("gptq 8", "packed 8", "int") else 4
            group = module.in_features if kind in ("gptq whole", "int") else GROUP
            numbers, scales, zeros = _round(
                module.weight.detach(), bits, group, "zeros" in kind or kind == "awq"
            )
            module.weight.data = (numbers - _spread(zeros, group)) * _spread(scales.float(), group)
            del tensors[f"{name}.weight"]
            parts = _LAYOUTS[config["quant_method"]](config, bits, group, numbers, scales, zeros)
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, config)
    return wide


def set_config(folder: Path, config: dict[str, Any]) -> None:
    """Write another ``quantization_config``."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def _round(weight: Tensor, bits: int, group: int, own_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [outputs, inputs] from 0 on, scales in float16 and zeros, [outputs, groups]."""
    groups = weight.unflatten(1, (-1, group))
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if own_zeros:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(1, top).int()
    else:
        scales = (groups.abs().amax(-1) / (middle - 0.5)).half()
        zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    numbers = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, top).flatten(1).int(), scales, zeros


def _spread(values: Tensor, group: int) -> Tensor:
    return values.repeat_interleave(group, dim=1)


def _words(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Words of 32 bits of consecutive numbers of a row; ``order``: which of eight is in which place."""
    many = 32 // bits
    padded = nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % many)).unflatten(1, (-1, many))
    word = sum(padded[..., one] << (bits * place) for place, one in enumerate(order or range(many)))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def _gptq(
    config: dict[str, Any], bits: int, group: int, numbers: Tensor, scales: Tensor, zeros: Tensor
) -> dict[str, Tensor]:
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": _words(numbers, bits).T,
        "qzeros": _words(zeros.T - less, bits),
        "scales": scales.T,
        "g_idx": (torch.arange(numbers.shape[1]) // group).int(),
    }


def _awq(
    config: dict[str, Any], bits: int, group: int, numbers: Tensor, scales: Tensor, zeros: Tensor
) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": _words(numbers.T, bits, order), "qzeros": _words(zeros.T, bits, order), "scales": scales.T
    }  # fmt: skip


def _compressed(
    config: dict[str, Any], bits: int, group: int, numbers: Tensor, scales: Tensor, zeros: Tensor
) -> dict[str, Tensor]:
    if config["format"] == "int-quantized":
        return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
    found = {
        "weight_packed": _words(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(numbers.shape),
    }
    symmetric = config["config_groups"]["group_0"]["weights"]["symmetric"]
    return found if symmetric else {**found, "weight_zero_point": _words(zeros.T, bits).T}


_LAYOUTS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
