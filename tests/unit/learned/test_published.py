"""Published EAGLE-3 drafters: speculators' layout, EAGLE's own, and invalid files."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleModule
from outpace.drafters.support.vocabulary import part_of
from outpace.engine.engine import Engine
from outpace.learned.layers import itself
from outpace.targets import Target, TargetModel
from watching import Watch

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
# Ids that are drafted, of 97: neither the first ones nor evenly spaced.
DRAFTED = [*range(2, 50), 53, 57, *range(60, 90)]


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=4))


def weights(prefix: str, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a drafter for the target, as files have them: rows of 32, 4 heads of 8, 2 for keys."""
    shapes = {
        "fc.weight": (32, 96),
        "lm_head.weight": (len(DRAFTED), 32),
        "norm.weight": (32,),
        f"{prefix}hidden_norm.weight": (32,),
        f"{prefix}input_layernorm.weight": (32,),
        f"{prefix}post_attention_layernorm.weight": (32,),
        f"{prefix}self_attn.q_proj.weight": (32, 64),
        f"{prefix}self_attn.k_proj.weight": (16, 64),
        f"{prefix}self_attn.v_proj.weight": (16, 64),
        f"{prefix}self_attn.o_proj.weight": (32, 32),
        f"{prefix}mlp.gate_proj.weight": (64, 32),
        f"{prefix}mlp.up_proj.weight": (64, 32),
        f"{prefix}mlp.down_proj.weight": (32, 64),
    }
    random = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=random) / 4 for name, shape in shapes.items()}
    made["d2t"] = torch.tensor([token - place for place, token in enumerate(DRAFTED)])
    made["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, torch.tensor(DRAFTED), True)
    return made


LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "draft_vocab_size": len(DRAFTED),
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {**LAYER, "num_hidden_layers": 1},
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    },
}
# EAGLE's own config is the layer's, and does not say what is read: 2, half the layers, and all but 3.
THEIRS = {
    **LAYER,
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "draft_vocab_size": len(DRAFTED),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_speculators_layout_loads_and_drafts(tmp_path: Path) -> None:
    folder = write(tmp_path, SPECULATORS, weights("layers.0."))
    drafter = Eagle(str(folder))
    made = EagleModule.load(folder, llama())
    assert made.hidden_layers == (1, 2, 3)
    assert made.config.norm_before_residual and made.config.steps == 4
    assert made.config.rope["rope_theta"] == 5000.0
    assert made.config.eps == 1e-5
    found = Engine(llama(), drafter, adaptive=False).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, PARAMS)]
    assert all(g.stats.drafted > 20 for g in found)


@pytest.mark.parametrize("nested", [False, True])
def test_an_output_that_is_normed_is_read_from_the_config_alone(tmp_path: Path, nested: bool) -> None:
    """A normed output has no tensor that would be missed, so only the config shows it."""
    said = {"norm_output": True}
    config = {**SPECULATORS, **({"eagle_config": said} if nested else said)}
    made = EagleModule.load(write(tmp_path, config, weights("layers.0.")), llama())
    assert made.config.norm_output
    found = Engine(llama(), Eagle(str(tmp_path)), adaptive=False).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, PARAMS)]
    assert all(g.stats.drafted > 20 for g in found)


def test_the_layout_of_eagle_itself_loads_and_drafts(tmp_path: Path) -> None:
    folder = write(tmp_path, THEIRS, weights("midlayer."))
    drafter = Eagle(str(folder), expand=3, max_nodes=8)
    assert drafter.hidden_layers(drafter.prepare(llama())) == (2, 2, 1)
    found = Engine(llama(), drafter, adaptive=False).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, PARAMS)]
    assert all(g.stats.drafted > 20 for g in found)


def first_weights(bias: bool) -> dict[str, Tensor]:
    """Tensors of an EAGLE-1: of one layer without a norm before attention, and of the fusion."""
    own = {
        name: tensor
        for name, tensor in weights("layers.0.").items()
        if "norm" not in name and name not in ("lm_head.weight", "d2t", "t2d")
    }
    random = torch.Generator().manual_seed(3)
    for part in ("q", "k", "v"):
        name = f"layers.0.self_attn.{part}_proj.weight"
        own[name] = own[name][:, :32].contiguous()
    own["fc.weight"] = torch.randn(32, 64, generator=random) / 4
    own["layers.0.post_attention_layernorm.weight"] = torch.randn(32, generator=random)
    own["embed_tokens.weight"] = torch.randn(97, 32, generator=random)
    return own | ({"fc.bias": torch.randn(32, generator=random)} if bias else {})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expand", [None, 3])
def test_an_eagle_1_loads_and_drafts(tmp_path: Path, bias: bool, expand: int | None) -> None:
    """The config of an EAGLE-1 is that of its layer; with ``expand`` its trees are EAGLE-2's."""
    tensors = first_weights(bias)
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    folder = write(tmp_path, config, tensors)
    made = EagleModule.load(folder, llama())
    assert made.config.version == 1 and made.hidden_layers == (-1,) and made.config.own_embeddings
    # One row attends to itself alone, so attention passes its value on.
    tokens, features = torch.tensor([[5]]), torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, 1, 1, dtype=made.fc.weight.dtype)
    features = features.to(made.fc.weight.dtype)
    found = made.advance(tokens, features, torch.tensor([[7]]), mask, lambda layer: itself)
    own = {name.removeprefix("layers.0."): tensor.to(features) for name, tensor in tensors.items()}
    x = torch.cat([own["embed_tokens.weight"][5], features[0, 0]]) @ own["fc.weight"].T
    x = x + own.get("fc.bias", torch.zeros(32).to(x))
    value = (x @ own["self_attn.v_proj.weight"].T).view(2, 1, 8).expand(2, 2, 8).flatten()
    x = x + value @ own["self_attn.o_proj.weight"].T
    y = x * torch.rsqrt(x.pow(2).mean() + 1e-5) * own["post_attention_layernorm.weight"]
    gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
    x = x + (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    assert torch.allclose(found[0, 0], x, atol=1e-5)
    drafter = Eagle(str(folder), expand=expand, max_nodes=8 if expand else None)
    answers = Engine(llama(), drafter, adaptive=False).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in answers] == [g.tokens for g in Engine(llama()).generate(PROMPTS, PARAMS)]
    assert all(g.stats.drafted > 20 for g in answers)


@pytest.mark.parametrize("stated", [2, 7, None])
def test_drafts_are_as_long_as_the_file_says(tmp_path: Path, stated: int | None) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": stated}] if stated else []
    said = {"speculators_config": {"proposal_methods": methods}}
    folder = write(tmp_path, {**SPECULATORS, **said}, weights("layers.0."))
    for own, expected in (({}, stated or 5), ({"num_speculative_tokens": 3}, 3)):
        watch = Watch()
        engine = Engine(llama(), Eagle(str(folder), **own), observer=watch, adaptive=False)
        engine.add(PROMPTS[0], PARAMS)
        engine.step()
        engine.step()
        assert [len(step.draft) for step in watch.steps] == [0, expected]


def test_a_name_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, SPECULATORS, weights("layers.0."))
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    found = [
        Engine(llama(), Eagle(path), adaptive=False).generate(PROMPTS, PARAMS)
        for path in (str(folder), "who/What-3.1_x")
    ]
    assert asked == [("who/What-3.1_x", None, ["*config.json", "*.safetensors*"])]
    assert [g.stats.accepted for g in found[0]] == [g.stats.accepted for g in found[1]]
    with pytest.raises(OutpaceError, match=r"there is no .*config\.json; train one with"):
        EagleModule.load(tmp_path / "nowhere", llama())
    assert len(asked) == 1


def test_a_name_that_the_hub_does_not_give_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise FileNotFoundError(f"no {name}.\nAnd more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutpaceError, match=r"no folder a/b, .*\(no a/b\); .*--out a/b; .*hf download a/b$"):
        Engine(llama(), Eagle("a/b"))


def test_llama_3s_rope_turns_slow_pairs_less(tmp_path: Path) -> None:
    """Llama 3.1's: pairs that turn often in the original context as ever, those that hardly turn by a factor
    less, and between the two in proportion.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    layer = {**LAYER, "num_hidden_layers": 1, "rope_scaling": scaling, "rope_theta": 500.0}
    folder = write(tmp_path, {**SPECULATORS, "transformer_layer_config": layer}, weights("layers.0."))
    made = EagleModule.load(folder, llama())
    pairs = [500.0 ** (-pair / 4) for pair in range(4)]
    often = [256 * pair / (2 * math.pi) for pair in pairs]
    shares = [min(max((turns - 1) / (4 - 1), 0), 1) for turns in often]
    assert shares[:2] == [1, 1] and 0.2 < shares[2] < 0.8 and shares[3] == 0
    expected = [share * pair + (1 - share) * pair / 8 for pair, share in zip(pairs, shares, strict=True)]
    angles = torch.tensor(expected, dtype=torch.float64).repeat(2) * 7
    cos, sin = made._rotary(torch.tensor([[7]]), torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(cos[0, 0, 0], angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, 0, 0], angles.sin(), rtol=0, atol=1e-5)
    found = Engine(llama(), Eagle(str(folder)), adaptive=False).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, PARAMS)]


def test_weights_in_several_files_are_one_drafter(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", SPECULATORS, weights("layers.0."))
    names = sorted(weights("layers.0."))
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SPECULATORS))
    places = {}
    for part, own in enumerate((names[:6], names[6:]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: weights("layers.0.")[name] for name in own}, folder / file)
        places |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found, expected = (EagleModule.load(place, llama()).state_dict() for place in (folder, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    made = EagleModule.load(write(tmp_path, SPECULATORS, weights("layers.0.")), llama())
    assert made.drafted is not None and made.drafted.tolist() == DRAFTED
    rows = made.drafted_logits(torch.randn(3, 32, dtype=torch.float64))
    logits = part_of(made.drafted, 97).logits(rows)
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == DRAFTED * 3


def test_embeddings_that_are_the_targets_are_shared_and_others_kept(tmp_path: Path) -> None:
    own = llama().embed(torch.arange(97)).clone()
    tensors = {**weights("layers.0."), "embed_tokens.weight": own}
    same = EagleModule.load(write(tmp_path / "same", SPECULATORS, tensors), llama())
    tensors["embed_tokens.weight"] = own + 1
    other = EagleModule.load(write(tmp_path / "other", SPECULATORS, tensors), llama())
    assert not same.config.own_embeddings and "embed_tokens.weight" not in same.state_dict()
    torch.testing.assert_close(other.embed_tokens.weight, own + 1)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights("layers.0.").items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            without("layers.0.self_attn.k_proj.weight"),
            r"'layers.0.self_attn.k_proj.weight', of shape \[16, 64\]",
        ),
        ({**weights("layers.0."), "fc.weight": torch.zeros(32, 64)}, r"'fc.weight' has shape \[32, 64\].*96"),
        (
            {**weights("layers.0."), "extra.weight": torch.zeros(2)},
            r"'extra.weight', of shape \[2\], is not expected by",
        ),
        ({**weights("layers.0."), "d2t": torch.tensor(DRAFTED)}, "'d2t'"),
        ({**weights("layers.0."), "t2d": torch.ones(97, dtype=torch.bool)}, "'t2d'"),
    ],
)
def test_a_mismatch_names_the_tensor(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        EagleModule.load(write(tmp_path, SPECULATORS, tensors), llama())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "mlp"}, "kind 'mlp'"),
        ({"target_hidden_size": 64}, "must be equal"),
        ({"transformer_layer_config": {**LAYER, "hidden_act": "gelu"}}, "hidden_act"),
        ({"transformer_layer_config": {**LAYER, "hidden_size": 64}}, "hidden size"),
        ({"transformer_layer_config": {**LAYER, "vocab_size": 98}}, "vocabulary"),
        ({"draft_vocab_size": 98}, "draft_vocab_size of 98 and a vocab_size of 97"),
        ({"transformer_layer_config": {**LAYER, "num_key_value_heads": 3}}, "multiple of kv_heads"),
        ({"transformer_layer_config": {**LAYER, "num_attention_heads": 0}}, "config.json"),
        ({"transformer_layer_config": {**LAYER, "model_type": "nothing"}}, "config.json"),
        ({"norm_before_fc": True, "fc_norm": True}, "give one"),
        (
            {
                "transformer_layer_config": {
                    **LAYER,
                    "model_type": "qwen3",
                    "num_hidden_layers": 1,
                    "layer_types": ["sliding_attention"],
                }
            },
            "sliding_attention",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        EagleModule.load(write(tmp_path, {**SPECULATORS, **change}, weights("layers.0.")), llama())


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS))
    with pytest.raises(OutpaceError, match="no safetensors"):
        EagleModule.load(tmp_path, llama())
