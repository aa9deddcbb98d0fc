"""Low-rank updates of a GGUF file: merged into the matrices that they are for, and into no others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outpace
from outpace.core import OutpaceError, UnsupportedModel
from outpace.loading.updates import merge
from outpace.native.layers import functions
from outpace.targets import of_file

gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")
peft = pytest.importorskip("peft", reason="needs outpace[lora]")
from gguf_models import write_file  # noqa: E402
from unit.targets.test_gguf_file import TEXT, logits, model  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")


def updated(base: Any, folder: Path, file: Path, modules: list[str]) -> Any:
    """Write updates of some modules of a model; returns the model with them, in place."""
    config = peft.LoraConfig(target_modules=modules, r=4, lora_alpha=8)
    made = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    made.save_pretrained(folder)
    written = folder / "adapter_config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "base_model_name_or_path": str(file)}))
    return made.merge_and_unload().eval()


def fresh(family: str) -> Any:
    """A copy that may be changed."""
    made = type(model(family))(model(family).config).eval()
    made.load_state_dict(model(family).state_dict())
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_updates_are_added(family: str, tmp_path: Path) -> None:
    file = write_file(model(family), tmp_path / "model.gguf")
    right = updated(fresh(family), tmp_path / "updates", file, ["q_proj", "down_proj"])
    target = of_file(file, others=False, updated=partial(merge, folder=tmp_path / "updates"))
    assert target.plan.native and target.bit_exact
    with torch.inference_mode():
        wanted, plain = (one(torch.tensor([TEXT])).logits[0] for one in (right, model(family)))
    found = logits(target, TEXT)
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()
    assert (plain - wanted).abs().max() > 1e-1 * wanted.abs().max()


def test_other_matrices_keep_their_blocks(tmp_path: Path) -> None:
    config = LlamaConfig(**{**model("llama").config.to_dict(), "intermediate_size": 128})
    base = LlamaForCausalLM(config)
    file = write_file(base, tmp_path / "model.gguf", lambda name: "q8_0")
    updated(base, tmp_path / "updates", file, ["v_proj"])
    target = of_file(file, others=False, updated=partial(merge, folder=tmp_path / "updates"))
    assert target.plan.packed == {"q8_0": 3 * 6 + 1, "bf16": 3}


def test_updates_of_embeddings_are_refused(tmp_path: Path) -> None:
    file = write_file(model("llama"), tmp_path / "model.gguf")
    updated(fresh("llama"), tmp_path / "updates", file, ["embed_tokens", "v_proj"])
    with pytest.raises(UnsupportedModel, match="updates embeddings, which stay as they are in a GGUF file"):
        of_file(file, others=False, updated=partial(merge, folder=tmp_path / "updates"))


def test_updates_of_another_model_are_refused(tmp_path: Path) -> None:
    file = write_file(model("llama"), tmp_path / "model.gguf")
    updated(fresh("qwen2"), tmp_path / "updates", file, ["q_proj"])
    adapter = tmp_path / "updates" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"q_proj"', '"z_proj"'))
    with pytest.raises(OutpaceError, match="does not fit"):
        of_file(file, others=False, updated=partial(merge, folder=tmp_path / "updates"))


def test_a_folder_is_loaded_with_its_file(tmp_path: Path) -> None:
    from gguf_files import _model, gguf_file

    file = gguf_file("float32")
    base = type(_model(False)[0])(_model(False)[0].config)
    base.load_state_dict(_model(False)[0].state_dict())
    right = updated(base, tmp_path / "updates", file, ["o_proj"])
    loaded = outpace.load(tmp_path / "updates")
    ids = loaded.tokens("Question: What is 2 + 3?\nAnswer:")
    with torch.inference_mode():
        wanted = right(torch.tensor([ids])).logits[0]
    assert (logits(loaded.target, ids) - wanted).abs().max() < 1e-3 * wanted.abs().max()
    with pytest.raises(OutpaceError, match=r"is for \.gguf files"):
        outpace.load(tmp_path / "updates", llamacpp="threads=1")
