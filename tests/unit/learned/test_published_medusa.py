"""Medusa's heads as published: names there and here, predictions, and invalid files."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.heads.medusa import Medusa, MedusaHeads
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from watching import Watch

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
HEADS, SIZE, VOCABULARY = 3, 32, 97
# As in published configs, which name fewer heads than there are.
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=2))


def weights(layers: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    made = {}
    for head in range(HEADS):
        for layer in range(layers):
            made[f"{head}.{layer}.linear.weight"] = torch.randn(SIZE, SIZE, generator=random) / 4
            made[f"{head}.{layer}.linear.bias"] = torch.randn(SIZE, generator=random) / 4
        made[f"{head}.{layers}.weight"] = torch.randn(VOCABULARY, SIZE, generator=random) / 4
    return made


def write(
    folder: Path, tensors: dict[str, Tensor], file: str = "medusa_lm_head.safetensors", **config: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config), "utf-8")
    save_file(tensors, folder / file)
    return folder


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_they_predict_what_their_formula_says(tmp_path: Path, layers: int, whole: bool) -> None:
    """Also out of the checkpoint of a whole model, which has the target's tensors too."""
    tensors = weights(layers)
    if whole:
        named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        folder = write(tmp_path, named | {"lm_head.weight": torch.zeros(2)}, "model.safetensors")
    else:
        folder = write(tmp_path, tensors)
    made = MedusaHeads.load(folder, llama())
    assert made.depth == HEADS
    states = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).to(llama().hidden.dtype)
    for head in range(HEADS):
        x = states
        for layer in range(layers):
            at = f"{head}.{layer}.linear."
            x = x + F.silu(x @ tensors[at + "weight"].to(x).T + tensors[at + "bias"].to(x))
        expected = x @ tensors[f"{head}.{layers}.weight"].to(x).T
        assert torch.allclose(made.guess(states, head), expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    watch = Watch()
    drafter = Medusa(str(write(tmp_path, weights())), max_nodes=9)
    found = Engine(llama(), drafter, adaptive=False, observer=watch).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, params)]
    assert any(len(step.draft) == 9 for step in watch.steps)


def test_wrong_files_are_named_with_their_remedy(tmp_path: Path) -> None:
    def load(folder: Path) -> None:
        MedusaHeads.load(folder, llama())

    with pytest.raises(OutpaceError, match=r"unknown tensor 'wide\.weight'.*as in 0\.0\.linear\.weight"):
        load(write(tmp_path / "name", weights() | {"wide.weight": torch.zeros(2)}))
    lacking = weights()
    del lacking["1.0.linear.bias"]
    with pytest.raises(OutpaceError, match=r"there is no tensor 'blocks\.1\.0\.linear\.bias'"):
        load(write(tmp_path / "lacking", lacking))
    with pytest.raises(OutpaceError, match="lack a residual layer or a projection"):
        load(write(tmp_path / "bare", {"0.0.weight": torch.zeros(VOCABULARY, SIZE)}))
    with pytest.raises(OutpaceError, match=r"vicuna-7b-v1\.3 with a vocabulary of 8, but this target"):
        load(write(tmp_path / "other", weights() | {f"{n}.1.weight": torch.zeros(8, SIZE) for n in range(3)}))
    pickled = write(tmp_path / "pickle", weights())
    (pickled / "medusa_lm_head.safetensors").rename(pickled / "medusa_lm_head.pt")
    with pytest.raises(OutpaceError, match=r"is a pickle, which is not read; convert it once"):
        load(pickled)
    (pickled / "medusa_lm_head.pt").unlink()
    with pytest.raises(OutpaceError, match="no tensors of heads"):
        load(pickled)
