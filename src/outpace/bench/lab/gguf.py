"""A Llama model as a GGUF file, for comparing with llama.cpp on the same weights.

The file has weights and no tokenizer: llama.cpp knows a few ways to split text before its tokenizer merges
bytes, and a model's own is often none of them. It takes and returns token ids, which is all that a comparison
needs, and what makes it fair.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.bench.lab.llama_shapes import Shape
from outpace.core import OutpaceError, UnsupportedModel
from outpace.files import beside

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_gguf(model: Any, path: Path, dtype: str = "float32") -> None:
    """Write a model's weights to a GGUF file. llama.cpp then reads it by token ids.

    Args:
        model: a loaded transformers model of the family llama.
        path: the file; an existing one is replaced.
        dtype: of the matrices, ``float32``, ``float16`` or ``bfloat16``. Norms are float32 always.

    Raises:
        UnsupportedModel: another family, biases, or scaled rotary embeddings. OutpaceError: the package gguf
            is missing, or an unknown dtype.
    """
    gguf = _package()
    if dtype not in _DTYPES:
        raise OutpaceError(f"GGUF is not written in {dtype!r} here; there are: {', '.join(_DTYPES)}")
    _check(model.config)
    draft = beside(path)
    try:
        writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
        _describe(writer, model.config)
        try:
            _write_tensors(gguf, writer, model, dtype)
        finally:
            writer.close()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder a query or key projection for llama.cpp, [heads * head_dim, in].

    transformers rotates the places i and i + head_dim / 2 of a head together, llama.cpp 2 i and 2 i + 1.
    """
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _package() -> ModuleType:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise OutpaceError("GGUF files need the package gguf: pip install 'outpace[gguf]'") from error


def _check(config: Any) -> None:
    if config.model_type != "llama":
        raise UnsupportedModel(
            f"only models of the family llama are written as GGUF, and this is one of {config.model_type}"
        )
    if config.attention_bias or config.mlp_bias:
        raise UnsupportedModel(
            "a Llama model with biases is not written as GGUF; leave the peer llama.cpp out"
        )
    rope = config.rope_parameters["rope_type"]
    if rope != "default":
        raise UnsupportedModel(
            f"rotary embeddings of type {rope!r} are not written as GGUF; leave the peer llama.cpp out"
        )


def _describe(writer: Any, config: Any) -> None:
    """The sizes, under llama.cpp's names."""
    shape = Shape.of(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _write_tensors(gguf: ModuleType, writer: Any, model: Any, dtype: str) -> None:
    """Write all tensors: first their descriptions, then their data one by one."""
    config = model.config
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights: Mapping[str, Tensor] = model.state_dict()
    # A head that is the embeddings is left out, and llama.cpp takes the embeddings.
    names = [name for name in weights if name != "lm_head.weight" or not config.tie_word_embeddings]
    kinds = {name: _kind(gguf, weights[name], dtype) for name in names}
    for name in names:
        size = weights[name].shape
        each = gguf.GGML_QUANT_SIZES[kinds[name]][1]
        place = places.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor_info(place, size, np.dtype(np.float32), size.numel() * each, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        weight = weights[name].to("cpu", torch.float32)
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        writer.write_tensor_data(gguf.quantize(weight.numpy(), kinds[name]))


def _kind(gguf: ModuleType, weight: Tensor, dtype: str) -> Any:
    return gguf.GGMLQuantizationType[_DTYPES[dtype] if weight.dim() == 2 else "F32"]
