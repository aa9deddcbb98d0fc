"""Checkpoints with rounded weights are read in the layouts that others publish, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import outpace
from outpace.core import OutpaceError, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.loading import Loaded, load
from outpace.native.layers import functions
from outpace.targets.cpu.layouts import Blocks, rounded_panel
from outpace.targets.cpu.linear import rounded_of
from outpace.targets.weights import rounded
from rounded_folders import AWQ, CONFIGS, GPTQ, packed_config, save_rounded, set_config

pytestmark = pytest.mark.skipif(isinstance(functions(torch.bfloat16), str), reason="needs a C compiler")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def folder(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            place = tmp_path_factory.mktemp("rounded")
            made[kind] = place, save_rounded(place, kind)
        return made[kind]

    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_of_the_layout(kind: str, folders: Callable[[str], tuple[Path, Any]]) -> None:
    """A row of one number reads a column of weights: rounded to bfloat16, as scales and zeros are."""
    folder, wide = folders(kind)
    model = load(str(folder), device="cpu", check=False).target.model
    layers = rounded_of(model)
    bits = {layer.packed.bits for layer in layers}
    assert (len(layers), bits) == (14, {8 if "8" in kind or kind == "int" else 4})
    for name, module in wide.named_modules():
        if isinstance(module, nn.Linear) and module is not wide.lm_head:
            found = model.get_submodule(name)
            zero = torch.zeros(1, found.in_features, dtype=torch.bfloat16)
            bias = 0 if module.bias is None else module.bias.float()
            assert torch.equal(found(zero).float(), bias + torch.zeros(1, found.out_features))
            found.bias = None
            columns = found(torch.eye(found.in_features, dtype=torch.bfloat16)).T.float()
            step = module.weight.unflatten(1, (-1, 32)).diff().abs().amax(dim=-1, keepdim=True)
            near = (columns - module.weight).unflatten(1, (-1, 32)).abs() <= 0.02 * step
            assert near.all(), name


def test_logits_are_near_those_of_the_same_weights_in_floats(
    folders: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, wide = folders("awq")
    ids = torch.tensor([list(range(30, 70))])
    with torch.no_grad():
        logits = load(str(folder), device="cpu").target.model(ids).logits.float()
        expected = wide(ids).logits
        for module in wide.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.roll(1, 0)
        others = wide(ids).logits
        for module in wide.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.roll(-1, 0)
    assert off(logits, expected) < 0.2 < 1 < off(others, expected)


def off(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.std())


def test_layers_run_fused_and_exact_and_are_not_kept_twice(
    folders: Callable[[str], tuple[Path, Any]],
) -> None:
    loaded = load(str(folders("gptq")[0]), device="cpu")
    target = loaded.target
    assert str(loaded).endswith("bfloat16, weights in int4 on cpu")
    assert (target.bit_exact, target.plan.native, target.plan.packed["int4"]) == (True, True, 14)
    attention = target.model.model.layers[0].self_attn
    places = [layer.packed.weights.data_ptr() for layer in (attention.q_proj, attention.k_proj)]
    assert places[1] - places[0] == attention.q_proj.packed.weights.nbytes
    again = outpace.Target(target.model, check=False)
    assert attention.q_proj.packed.weights.data_ptr() == places[0], "joined already"
    assert again.bit_exact
    head = load(str(folders("gptq")[0]), device="cpu", quantise="int8").target
    assert head.plan.packed == {"int4": 14, "int8": 1}
    assert head.quantised == "int4 and int8"


def test_blocks_split_and_joined_are_the_same() -> None:
    panel = rounded_panel()
    weight = torch.randn(5 * panel, 64, generator=torch.Generator().manual_seed(0))
    whole, sizes = Blocks.pack([weight], 4), [panel, 3 * panel, panel]
    parts = whole.split(sizes)
    assert [part.outputs for part in parts] == sizes
    assert Blocks.joined(parts).weights.data_ptr() == whole.weights.data_ptr()
    turned = Blocks.joined(parts[::-1])
    assert turned.weights.data_ptr() != whole.weights.data_ptr()
    moved = weight.view(5, panel, 64)[[4, 1, 2, 3, 0]].flatten(0, 1)
    assert torch.equal(turned.weights, Blocks.pack([moved], 4).weights)


def test_accelerated_and_as_a_draft_model(folders: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = folders("packed zeros")
    model = load(str(folder), device="cpu").target.model
    ids, options = torch.tensor([[40, 50, 60, 40, 50, 60]]), {"max_new_tokens": 24, "do_sample": False}
    plain = outpace.accelerate(model, "none").generate(ids, **options).tolist()
    assert outpace.accelerate(model, "suffix").generate(ids, **options).tolist() == plain
    outpace.restore(model)
    target = outpace.Target(model)
    drafter = load_drafter(f"draft_model:model={folder}")
    engine = outpace.Engine(target, drafter, adaptive=False)
    params = outpace.SamplingParams(max_new_tokens=24)
    assert engine.generate([ids[0].tolist()], [params])[0].tokens == plain[0][6:]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GPTQ, "desc_act": True}, "desc_act orders its inputs"),
        ({**GPTQ, "bits": 3}, "3 bits; supported are 4 and 8"),
        ({**GPTQ, "group_size": 16}, "groups of 16 inputs; supported are groups of a multiple of 32"),
        ({**GPTQ, "bits": 8, "sym": False}, "8 bits with zeros"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "its layout is marlin"),
        ({**GPTQ, "is_marlin_format": True}, "its layout is marlin"),
        ({**AWQ, "version": "GEMV"}, "its layout is gemv; supported is gemm"),
        ({**AWQ, "zero_point": False}, "it has no zeros"),
        ({**AWQ, "bits": 8}, "8 bits; AWQ is read in 4"),
        ({**AWQ, "group_size": 48}, "groups of 48 inputs"),
        ({**GPTQ, "group_size": "32"}, "groups of '32' inputs"),
        ({"quant_method": "unheard"}, "neither outpace nor transformers knows it"),
        (packed_config(actorder="group"), "actorder orders its inputs"),
        (packed_config(2), "2 bits"),
        (packed_config(strategy="tensor"), "its scales are per tensor"),
        (packed_config(8, symmetric=False), "8 bits with zeros"),
        (packed_config(dynamic=True), "its weights are floats, or rounded as it runs"),
        ({**packed_config(), "kv_cache_scheme": {"num_bits": 8}}, "it has a kv_cache_scheme"),
        ({**packed_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
    ],
)
def test_refused_by_name_before_weights_are_read(
    config: dict[str, Any],
    reason: str,
    folders: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(folders("gptq")[0], tmp_path, dirs_exist_ok=True)
    set_config(tmp_path, config)
    monkeypatch.setattr(rounded._Quantiser, "_process_model_before_weight_loading", unreached)
    with pytest.raises(UnsupportedModel, match=f"{config['quant_method']}, and cannot be read: {reason}"):
        load(str(tmp_path), device="cpu")


def unreached(*given: Any, **more: Any) -> None:
    raise AssertionError("the model is made")


def test_activations_that_are_to_be_rounded(
    folders: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """To 8 bits per token as it runs is what products do; other ways are not."""
    shutil.copytree(folders("int")[0], tmp_path, dirs_exist_ok=True)
    config = json.loads(json.dumps(CONFIGS["int"]))
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    config["config_groups"]["group_0"]["input_activations"] = activations
    set_config(tmp_path, config)
    assert load(str(tmp_path), device="cpu", check=False).target.quantised == "int8"
    activations["dynamic"] = False
    set_config(tmp_path, config)
    with pytest.raises(UnsupportedModel, match="its activations are rounded"):
        load(str(tmp_path), device="cpu")


Change = Callable[[dict[str, Tensor]], None]
LAYER = "model.layers.1.mlp.down_proj"


def change_order(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.g_idx"] = tensors[f"{LAYER}.g_idx"].flip(0).contiguous()


def drop_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{LAYER}.scales"]


def halve_groups(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.scales"] = tensors[f"{LAYER}.scales"].repeat(2, 1)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.qweight"] = tensors[f"{LAYER}.qweight"][:6].contiguous()


def round_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.qweight"] = tensors[f"{LAYER}.qweight"].clone()


def add_expert(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.0.up_proj.qweight"] = tensors[f"{LAYER}.qweight"].clone()


def move_zeros(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.qzeros"] += 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_order, "g_idx orders its inputs"),
        (drop_scales, r"down_proj of 96 inputs has scales of shape \(\)"),
        (halve_groups, r"down_proj of 96 inputs has scales of shape \(6, 64\)"),
        (narrow, "which is not 96 inputs and 64 outputs in 4 or 8 bits"),
        (round_head, "lm_head is rounded, and is its head"),
        (add_expert, r"mlp.experts.0.up_proj is rounded, and is no linear layer"),
        (move_zeros, "its zeros are not 8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Change, reason: str, folders: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    shutil.copytree(folders("gptq")[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=reason):
        load(str(tmp_path), device="cpu")


def test_zeros_stored_as_they_are_under_the_older_name(
    folders: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Some tools write the zeros of gptq_v2 and call the layout gptq; sym=True says what they are."""
    folder, _ = folders("gptq")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] += 0x11111111
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    first, second = (
        rounded_of(load(str(place), device="cpu", check=False).target.model) for place in (folder, tmp_path)
    )
    assert all(torch.equal(a.packed.weights, b.packed.weights) for a, b in zip(first, second, strict=True))


def test_dtypes_and_devices(folders: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = folders("gptq")
    with pytest.raises(OutpaceError, match="take rows in bfloat16; leave --dtype float32 out"):
        load(str(folder), "float32", "cpu")
    assert isinstance(load(str(folder), "bfloat16", "cpu", check=False), Loaded)
