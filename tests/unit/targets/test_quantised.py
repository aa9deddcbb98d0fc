"""Quantised targets are decoded: the drafted tokens are those of plain decoding of the same quantised model.

With a layer of 8-bit weights made here, and with torchao and bitsandbytes where they are installed
(``make test-optional``).
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import outpace
from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.core import UnsupportedModel
from zoo.test_families import RandomTrees

PROMPTS = [random.Random(length).choices(range(1, 96), k=length) for length in (21, 5, 30)]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=seed) for seed in (3, 1, 2)
]
LOOKAHEAD = "lookahead:window=4,ngram=3,guesses=3"
AO = "torchao is not installed; make test-optional installs it"
BNB = "bitsandbytes is not installed; make test-optional installs it"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class EightBits(nn.Module):
    """A linear layer with weights of 8 bits and a scale per output.

    Args:
        shared: its input is rounded to 8 bits too, with one scale for all rows of a forward.
    """

    def __init__(self, linear: nn.Linear, shared: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.shared = shared
        self.register_buffer("numbers", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, states: Tensor) -> Tensor:
        if self.shared:
            scale = states.abs().max() / 127
            states = (states / scale).round() * scale
        numbers, scales = self.get_buffer("numbers"), self.get_buffer("scale")
        return nn.functional.linear(states, numbers.to(states.dtype) * scales)


def eight_bits(model: Any, shared: bool = False) -> Any:
    """Replace the linear layers of a model, but not its head."""
    for module in list(model.model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, EightBits(child, shared))
    return model


def by_torchao(model: Any, kind: str, **options: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason=AO)
    quantization.quantize_(model, getattr(quantization, kind)(**options))
    return model


# Names of models that bitsandbytes quantises, and how. Its 8-bit layers round each row's activations.
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


def by_bitsandbytes(dtype: torch.dtype, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason=BNB)
    with TemporaryDirectory() as folder:
        wide(dtype).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**options), dtype=dtype, device_map="cpu"
        )


def wide(dtype: torch.dtype) -> Any:
    """A model whose layers have whole blocks of 64 weights."""
    return tiny_llama(dtype=dtype, heads=8)


@cache
def made(kind: str, dtype: torch.dtype) -> Any:
    """A quantised model, made here ("eight bits"), by torchao ("weights") or by bitsandbytes."""
    if kind in BITSANDBYTES:
        return by_bitsandbytes(dtype, **BITSANDBYTES[kind])
    model = tiny_llama(dtype=dtype)
    return eight_bits(model) if kind == "eight bits" else by_torchao(model, "Int8WeightOnlyConfig")


RUNS = [  # torchao has no float64
    ("eight bits", torch.float64),
    ("eight bits", torch.float32),
    ("weights", torch.float32),
    *((kind, torch.float32) for kind in BITSANDBYTES),
]


def decode(target: Any, drafter: Any, params: Any) -> list[list[int]]:
    engine = Engine(target, drafter, adaptive=False, prefill_chunk=7)
    return [generation.tokens for generation in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(("kind", "dtype"), RUNS)
def test_drafted_tokens_are_those_of_plain_decoding(kind: str, dtype: torch.dtype) -> None:
    target = Target(made(kind, dtype))
    for params in (GREEDY, SAMPLED):
        plain = decode(target, None, params)
        assert all(len(set(tokens)) > 8 for tokens in plain), "the random model loops"
        trees = RandomTrees(dict(zip(map(tuple, PROMPTS), plain, strict=True)))
        assert decode(target, trees, params) == plain
        assert len(trees.scattered) > 10
        assert decode(target, LOOKAHEAD, params) == plain


@pytest.mark.parametrize("kind", ["eight bits", "weights", *BITSANDBYTES])
def test_generate(kind: str) -> None:
    """In float32 greedy tokens are also transformers' own."""
    model = made(kind, torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    ids = torch.tensor(PROMPTS[:1])
    expected = model.generate(ids, **options)
    stock = wide(torch.float32) if kind in BITSANDBYTES else tiny_llama(dtype=torch.float32)
    before = stock(ids).logits
    assert (model(ids).logits - before).abs().max() > 1e-3, "nothing is quantised"
    outpace.accelerate(model, LOOKAHEAD, adaptive=False)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    outpace.restore(model)


def test_loaded_by_transformers(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason=AO)
    tiny_llama(dtype=torch.float32).save_pretrained(tmp_path)

    def load(config: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(config))

    model = load(quantization.Int8WeightOnlyConfig())
    ids = torch.tensor(PROMPTS[:1])
    expected = model.generate(ids, max_new_tokens=40)
    outpace.accelerate(model, LOOKAHEAD, adaptive=False)
    assert model.generate(ids, max_new_tokens=40).tolist() == expected.tolist()
    tensor = quantization.PerTensor()
    with pytest.raises(UnsupportedModel, match="activations per tensor"):
        Target(load(quantization.Int8DynamicActivationInt8WeightConfig(granularity=tensor)))


@pytest.mark.parametrize("kind", ["eight bits", "weights", *BITSANDBYTES])
def test_neither_packed_nor_called_exact(kind: str) -> None:
    """The kernels are those of plain weights, and so are the trials of what bits a row gets among others."""
    model = made(kind, torch.bfloat16)
    if kind == "weights":  # the head too
        with pytest.raises(UnsupportedModel, match="no plain linear layers"):
            Target(model, plan="packed")
    target = Target(model)
    assert not target.bit_exact and "multiplies rows in another way" in target.why_inexact


def test_activations_per_row_by_torchao_are_refused_in_float32() -> None:
    """Rounding moves some of them to another of their 256 values, which no near-tie explains."""
    with pytest.raises(UnsupportedModel, match="rounding moves its quantised activations"):
        Target(by_torchao(tiny_llama(dtype=torch.float32), "Int8DynamicActivationInt8WeightConfig"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_per_tensor_by_torchao_are_refused(dtype: torch.dtype) -> None:
    """Also without an entry in the config: in bfloat16 the self-test takes their effect for rounding."""
    quantization = pytest.importorskip("torchao.quantization", reason=AO)
    kind, tensor = "Int8DynamicActivationInt8WeightConfig", quantization.PerTensor()
    with pytest.raises(UnsupportedModel, match="activations per tensor"):
        Target(by_torchao(tiny_llama(dtype=dtype), kind, granularity=tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_by_bitsandbytes_are_refused(dtype: torch.dtype) -> None:
    """The self-test takes their effect in bfloat16 for rounding, and drafts change tokens."""
    with pytest.raises(UnsupportedModel, match=r"columns of outliers.*llm_int8_threshold=0\.0"):
        Target(by_bitsandbytes(dtype, load_in_8bit=True))


def test_activations_with_one_scale_for_all_rows_are_refused() -> None:
    """A layer of another library has no config either: the self-test sees that rows change each other."""
    with pytest.raises(
        UnsupportedModel, match=r"a tree of tokens than for its paths|see more than their ancestors"
    ):
        Target(eight_bits(tiny_llama(dtype=torch.float64), shared=True))
