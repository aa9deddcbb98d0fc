"""Tiny random models in float64, where tokens must be equal, and a tokenizer of single bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import outpace
from unit.hf.tiny import BOS, EOS, PAD, Forwards, make


@pytest.fixture(scope="package", params=["llama", "gpt2"])
def plain(request: pytest.FixtureRequest) -> Any:
    """A model that no test accelerates."""
    return make(request.param)


@pytest.fixture(scope="package")
def fast_models() -> dict[str, Any]:
    return {}


@pytest.fixture
def fast(plain: Any, fast_models: dict[str, Any]) -> Any:
    """The same model, accelerated with lookahead."""
    name = plain.config.model_type
    if name not in fast_models:
        fast_models[name] = outpace.accelerate(
            make(name), "lookahead:window=3,ngram=3,guesses=3", adaptive=False
        )
    return fast_models[name]


@pytest.fixture
def llama() -> Any:
    return make("llama")


@pytest.fixture(scope="package")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte; token 32 is a space."""
    letters = {chr(byte): byte for byte in range(33, 127)}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = dict(letters)
    # GPT-2's table of printable stand-ins: bytes 0..32 are U+0100 on, in their order.
    vocabulary.update({chr(0x100 + byte): byte for byte in range(33)})
    free = iter(sorted(set(range(256)) - set(vocabulary.values())))
    vocabulary.update({letter: next(free) for letter in sorted(set(alphabet) - set(vocabulary))})
    vocabulary.update({"<bos>": BOS, "<eos>": EOS, "<pad>": PAD})
    inner = Tokenizer(BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def batch(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left."""
    encoded = tokenizer(["the one that", "sees", "hit the tin hat"], return_tensors="pt", padding=True)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


@pytest.fixture
def one(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    return {"input_ids": tokenizer("the one that", return_tensors="pt")["input_ids"]}


@pytest.fixture
def forwards(fast: Any) -> Iterator[Forwards]:
    """Counts the forwards of the accelerated model."""
    counter = Forwards(fast)
    yield counter
    counter.close()
