"""A Llama model as a GGUF file: for decoding with llama.cpp, and for comparing with it on the same weights.

llama.cpp supports only some ways to split text before its tokenizer merges bytes. For a model with another
one the file contains no tokenizer: llama.cpp then uses token ids, which suffices for a comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outpace.core import OutpaceError, UnsupportedModel, load_extra
from outpace.files import beside

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
_FILE_TYPES = {"float32": 0, "float16": 1, "q4_0": 2, "q8_0": 7, "bfloat16": 32}  # llama.cpp's numbers
_BLOCK = 32  # numbers per quantised block
_NORMAL, _CONTROL = 1, 3  # llama.cpp's types of tokens
# llama.cpp's numbers of file types.
FILE_TYPES = {
    "q4_0": 2, "q5_0": 8, "q8_0": 7, "q3_k_m": 12, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25,
    "iq4_xs": 30, "mxfp4": 38, "f16": 1, "bf16": 32,
}  # fmt: skip


def write_gguf(model: Any, path: Path, dtype: str = "float32", tokenizer: Any = None) -> None:
    """Write a model to a GGUF file.

    Args:
        model: a loaded transformers model of the family llama.
        path: the file; an existing one is replaced.
        dtype: dtype of the matrices: ``float32``, ``float16``, ``bfloat16``, ``q8_0`` or ``q4_0``. Norms are
            always float32.
        tokenizer: the transformers tokenizer, written to the file if llama.cpp supports its kind; without
            one, llama.cpp uses token ids.

    Raises:
        UnsupportedModel: another family, biases, or scaled rotary embeddings; for a quantised dtype, a hidden
            size that is not a multiple of 32. OutpaceError: the package gguf is missing, or an unknown dtype.
    """
    gguf = load_extra("gguf", "writing a GGUF file", "gguf")
    if dtype not in _DTYPES:
        raise OutpaceError(f"GGUF is not written in {dtype!r} here; there are: {', '.join(_DTYPES)}")
    _check(model.config)
    blocks = dtype in ("q8_0", "q4_0")
    if blocks and model.config.hidden_size % _BLOCK:
        raise UnsupportedModel(f"{dtype} takes rows of a multiple of {_BLOCK} numbers; use another dtype")
    draft = beside(path)
    try:
        writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
        _describe(writer, model.config, blocks)
        writer.add_file_type(_FILE_TYPES[dtype])
        _write_tokenizer(writer, model, tokenizer)
        try:
            _write_tensors(gguf, writer, model, dtype)
        finally:
            writer.close()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def quantise(source: Path, kind: str, path: Path) -> Path:
    """Quantise a file in float32 by llama.cpp itself.

    Args:
        kind: a key of ``FILE_TYPES``.
    """
    from outpace.targets.llamacpp.library import library

    own = library()
    params = own.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[kind], 1
    if own.llama_model_quantize(str(source).encode(), str(path).encode(), params):
        raise RuntimeError(f"llama.cpp does not quantise {source} to {kind}")
    return path


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder a query or key projection for llama.cpp, [heads * head_dim, in].

    transformers rotates dimensions i and i + head_dim / 2 of a head together, llama.cpp 2 i and 2 i + 1.
    """
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


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


def _padded(size: int, blocks: bool) -> int:
    """A size as written: quantised rows are padded to whole blocks."""
    return -(-size // _BLOCK) * _BLOCK if blocks else size


def _describe(writer: Any, config: Any, blocks: bool) -> None:
    """Write the sizes, under llama.cpp's names."""
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_padded(config.intermediate_size, blocks))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: Any, model: Any, tokenizer: Any) -> None:
    """Write the vocabulary and merges of a byte-level tokenizer, or that there are none."""
    split = None if tokenizer is None else splitting(tokenizer)
    if split is None:
        writer.add_tokenizer_model("no_vocab")
        return
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in parts["added_tokens"] if token["special"]}
    names = {place: token for token, place in tokenizer.get_vocab().items()}
    every = range(model.config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    # Ids without a token are padding of the embeddings.
    writer.add_token_list([names.get(place, f"<|unused_{place}|>") for place in every])
    writer.add_token_types([_CONTROL if p in special or p not in names else _NORMAL for p in every])
    merges = parts["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    empty = tokenizer("").input_ids
    writer.add_add_bos_token(empty[:1] == [tokenizer.bos_token_id] and bool(empty))
    writer.add_add_eos_token(False)
    if getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(tokenizer.chat_template)


def splitting(tokenizer: Any) -> str | None:
    """llama.cpp's name for how a tokenizer splits text before it merges bytes; None if it has none.

    Supported are byte-level tokenizers with GPT-2's pattern, alone or after splitting digits. Splitting
    newlines before the digits is supported if no merge contains a newline, since the tokens are then equal.
    """
    try:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
    except AttributeError:
        return None
    before = parts["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    last = steps[-1]
    if parts["normalizer"] or parts["model"]["type"] != "BPE" or last.get("type") != "ByteLevel":
        return None
    if not last.get("use_regex", True) or last.get("add_prefix_space"):
        return None
    digits = {"type": "Digits", "individual_digits": True}
    newlines = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
    if not steps[:-1]:
        return "gpt-2"
    whole = not any("\u010a" in "".join(merge) for merge in parts["model"]["merges"])
    return "smollm" if steps[:-1] == [digits] or (steps[:-1] == [newlines, digits] and whole) else None


def _write_tensors(gguf: ModuleType, writer: Any, model: Any, dtype: str) -> None:
    """Write all tensors: first their descriptions, then their data one by one."""
    config = model.config
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights: Mapping[str, Tensor] = model.state_dict()
    # A head tied to the embeddings is omitted; llama.cpp then uses the embeddings.
    names = [name for name in weights if name != "lm_head.weight" or not config.tie_word_embeddings]
    kinds = {name: _kind(gguf, weights[name], dtype) for name in names}
    blocks = dtype in ("q8_0", "q4_0")
    for name in names:
        size = [_padded(one, blocks and ".mlp." in name) for one in weights[name].shape]
        each, its_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        place = places.get_name(name, try_suffixes=(".weight",))
        length = math.prod(size) // each * its_bytes
        # The size of a quantised matrix is given in bytes.
        told, kind = (
            (size, np.float32) if each == 1 else ([*size[:-1], size[-1] // each * its_bytes], np.uint8)
        )
        writer.add_tensor_info(place, told, np.dtype(kind), length, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        weight = weights[name].to("cpu", torch.float32)
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        if blocks and ".mlp." in name:
            missing = [_padded(one, True) - one for one in weight.shape]
            weight = functional.pad(weight, (0, missing[1], 0, missing[0]))
        writer.write_tensor_data(gguf.quantize(weight.numpy(), kinds[name]))


def _kind(gguf: ModuleType, weight: Tensor, dtype: str) -> Any:
    return gguf.GGMLQuantizationType[_DTYPES[dtype] if weight.dim() == 2 else "F32"]
