"""Hydra's heads as published: names there and here, predictions, and invalid files."""

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
from outpace.drafters.heads.hydra import Hydra, HydraHeads
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from watching import Watch

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
HEADS, LAYERS, SIZE, VOCABULARY = 3, 3, 32, 97
CONFIG = {
    "hydra_num_heads": HEADS,
    "hydra_num_layers": LAYERS,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=2))


def weights(dropout: bool = False) -> dict[str, Tensor]:
    """Tensors of all heads; the residual layers of one are the same. Dropout takes every other number."""
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) / 4

    made = {}
    for head in range(HEADS):
        wide = (2 + head) * SIZE
        first, step = (1, 2) if dropout else (0, 1)
        for part in ("linear", "res_connection"):
            made[f"hydra_mlp.{head}.{first}.{part}.weight"] = drawn(SIZE, wide)
            made[f"hydra_mlp.{head}.{first}.{part}.bias"] = drawn(SIZE)
        again = {"weight": drawn(SIZE, SIZE), "bias": drawn(SIZE)}
        for layer in range(1, LAYERS):
            for part, tensor in again.items():
                made[f"hydra_mlp.{head}.{first + step * layer}.linear.{part}"] = tensor.clone()
        own = f"hydra_lm_head.{head}." + ("1." if dropout else "")
        made[f"{own}weight"] = drawn(VOCABULARY, SIZE)
        made[f"{own}bias"] = drawn(VOCABULARY)
    return made


def write(folder: Path, tensors: dict[str, Tensor], file: str = "hydra_lm_head", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config), "utf-8")
    save_file(tensors, folder / f"{file}.safetensors")
    return folder


@pytest.mark.parametrize("layout", ["plain", "dropout", "whole", "shared"])
def test_they_predict_what_their_formula_says(tmp_path: Path, layout: str) -> None:
    """Also from the checkpoint of a whole model, and where a layer that is used twice is stored once."""
    tensors = weights()
    stored = weights(dropout=True) if layout == "dropout" else dict(tensors)
    if layout == "shared":
        stored = {name: tensor for name, tensor in stored.items() if ".2.linear" not in name}
    if layout == "whole":
        stored = {f"hydra_head.{name}": tensor for name, tensor in stored.items()}
        stored["lm_head.weight"] = torch.zeros(2)
    made = HydraHeads.load(
        write(tmp_path, stored, "model" if layout == "whole" else "hydra_lm_head"), llama()
    )
    states = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).to(llama().hidden.dtype)
    owners = torch.tensor([0, 0, 3, 4])
    for head in range(HEADS):
        paths = torch.arange(4 * (1 + head)).view(4, -1)
        own = {name: one.to(states) for name, one in tensors.items() if name.startswith(f"hydra_mlp.{head}.")}
        read = torch.cat([states[owners], llama().embed(paths).flatten(1)], dim=1)

        def layer(
            x: Tensor, number: int, part: str, own: dict[str, Tensor] = own, head: int = head
        ) -> Tensor:
            at = f"hydra_mlp.{head}.{number}.{part}."
            return x @ own[at + "weight"].T + own[at + "bias"]

        x = layer(read, 0, "res_connection") + F.silu(layer(read, 0, "linear"))
        for number in range(1, LAYERS):
            x = x + F.silu(layer(x, number, "linear"))
        projection = f"hydra_lm_head.{head}."
        expected = x @ tensors[projection + "weight"].to(x).T + tensors[projection + "bias"].to(x)
        torch.testing.assert_close(made.rows(states, owners, paths), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    watch = Watch()
    drafter = Hydra(str(write(tmp_path, weights())), max_nodes=9)
    found = Engine(llama(), drafter, adaptive=False, observer=watch).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, params)]
    assert any(len(step.draft) == 9 for step in watch.steps)


def test_wrong_files_are_named_with_their_remedy(tmp_path: Path) -> None:
    def load(folder: Path) -> None:
        HydraHeads.load(folder, llama())

    for name, value in (
        ("hydra_head_arch", "prefix-mlp"),
        ("grounded_heads", False),
        ("hidden_state_offset", 1),
    ):
        with pytest.raises(OutpaceError, match=rf"{name}={value!r}; only .*train heads of your own"):
            load(write(tmp_path / "other", weights(), **{name: value}))
    with pytest.raises(OutpaceError, match=r"unknown tensor 'wide\.weight'.*as in hydra_mlp\.0\.0\.linear"):
        load(write(tmp_path / "name", weights() | {"wide.weight": torch.zeros(2)}))
    lacking = weights()
    del lacking["hydra_mlp.1.0.res_connection.bias"]
    with pytest.raises(OutpaceError, match=r"there is no tensor 'residuals\.1\.bias'"):
        load(write(tmp_path / "lacking", lacking))
    with pytest.raises(OutpaceError, match="no tensors of heads"):
        load(write(tmp_path / "bare", {"hydra_lm_head.0.weight": torch.zeros(VOCABULARY, SIZE)}))
    small = weights() | {f"hydra_lm_head.{n}.weight": torch.zeros(8, SIZE) for n in range(HEADS)}
    with pytest.raises(OutpaceError, match=r"vicuna-7b-v1\.3 with a vocabulary of 8, but this target"):
        load(write(tmp_path / "small", small))
    pickled = write(tmp_path / "pickle", weights())
    (pickled / "hydra_lm_head.safetensors").rename(pickled / "hydra_lm_head.pt")
    with pytest.raises(OutpaceError, match=r"is a pickle, which is not read; convert it once"):
        load(pickled)
