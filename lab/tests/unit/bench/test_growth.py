"""Growing a model does not change its tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from folders import byte_tokenizer
from outpace import nano_path
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace_lab.bench import growth_folder
from outpace_lab.bench.growth import Growth, grow
from outpace_lab.bench.llama_shapes import SHAPES, Shape, check_growth, load_shape
from parts import first

OWN = Shape(hidden_size=32, intermediate_size=40, layers=2, heads=4, kv_heads=2, head_dim=8)
ALL = Shape(hidden_size=96, intermediate_size=72, layers=7, heads=12, kv_heads=6, head_dim=32)
PROMPTS = [[5, 9, 5, 7, 9, 5], [3], list(range(1, 30))]


def llama(own: Shape = OWN, **options: Any) -> LlamaForCausalLM:
    """A random model in which everything matters: norms and their epsilon, biases, positions."""
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim,
        max_position_embeddings=128,
        initializer_range=1.7 * own.hidden_size**-0.5,
        rms_norm_eps=0.05,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(80).remainder(67)[None] * 31 % 67
    with torch.no_grad():
        found: torch.Tensor = model(ids.to(model.device)).logits
    return found


def answers(model: Any, drafter: str = "none") -> list[list[int]]:
    params = SamplingParams(max_new_tokens=24)
    return [answer.tokens for answer in Engine(model, drafter, adaptive=False).generate(PROMPTS, params)]


def assert_same(grown: Any, model: Any) -> None:
    expected = logits(model)
    assert (logits(grown) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert answers(grown) == answers(model)


@pytest.mark.parametrize(
    "change",
    first(
        5,
        [
            asdict(ALL),
            {"hidden_size": 48},
            {"layers": 5},
            {"heads": 8, "kv_heads": 4},
            {"head_dim": 16},
            {"intermediate_size": 41},
            {"kv_heads": 4},
            {"heads": 8},
            {"head_dim": 32},
        ],
    ),
    ids=lambda change: "-".join(f"{name}-{size}" for name, size in change.items()),
)
def test_each_size_alone_and_all_together(change: dict[str, int]) -> None:
    model = llama()
    shape = replace(OWN, **change)
    grown = grow(model, shape)
    assert Shape.of(grown.config) == shape
    assert grown.model.layers[-1].self_attn.q_proj.weight.shape == (
        shape.heads * shape.head_dim,
        shape.hidden_size,
    )
    assert_same(grown, model)


def test_heads_of_64_become_heads_of_128() -> None:
    own = replace(OWN, hidden_size=128, heads=2, kv_heads=1, head_dim=64)
    model = llama(own)
    assert_same(grow(model, replace(own, hidden_size=256, head_dim=128)), model)


@pytest.mark.parametrize("own_kv_heads", [1, 2])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_heads_find_room_where_fewer_or_more_share(own_kv_heads: int, kv_heads: int) -> None:
    """Four heads of one group or two, where one, two or four share a key and value head."""
    own = replace(OWN, kv_heads=own_kv_heads)
    model = llama(own)
    assert_same(grow(model, replace(own, heads=8, kv_heads=kv_heads)), model)


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            }
        },
    ],
    ids=["tied", "biases", "linear", "llama3"],
)
def test_kinds_of_llama(options: dict[str, Any]) -> None:
    model = llama(**options)
    grown = grow(model, ALL)
    tied = options.get("tie_word_embeddings", False)
    assert (grown.lm_head.weight is grown.model.embed_tokens.weight) == tied
    assert_same(grown, model)


def test_a_drafter_on_a_grown_model_drafts_for_the_small_ones_tokens() -> None:
    model = llama()
    assert answers(grow(model, ALL), "lookahead:window=4,ngram=3,guesses=4") == answers(model)


def test_the_embedded_model_at_the_smallest_shape() -> None:
    model = AutoModelForCausalLM.from_pretrained(nano_path(), dtype=torch.float32)
    grown = grow(model, replace(SHAPES["llama-0.1b"], layers=7))
    ids = torch.tensor([[411, 37, 2900, 5, 1033, 78, 640, 12]])
    with torch.no_grad():
        assert (grown(ids).logits - model(ids).logits).abs().max() < 1e-4


def layer_weights(shape: Shape) -> int:
    """Weights of all layers, norms left aside."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def test_shapes_have_the_parameters_they_are_named_after() -> None:
    config = AutoConfig.from_pretrained(nano_path())
    for name, shape in SHAPES.items():
        check_growth(config, shape)
        billions = float(name.removeprefix("llama-").removesuffix("b"))
        assert abs(layer_weights(shape) / 1e9 / billions - 1) < 0.15, name
    assert {shape.head_dim for name, shape in SHAPES.items() if layer_weights(shape) > 5e9} == {128}


def test_new_weights_are_noise_and_the_last_layer_is_old() -> None:
    """Zeros would be cheaper for some hardware than the weights of a trained model."""
    model = llama()
    growth = Growth(model, ALL)
    for name in growth.names:
        weight = growth.tensor(name)
        assert torch.isfinite(weight).all()
        assert not ((weight != 0) & (weight.abs() < torch.finfo(weight.dtype).tiny)).any()
    new = "model.layers.0."
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        assert (growth.tensor(f"{new}{part}.weight") != 0).float().mean() > 0.99
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert not growth.tensor(f"{new}{part}.weight").any()
        assert growth.tensor(f"model.layers.6.{part}.weight").any()
        assert growth.tensor(f"model.layers.2.{part}.weight").any()
    again, other = Growth(model, ALL), Growth(model, ALL, seed=1)
    name = f"{new}mlp.up_proj.weight"
    assert growth.tensor(name).equal(again.tensor(name)) and not growth.tensor(name).equal(other.tensor(name))


def test_straight_to_a_dtype() -> None:
    model = llama()
    grown = grow(model, ALL, "cpu", torch.bfloat16)
    assert {weight.dtype for weight in grown.state_dict().values()} == {torch.bfloat16}
    assert grown.dtype == torch.bfloat16 and not any(weight.is_meta for weight in grown.buffers())
    expected, found = logits(model), logits(grown)
    assert 1e-4 < (found - expected).abs().max() / expected.abs().max() < 0.1
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.gpu
def test_straight_to_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = llama()
    grown = grow(model, ALL, "cuda")
    assert {weight.device.type for weight in [*grown.parameters(), *grown.buffers()]} == {"cuda"}
    assert (logits(grown).cpu() - logits(model)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 16}, "smaller than the model: hidden_size is 16, the model's 32"),
        ({"layers": 1}, "smaller than the model: layers is 1"),
        ({"kv_heads": 1}, "has 1 key and value heads, and the model's 4 heads need 2"),
        ({"head_dim": 12}, "head size 12 is not a multiple of the model's 8"),
    ],
)
def test_shapes_without_room(change: dict[str, int], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        grow(llama(), replace(OWN, **change))


def test_models_that_cannot_be_grown() -> None:
    with pytest.raises(UnsupportedModel, match=r"only models of the family llama .* qwen2"):
        check_growth(Qwen2Config(), ALL)
    quantised = llama().config
    quantised.quantization_config = {"bits": 4}
    with pytest.raises(UnsupportedModel, match="quantised"):
        check_growth(quantised, ALL)


def test_rotary_types_that_depend_on_the_head_size() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 32}
    model = llama(rope_parameters=yarn)
    with pytest.raises(OutpaceError, match=r"'yarn' change with the head size; .* head size is 8"):
        grow(model, ALL)
    assert_same(grow(model, replace(ALL, head_dim=8)), model)


@pytest.mark.parametrize("change", [{"heads": 3}, {"layers": 0}, {"head_dim": 7}, {"hidden_size": 34}])
def test_shapes_that_are_none(change: dict[str, int]) -> None:
    with pytest.raises(OutpaceError):
        replace(OWN, **change)


def test_an_unknown_shape() -> None:
    with pytest.raises(OutpaceError, match=r"no shape 'llama-8b'\. .*There are: llama-0\.1b, .*llama-70b"):
        load_shape("llama-8b")


# -- the folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tied", "shard_size"), [(False, 100_000), (True, "2GB")])
def test_a_folder_that_transformers_loads(tmp_path: Path, tied: bool, shard_size: int | str) -> None:
    model = llama(tie_word_embeddings=tied)
    out = tmp_path / "grown"
    growth = Growth(model, ALL)
    reported: list[None] = []
    shards = growth_folder.save(
        growth, byte_tokenizer(), out, {"like": "all"}, shard_size, lambda: reported.append(None)
    )
    files = sorted(out.glob("model*.safetensors"))
    assert len(files) == shards and (shards > 5) == (not tied)
    assert sum(len(load_file(file)) for file in files) == len(growth.names) == len(reported)
    for file in files:
        sizes = [value.numel() * 4 for value in load_file(file).values()]
        assert tied or sum(sizes) <= 100_000 or len(sizes) == 1
    assert json.loads((out / "growth.json").read_text()) == {"like": "all"}
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_same(loaded, model)
    assert sum(weight.numel() for weight in loaded.parameters()) == growth.parameters
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]


def test_an_interrupted_folder_is_none(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        growth_folder.save(Growth(llama(), ALL), byte_tokenizer(), tmp_path / "grown", {}, report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growth = Growth(llama(), ALL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutpaceError, match="exists and would be lost"):
        growth_folder.save(growth, byte_tokenizer(), tmp_path / "full", {})
    with pytest.raises(OutpaceError, match="no such folder"):
        growth_folder.save(growth, byte_tokenizer(), tmp_path / "no" / "grown", {})
    usage = growth_folder.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(growth_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutpaceError, match=r"of room; choose another place, --dtype bfloat16"):
        growth_folder.save(growth, byte_tokenizer(), tmp_path / "grown", {})
    assert not (tmp_path / "grown").exists()
