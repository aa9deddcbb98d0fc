"""Models over several devices, and what a model needs before it is loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

import outpace
from outpace.cli.place import place_of, spread_of
from outpace.core import OutpaceError, SamplingParams
from outpace.loading import load, placement
from outpace.loading.placement import SharedModel, Spread, check_needs
from outpace.loading.weights import needs_of_name
from outpace.targets.weights.needs import needs_of

LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def test_a_device_map_changes_no_token() -> None:
    pytest.importorskip("accelerate")
    names = [
        f"model.layers.{i}" for i in range(AutoConfig.from_pretrained(outpace.nano_path()).num_hidden_layers)
    ]
    text = "{" + ", ".join(f'"{name}": "cpu"' for name in ("model.embed_tokens", *names)) + ', "": "cpu"}'
    expected = load(dtype="float64", device="cpu")
    prompt = expected.encode("Question: What is 2 + 3?")
    plain = expected.engine("none").generate([prompt], SamplingParams(max_new_tokens=16))[0].tokens
    for layers in ("auto", text):
        loaded = load(dtype="float64", device=Spread.of(layers))
        found = loaded.engine("prompt_lookup").generate([prompt], SamplingParams(max_new_tokens=16))[0]
        assert found.tokens == plain


@pytest.mark.parametrize("text", ["everywhere", "[]", "{}", '{"": "disk"}'])
def test_a_wrong_map_is_refused(text: str) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(OutpaceError, match=r"device map|disk"):
        Spread.of(text)


def test_a_missing_device_is_refused() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(OutpaceError, match="cannot be used here"):
        load(device=Spread.of('{"": 977}'))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(OutpaceError, match="not both"):
        spread_of("cpu", "auto")
    with pytest.raises(OutpaceError, match="draft or tensor"):
        place_of(None, None, "pipeline", 9, None, "auto", False)
    with pytest.raises(OutpaceError, match="leave --device-map out"):
        place_of(None, "auto", "draft", 9, None, "auto", False)
    with pytest.raises(OutpaceError, match="torchrun"):
        place_of(None, None, "draft", 9, None, "auto", False)


def test_what_a_70b_shape_needs() -> None:
    needs = needs_of(LLAMA_70B, torch.bfloat16)
    assert needs.parameters == 70_553_706_496
    assert needs.weights == 2 * needs.parameters
    assert needs.row == 80 * 2 * 8 * 128 * 2
    assert "131.4 GiB in bfloat16" in str(needs)
    rounded = copy.deepcopy(LLAMA_70B)
    rounded.quantization_config = {"quant_method": "gptq", "bits": 4}
    floats = 2 * rounded.vocab_size * rounded.hidden_size + rounded.hidden_size * (2 * 80 + 1)
    assert needs_of(rounded, torch.bfloat16).weights == 2 * floats + (needs.parameters - floats) * 5 // 8


class _Eight:
    size = 8


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LLAMA_70B.save_pretrained(tmp_path)  # and no weights
    monkeypatch.setattr(placement, "total_bytes", lambda device: 80 * 2**30)
    with pytest.raises(OutpaceError, match=r"131.4 GiB .* 80.0 GiB .*tensor.* at least 3"):
        load(str(tmp_path), "bfloat16", "cpu")
    needs = needs_of_name(str(tmp_path), "bfloat16", "cpu")
    monkeypatch.setattr(placement, "total_bytes", lambda device: 140 * 2**30)
    check_needs("big", needs, "cpu")
    check_needs("big", needs, SharedModel(_Eight(), "tensor"))  # type: ignore[arg-type]
    if not torch.cuda.is_available():  # whose processes share one memory
        with pytest.raises(OutpaceError, match="does not fit"):
            check_needs("big", needs, SharedModel(_Eight(), "draft"))  # type: ignore[arg-type]


def test_small_models_are_not_told_of() -> None:
    assert needs_of_name(str(outpace.nano_path()), "float32", "cpu") is None


def test_apples_gpu_is_taken_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native steps are the CPU's; which is faster is not known."""
    for device, here in ((torch.cuda, False), (torch.backends.mps, True)):
        monkeypatch.setattr(device, "is_available", lambda here=here: here)
    assert placement.device_of(None) == torch.device("cpu")


def test_a_draft_model_on_a_device_of_its_own() -> None:
    model = load(device="cpu")
    prompt = model.encode("Question: What is 2 + 3?")
    params = SamplingParams(max_new_tokens=16)
    expected = model.engine("none").generate([prompt], params)[0].tokens
    assert model.engine("draft_model:device=cpu").generate([prompt], params)[0].tokens == expected
    with pytest.raises(OutpaceError, match="cannot be used here"):
        model.engine("draft_model:device=cuda:977")


@pytest.mark.gpu
def test_a_draft_model_on_a_gpu_for_a_target_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = load(device="cpu", dtype="float64")
    prompt = model.encode("Question: What is 2 + 3?")
    for params in (
        SamplingParams(max_new_tokens=32),
        SamplingParams(max_new_tokens=32, temperature=1, seed=1),
    ):
        expected = model.engine("none").generate([prompt], params)[0].tokens
        assert model.engine("draft_model:device=cuda").generate([prompt], params)[0].tokens == expected
