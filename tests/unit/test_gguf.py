"""Models as GGUF files, read back by the package that llama.cpp's own tools use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from models import tiny_llama
from outpace.core import OutpaceError, UnsupportedModel
from outpace.testing.gguf import interleaved, write_gguf

gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")

PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def place(name: str) -> str:
    """llama.cpp's name of a tensor of transformers'."""
    parts = name.removesuffix(".weight").split(".")
    if "layers" in parts:
        return f"blk.{parts[2]}.{PLACES['.'.join(parts[3:])]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-1]] + ".weight"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of a file, these as float32 and in numpy's order of axes."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(tensor.shape)[::-1]),
        )
        for tensor in reader.tensors
    }
    return fields, tensors


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_tensors_are_the_models(tmp_path: Path, dtype: str, kind: str) -> None:
    model = tiny_llama(dtype=torch.float32)
    write_gguf(model, tmp_path / "model.gguf", dtype)
    _, tensors = read(tmp_path / "model.gguf")
    weights = model.state_dict()
    assert set(tensors) == {place(name) for name in weights} and len(weights) == 2 * 9 + 3
    for name, weight in weights.items():
        found_kind, found = tensors[place(name)]
        assert found_kind == (kind if weight.dim() == 2 else "F32")
        expected = weight.to(getattr(torch, dtype) if weight.dim() == 2 else torch.float32).float().numpy()
        heads = HEADS.get(place(name).split(".")[-2])
        if heads is not None:  # rotary pairs lie side by side
            halves = expected.reshape(heads, 2, 4, 32)
            expected = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)
    assert list(tmp_path.iterdir()) == [tmp_path / "model.gguf"]


def test_another_reader_finds_the_same_model(tmp_path: Path) -> None:
    """transformers reads GGUF too, and undoes the order of llama.cpp's rotary pairs."""
    model = tiny_llama(dtype=torch.float32)
    write_gguf(model, tmp_path / "model.gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.arange(40)[None] * 7 % 97
    with torch.no_grad():
        assert (again(ids).logits - model(ids).logits).abs().max() < 1e-5


def test_what_the_file_says_of_the_model(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "model.gguf")
    fields, _ = read(tmp_path / "model.gguf")
    assert fields["general.architecture"] == "llama"
    assert fields["tokenizer.ggml.model"] == "no_vocab"
    of = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    assert of == {
        "vocab_size": 97,
        "context_length": 256,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.dimension_count": 8,
        "rope.freq_base": 10000.0,
    }


def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    config = tiny_llama().config
    config.tie_word_embeddings = True
    write_gguf(LlamaForCausalLM(config), tmp_path / "model.gguf")
    _, tensors = read(tmp_path / "model.gguf")
    assert "token_embd.weight" in tensors and "output.weight" not in tensors


def test_interleaved_pairs_turn_as_halves_did() -> None:
    """The rotation of neighbours after, and of halves before, give the same queries."""
    weight = torch.arange(24.0).view(12, 2)  # two heads of three pairs
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_bias": True}, "with biases is not written as GGUF"),
        ({"mlp_bias": True}, "with biases is not written as GGUF"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "'linear' are not written as GGUF",
        ),
    ],
)
def test_models_that_are_not_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    config = LlamaConfig(**(tiny_llama().config.to_dict() | options))
    with pytest.raises(UnsupportedModel, match=message):
        write_gguf(LlamaForCausalLM(config), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    with pytest.raises(OutpaceError, match="'int8' here; there are: float32, float16, bfloat16"):
        write_gguf(model, tmp_path / "model.gguf", "int8")
    model.config = GPT2Config()
    with pytest.raises(UnsupportedModel, match="one of gpt2"):
        write_gguf(model, tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OutpaceError, match=r"pip install .*\[gguf\]"):
        write_gguf(model, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
