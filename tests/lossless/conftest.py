"""The embedded model and its plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from lossless.datastore import with_datastore
from lossless.prompts import PROMPTS
from lossless.trained import tuned, with_trained
from outpace.core import Generation, SamplingParams
from outpace.targets import TargetModel
from outpace.targets.weights.adapters import merge
from outpace_lab.train.joint import TARGET

SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=64),
    "top_p": SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9),
    "penalty": SamplingParams(max_new_tokens=64, temperature=1.0, repetition_penalty=1.2, min_p=0.05),
}


class Lab:
    """The embedded model in one dtype on one device, its prompts, and plain decoding of them.

    Args:
        heads: the folder of a drafter whose target was trained too: the model is then that target.
    """

    def __init__(self, dtype: torch.dtype, heads: Path | None = None, device: str = "cpu") -> None:
        path = outpace.nano_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        self.target: TargetModel = outpace.Target(model if heads is None else merge(model, heads / TARGET))
        self.prompts: list[list[int]] = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.plain = lru_cache(self._plain)

    def params(self, sampling: str) -> list[SamplingParams]:
        """Parameters of each prompt, each with its own seed."""
        return [replace(SAMPLINGS[sampling], seed=1000 + place) for place in range(len(self.prompts))]

    def _plain(self, sampling: str, first: int | None = None) -> list[Generation]:
        return self.decode("none", sampling, first)

    def decode(self, drafter: str, sampling: str, first: int | None = None) -> list[Generation]:
        """Generations of the first prompts (all by default), decoded together."""
        engine = self.engine(drafter)
        return engine.generate(self.prompts[:first], self.params(sampling)[:first])

    def engine(self, drafter: str, verifier: str = "match") -> outpace.Engine:
        """An engine that drafts all it can.

        In the spec ``{datastore}`` is a datastore of the prompts, ``{trained}`` the folder of a learned
        drafter.
        """
        spec = with_trained(with_datastore(drafter))
        return outpace.Engine(self.target, spec, verifier, adaptive=False)


@lru_cache
def lab_on(dtype: torch.dtype, device: str = "cpu") -> Lab:
    return Lab(dtype, device=device)


@pytest.fixture(scope="session")
def exact() -> Lab:
    """In float64: no difference is allowed."""
    return lab_on(torch.float64)


@pytest.fixture(scope="session")
def single() -> Lab:
    """In float32: a difference is allowed only at a near-tie."""
    return lab_on(torch.float32)


@pytest.fixture(scope="session")
def tuned_exact() -> Lab:
    """Medusa-2's target in float64."""
    pytest.importorskip("peft")
    return Lab(torch.float64, tuned())


@pytest.fixture(scope="session")
def tuned_single() -> Lab:
    """Medusa-2's target in float32."""
    pytest.importorskip("peft")
    return Lab(torch.float32, tuned())
