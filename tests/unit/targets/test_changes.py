"""Weights and modules of a model that change: steps compute the model as it is when a text begins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets import CausalTarget, Rows
from outpace.targets.kernels import KERNELS, QUANTISED, Kernel, Trial
from outpace.targets.native import functions

PROMPT = [3, 6, 7, 11]
DTYPES = (torch.float32, torch.bfloat16)
NAMED = [
    pytest.param(kernel, dtype, id=f"{kernel.name.replace(' ', '_')}-{str(dtype)[6:]}")
    for kernel in (*KERNELS, *QUANTISED.values())
    for dtype in DTYPES
    if dtype in kernel.dtypes
]
WEIGHTS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def made(dtype: torch.dtype, layers: int = 1, tied: bool = False) -> Any:
    """A random model with biases and norms of heads, of sizes that every kernel takes."""
    config = Qwen3Config(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        attention_bias=True,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * torch.randn_like(weight)
    return model.to(dtype).eval()


def target(
    model: Any,
    kernel: Kernel,
    fused: bool,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
    check: bool = False,
    **more: Any,
) -> CausalTarget:
    """A target whose linear layers all use a kernel."""
    monkeypatch.setattr("outpace.targets.packed.best_kernel", lambda *_: Trial(kernel, False, 1, {}))
    monkeypatch.setattr(type(kernel), "least", {})
    try:
        kernel.pack(torch.ones(64, 64, dtype=model.dtype))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"{kernel.name} is not available here: {error}")
    if fused and isinstance(why := functions(model.dtype), str):
        pytest.skip(why)
    packing = {"quantise": kernel.name} if kernel.rounds else {"pack": "auto" if fused else kernel.copies}
    try:
        of = CausalTarget(model, check=check, fuse=fused, exact=exact, **packing, **more)
    except UnsupportedModel as error:
        pytest.skip(str(error))
    assert of.fused == fused and (kernel.name in of.packed) == kernel.copies
    return of


def logits(of: CausalTarget) -> Tensor:
    cache = of.new_cache(length=16)
    slot = cache.allocate()
    return of.forward(cache, {slot: Rows(PROMPT)}).logits_of(slot).clone()


def by_fused_optimiser(model: Any, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = model.get_parameter(name)
    optimiser = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
    optimiser.step()
    weight.grad = None


def by_adding(model: Any, name: str) -> None:
    model.get_parameter(name).data.add_(0.5)


def by_copying(model: Any, name: str) -> None:
    data = model.get_parameter(name).data
    data.copy_(data.flip(0) * 1.5 + 0.25)


def by_numpy(model: Any, name: str) -> None:
    data = model.get_parameter(name).detach()
    if data.dtype == torch.bfloat16:
        data.view(torch.int16).numpy()[...] ^= -0x8000  # all signs
    else:
        data.numpy()[...] *= -1


def by_load_state_dict(model: Any, name: str) -> None:
    model.load_state_dict({name: model.get_parameter(name).detach() * 1.5}, strict=False, assign=True)


def by_new_data(model: Any, name: str) -> None:
    model.get_parameter(name).data = model.get_parameter(name).detach() * 1.5


def by_new_parameter(model: Any, name: str) -> None:
    owner, _, own = name.rpartition(".")
    changed = nn.Parameter(model.get_parameter(name).detach() * 1.5)
    setattr(model.get_submodule(owner), own, changed)


def in_place(model: Any, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)


def by_one_row(model: Any, name: str) -> None:
    model.get_parameter(name).data[3] += 2


def by_one_column(model: Any, name: str) -> None:
    model.get_parameter(name).data[..., 5] += 2


WRITES: list[Callable[[Any, str], None]] = [
    by_fused_optimiser,
    by_adding,
    by_copying,
    by_numpy,
    by_load_state_dict,
    by_new_data,
    by_new_parameter,
    in_place,
    by_one_row,
    by_one_column,
]


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("kernel", "dtype"), NAMED)
def test_a_write_of_any_kind_to_any_weight_takes_effect(
    kernel: Kernel, dtype: torch.dtype, fused: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(dtype)
    of = target(model, kernel, fused, exact, monkeypatch)
    last = logits(of)
    missed = []
    for place, name in enumerate(WEIGHTS):
        for write in WRITES if place % 3 == 1 or name == "lm_head.weight" else WRITES[place % 3 :: 3]:
            kept = copy.deepcopy(model.state_dict())
            write(model, name)
            found, expected = logits(of), logits(target(model, kernel, fused, exact, monkeypatch))
            if not torch.equal(found, expected) or torch.equal(found, last):
                missed.append(f"{write.__name__}: {name}")
                of = target(model, kernel, fused, exact, monkeypatch)
            with torch.no_grad():  # so that the weights stay of one size
                model.load_state_dict(kept)
            last = logits(of)
    assert not missed
