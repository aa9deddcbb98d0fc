"""The embedded model and its plain decoding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from lossless.prompts import PROMPTS
from lossless.trained import with_trained
from outpace.testing.matrix import Matrix


def embedded(dtype: torch.dtype, device: str = "cpu") -> Any:
    return AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=dtype).to(device)


class Lab(Matrix):
    """The embedded model in one dtype on one device, its prompts, and plain decoding of them.

    In a spec ``{trained}`` is the folder of a learned drafter.

    Args:
        model: the embedded one, or one that was made of it.
    """

    def __init__(self, model: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
        prompts = [self.tokenizer(text).input_ids for text in PROMPTS]
        super().__init__(outpace.Target(model), prompts, with_trained)


@lru_cache
def lab_on(dtype: torch.dtype, device: str = "cpu") -> Lab:
    return Lab(embedded(dtype, device))


@pytest.fixture(scope="session")
def exact() -> Lab:
    """In float64: no difference is allowed."""
    return lab_on(torch.float64)


@pytest.fixture(scope="session")
def single() -> Lab:
    """In float32: a difference is allowed only at a near-tie."""
    return lab_on(torch.float32)
