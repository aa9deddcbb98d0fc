"""Tiny transformers models written as GGUF files, with names, orders and settings as converters have them.

Written by the inverse of transformers' own mappings, so a file has what the loader is to find in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from outpace.testing.gguf import interleaved

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
FLOATS = ("ssm_conv1d", "ssm_a", "ssm_dt", "shortconv.conv", "ffn_gate_inp")  # in files of all types
Kinds = Callable[[str], str]  # name of a matrix in the file -> its type


def of_floats(name: str) -> str:
    return "f32"


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0, spread: float = 0.1) -> NDArray[np.uint8]:
    """Blocks of a type with random codes: their numbers have a deviation of about ``spread``."""
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    numbers, size = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(seed)
    if numbers == 1:
        floats = random.normal(0, spread, (rows, inputs)).astype(np.float32)
        return np.ascontiguousarray(gguf.quantize(floats, type_)).view(np.uint8).reshape(rows, -1)
    blocks = random.integers(0, 256, (rows * inputs // numbers, size), dtype=np.uint8)
    for place in HALVES.get(kind, (0,)):
        scale = random.uniform(0.5, 1.5, (len(blocks), 1)) * random.choice([-1, 1], (len(blocks), 1))
        blocks[:, place : place + 2] = (scale * spread * UNITS[kind]).astype(np.float16).view(np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = random.integers(120, 123, len(blocks))
    return blocks.reshape(rows, -1)


# Where a block's halves are, and about the inverse of a number's size in units of the first one.
HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2), "q4_1": (0, 2),
          "q5_1": (0, 2), "mxfp4": ()}  # fmt: skip
UNITS = {"q4_0": 0.2, "q4_1": 0.1, "q5_0": 0.1, "q5_1": 0.05, "q8_0": 0.014, "q2_k": 0.06, "q3_k": 0.025,
         "q4_k": 0.003, "q5_k": 0.0015, "q6_k": 0.0007, "iq4_nl": 0.015, "iq4_xs": 0.0008,
         "mxfp4": 1.0}  # fmt: skip


def write_file(
    model: Any,
    path: Path,
    kinds: Kinds = of_floats,
    more: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    without: str = "",
    split: int = 0,
) -> Path:
    """Write a model.

    Args:
        kinds: types of matrices; those in blocks are random, and not the model's, but those of q8_0.
        more: other values of the family, by names without its own.
        tensors: others, or in place of the model's, in float32.
        without: a tensor that is left out.
        split: tensors of a part of a split file, whose first part is returned; 0 for one file.
    """
    family = model.config.model_type
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    if family == "mistral":
        writer.add_name("mistral")  # by which transformers knows it
    mapping = GGUF_CONFIG_MAPPING.get(family) or GGUF_CONFIG_MAPPING.get(architecture, {})
    values = dict(more or {})
    for name, own in mapping.items():
        if own is not None and name not in values:
            values[name] = setting_of(model.config, own)
    for name, value in values.items():
        if value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }[type(value)]
            add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    for number, (name, weight) in enumerate(written(model, architecture).items()):
        if name == without or name in (tensors or {}):
            continue
        matrix = weight.dim() > 1 and not any(part in name for part in FLOATS)
        kind = kinds(name) if matrix else "f32"
        type_ = gguf.GGMLQuantizationType[kind.upper()]
        if kind in ("f32", "f16", "bf16", "q8_0"):
            blocks = gguf.quantize(weight.numpy(), type_)
        else:
            flat = random_blocks(kind, weight[..., 0].numel(), weight.shape[-1], seed=number)
            blocks = flat.reshape(*weight.shape[:-1], -1)
        writer.add_tensor(name, blocks, raw_dtype=type_)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split else path


def setting_of(config: Any, name: str) -> Any:
    if name == "rope_theta":
        rotation = config.rope_parameters
        return float(rotation.get("full_attention", rotation)["rope_theta"])
    return getattr(config, name, None)


def written(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """A model's tensors by llama.cpp's names, as the converter writes them."""
    known = get_gguf_hf_weights_map(model, TensorProcessor(), architecture)
    names = {own: name for name, own in known.items()}
    found = dict[str, torch.Tensor]()
    for own, whole in model.state_dict().items():
        weight = whole.float()
        if own == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        layer = next((part for part in own.split(".") if part.isdigit()), "")
        if own.endswith("experts.gate_up_proj"):
            for kind, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                found[f"blk.{layer}.ffn_{kind}_exps.weight"] = half.contiguous()
        elif own.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif own.endswith("linear_attn.dt_bias"):
            found[f"blk.{layer}.ssm_dt.bias"] = as_written(model.config, architecture, "ssm_dt.bias", weight)
        elif own.endswith("layer_scalar"):
            found[f"blk.{layer}.layer_output_scale.weight"] = weight
        elif own in names:
            found[names[own]] = as_written(model.config, architecture, names[own], weight).contiguous()
    if architecture == "gemma4":  # what is not rotated, in layers without a window
        kept = model.model.rotary_emb.full_attention_inv_freq != 0
        found["rope_freqs.weight"] = torch.where(kept, 1.0, 1e30)
    return found


def as_written(config: Any, architecture: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as the converter writes it."""
    if architecture == "llama" and ".attn_q." in name:
        return interleaved(weight, config.num_attention_heads)
    if architecture == "llama" and ".attn_k." in name:
        return interleaved(weight, config.num_key_value_heads)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in name:
        return weight + 1
    if architecture == "gpt2" and weight.dim() > 1 and ("attn_" in name or "ffn_" in name):
        return weight.T
    if architecture == "bloom" and "attn_qkv" in name:
        heads = weight.view(config.n_head, 3, -1, *weight.shape[1:])
        return heads.transpose(0, 1).reshape(weight.shape)
    if architecture == "mamba" and "ssm_a" in name:
        return -weight.exp()
    if architecture.startswith("qwen35"):
        return _hybrid(config, name, weight)
    if ".shortconv.conv." in name or ".ssm_conv1d.weight" in name:
        return weight.squeeze(1)
    return weight.squeeze(0) if "ffn_gate_inp_shexp" in name else weight


def _hybrid(config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight of Qwen 3.5, whose values' heads the converter writes in turns of the keys' heads."""
    keys = config.linear_num_key_heads
    before = 2 * keys * config.linear_key_head_dim  # rows of queries and keys

    def tiled(values: torch.Tensor, axis: int = 0) -> torch.Tensor:
        repeated = config.linear_num_value_heads // keys
        apart = values.movedim(axis, 0).unflatten(0, (keys, repeated, -1))
        return apart.transpose(0, 1).flatten(0, 2).movedim(0, axis)

    if "norm.weight" in name:
        return weight if "ssm_norm" in name else weight + 1
    if "ssm_a" in name and "alpha" not in name:
        return tiled(-weight.exp())
    if "ssm_out" in name:
        return tiled(weight, 1)
    if "attn_qkv" in name or "ssm_conv1d" in name:
        return torch.cat([weight[:before], tiled(weight[before:])]).squeeze(1)
    if any(part in name for part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")):
        return tiled(weight)
    return weight.squeeze(0) if "ffn_gate_inp_shexp" in name else weight
