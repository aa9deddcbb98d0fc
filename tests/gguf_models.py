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

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
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
        kinds: types of matrices; those in blocks are random, and not the model's.
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
    mapping = GGUF_CONFIG_MAPPING.get(family) or GGUF_CONFIG_MAPPING[architecture]
    values = {name: setting_of(model.config, own) for name, own in mapping.items() if own is not None}
    for name, value in {**values, **(more or {})}.items():
        if value is not None:
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }[type(value)]
            add(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    weights = model.state_dict()
    for number, (name, own) in enumerate(
        get_gguf_hf_weights_map(model, TensorProcessor(), architecture).items()
    ):
        if own == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name == without or name in (tensors or {}):
            continue
        weight = as_written(model.config, architecture, name, weights[own].float())
        kind = kinds(name) if weight.dim() == 2 else "f32"
        if kind in ("f32", "f16", "bf16"):
            type_ = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor(name, gguf.quantize(weight.numpy(), type_), raw_dtype=type_)
        else:
            blocks = random_blocks(kind, *weight.shape, seed=number)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
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


def as_written(config: Any, architecture: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as the converter writes it."""
    if architecture == "llama" and ".attn_q." in name:
        return interleaved(weight, config.num_attention_heads)
    if architecture == "llama" and ".attn_k." in name:
        return interleaved(weight, config.num_key_value_heads)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in name:
        return weight + 1
    if ".shortconv.conv." in name:
        return weight.squeeze(1)
    return weight
