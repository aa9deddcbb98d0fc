"""The embedded models as GGUF files, made once for a run of tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.embedded import nano_draft_path, nano_path
from outpace.testing.gguf import quantise, write_gguf


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(mkdtemp())


@lru_cache(maxsize=2)
def _model(draft: bool) -> tuple[Any, Any]:
    path = nano_draft_path() if draft else nano_path()
    return (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )


@lru_cache(maxsize=16)
def gguf_file(dtype: str, draft: bool = False) -> Path:
    """The embedded model, or the embedded draft model, as a GGUF file with its tokenizer."""
    model, tokenizer = _model(draft)
    path = _folder() / f"{'draft' if draft else 'nano'}-{dtype}.gguf"
    write_gguf(model, path, dtype, tokenizer)
    return path


VOCABULARY = 64


@lru_cache(maxsize=64)
def quantised(source: Path, kind: str) -> Path:
    """A GGUF file as llama.cpp itself quantises it, beside the file.

    Args:
        source: a file in float32.
        kind: a key of ``outpace.testing.gguf.FILE_TYPES``.
    """
    return quantise(source, kind, source.with_name(f"{source.stem}-{kind}.gguf"))


@lru_cache(maxsize=4)
def random_file(architecture: str, split: int = 0) -> Path:
    """A model of random numbers, without a tokenizer.

    Args:
        architecture: "gemma2", whose first of two layers has a sliding window of 8 rows; "gemma3", of six
            layers with a window of 8 rows in five and large norms; "llama", whose rows are of 256 numbers, as
            K-quants need; or "mamba", which is recurrent.
        split: tensors per part of a split file, whose first part is returned; 0 for one file.
    """
    path = _folder() / f"{architecture}.gguf"
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    hidden, layers = {"llama": (256, 8), "gemma3": (256, 6)}.get(architecture, (64, 2))
    writer.add_context_length(1024)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(0)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def add(name: str, *shape: int, spread: float = 0.3, mean: float = 1.0) -> None:
        numbers = random.normal(mean if name.endswith("norm.weight") else 0, spread, shape)
        writer.add_tensor(name, numbers.astype(np.float32))

    add("token_embd.weight", VOCABULARY, hidden, spread=0.1)
    add("output_norm.weight", hidden)
    {"gemma2": _gemma2, "gemma3": _gemma3, "llama": _llama, "mamba": _mamba}[architecture](writer, add)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(_folder().glob(f"{architecture}-00001-of-*.gguf")) if split else path


def _gemma2(writer: Any, add: Callable[..., None]) -> None:
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_sliding_window(8)
    for layer in range(2):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"blk.{layer}.{name}.weight", 64)
        for name, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64)):
            add(f"blk.{layer}.{name}.weight", rows, 64)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{layer}.{name}.weight", 64, 64)


def _gemma3(writer: Any, add: Callable[..., None]) -> None:
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_sliding_window(8)
    for layer in range(6):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"blk.{layer}.{name}.weight", 256, mean=4.0)
        for name in ("attn_q_norm", "attn_k_norm"):
            add(f"blk.{layer}.{name}.weight", 64, mean=4.0)
        for name, rows in (("attn_q", 256), ("attn_k", 64), ("attn_v", 64), ("attn_output", 256)):
            add(f"blk.{layer}.{name}.weight", rows, 256)
        for name, *shape in (("ffn_gate", 512, 256), ("ffn_up", 512, 256), ("ffn_down", 256, 512)):
            add(f"blk.{layer}.{name}.weight", *shape)


def _llama(writer: Any, add: Callable[..., None]) -> None:
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    for layer in range(8):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", 256)
        for name, rows in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 256)):
            add(f"blk.{layer}.{name}.weight", rows, 256, spread=0.1)
        for name, *shape in (("ffn_gate", 512, 256), ("ffn_up", 512, 256), ("ffn_down", 256, 512)):
            add(f"blk.{layer}.{name}.weight", *shape, spread=0.1)


def _mamba(writer: Any, add: Callable[..., None]) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(128)
    writer.add_ssm_state_size(8)
    writer.add_ssm_time_step_rank(4)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 64)
        for name, *shape in (
            ("ssm_in.weight", 256, 64),
            ("ssm_conv1d.weight", 128, 4),
            ("ssm_conv1d.bias", 128),
            ("ssm_x.weight", 20, 128),
            ("ssm_dt.weight", 128, 4),
            ("ssm_dt.bias", 128),
            ("ssm_a", 128, 8),
            ("ssm_d", 128),
            ("ssm_out.weight", 64, 128),
        ):
            add(f"blk.{layer}.{name}", *shape)
