"""Loading models: refusals and their messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from folders import byte_tokenizer, save_llama
from outpace.core import ContextOverflow, OutpaceError, UnsupportedModel
from outpace.loading import Loaded, load
from outpace.loading import loaded as loaded_module
from outpace.loading.placement import SharedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Loaded:
    return load(str(folder), device="cpu")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_folder_loads_in_float32_on_a_cpu(model: Loaded, folder: Path) -> None:
    assert (model.dtype, model.device) == ("float32", "cpu")
    assert str(model) == f"{folder}, float32 on cpu"
    assert load(str(folder), device="cpu", dtype="bfloat16").dtype == "bfloat16"


@pytest.fixture(scope="module")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with weights in bfloat16."""
    made = tmp_path_factory.mktemp("models") / "half"
    shutil.copytree(folder, made)
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(made)
    return made


def test_bfloat16_stays_where_steps_in_it_are_bit_exact(half: Path) -> None:
    found = load(str(half), device="cpu")
    assert found.dtype == "bfloat16" and found.target.bit_exact
    assert "dtype" in str(found.target.plan) and found.target.plan.dtype == "bfloat16, the model's own"
    assert load(str(half), "float32", "cpu").target.plan.dtype == ""
    assert load(device="cpu").dtype == "bfloat16"  # the embedded model


def test_bfloat16_becomes_float32_where_steps_in_it_are_not_bit_exact(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(str(half), device="cpu", stock=True)
    assert (found.dtype, found.target.dtype) == ("float32", torch.float32)
    assert "not bit-exact: " in found.target.plan.dtype
    made = loaded_module.Target

    def target(model: Any, **options: Any) -> Any:
        if model.dtype == torch.bfloat16:
            raise UnsupportedModel("it cannot be in bfloat16")
        return made(model, **options)

    monkeypatch.setattr(loaded_module, "Target", target)
    found = load(str(half), device="cpu")
    assert found.dtype == "float32" and "it cannot be in bfloat16" in found.target.plan.dtype


def test_float16_becomes_float32(half: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(half, dtype=torch.float16).save_pretrained(tmp_path / "f16")
    byte_tokenizer().save_pretrained(tmp_path / "f16")
    assert load(str(tmp_path / "f16"), device="cpu").dtype == "float32"


def test_the_real_model_is_looked_for_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    with pytest.raises(OutpaceError, match="outpace pull smollm2"):
        load("smollm2")
    shutil.copytree(folder, tmp_path / "smollm2-135m-instruct")
    assert load("smollm2", device="cpu").source == str(tmp_path / "smollm2-135m-instruct")


def test_weights_come_from_safetensors_only(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(OutpaceError, match="no weights in safetensors format"):
        load(str(copy))


def test_code_of_a_models_own_runs_only_where_asked_for(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copy / "own.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutpaceError, match="pass --trust-remote-code if you trust it"):
        load(str(copy))
    assert not ran.exists()


def test_weights_are_not_rounded_in_several_processes() -> None:
    class Ranks:
        def lost(self, error: Exception) -> Exception:
            return error  # the other processes are told it

    ranks: Any = Ranks()
    with pytest.raises(OutpaceError, match="leave --quantise or --parallel out"):
        load(None, "bfloat16", SharedModel(ranks, "draft"), quantise="int8")


def test_weights_with_a_gap_are_refused(copy: Path) -> None:
    """transformers would fill the gap with random numbers."""
    weights = load_file(copy / "model.safetensors")
    gone = next(name for name in weights if "q_proj" in name)
    del weights[gone]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OutpaceError, match=f"incomplete; missing are {gone}"):
        load(str(copy))


def test_broken_files_are_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not a header at all" * 9)
    with pytest.raises(OutpaceError, match=f"{copy}.*cannot be read: .*header"):
        load(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(OutpaceError, match="is not JSON"):
        load(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(OutpaceError, match=r"the folder has no config\.json"):
        load(str(copy))
    with pytest.raises(OutpaceError, match="is a file; give the folder"):
        load(str(copy / "model.safetensors"))


def test_a_missing_tokenizer_is_said(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(OutpaceError, match="has no tokenizer that can be loaded"):
        load(str(copy))


def test_an_embedded_model_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.names.nano_path", lambda: tmp_path)
    with pytest.raises(OutpaceError, match="missing from this installation"):
        load()


def test_prompts_are_measured(model: Loaded) -> None:
    assert len(model.encode("x" * 96)) == 96
    with pytest.raises(ContextOverflow, match="has 97 tokens, the model's context 96"):
        model.encode("x" * 97)
    with pytest.raises(OutpaceError, match="has no tokens"):
        model.encode("")
