"""Every format of published drafters that is listed: its folder loads and drafts, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mtp_folders
from assistant_folders import gemma
from assistant_folders import write as write_assistant
from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS
from outpace.drafters.eagle.eagle_module import EagleConfig, EagleModule
from outpace.drafters.heads.medusa import MedusaHeads
from outpace.learned.formats import FORMATS, UNTOLD, format_of
from outpace.targets import TargetModel
from unit.drafters.test_muse import assistant as write_muse
from unit.drafters.test_muse import muse
from unit.learned import test_published as eagles
from unit.learned import test_published_dflash as dflashes
from unit.learned import test_published_hydra as hydras
from unit.learned import test_published_medusa as medusas

PROMPTS = [[3, 9, 2, 7, 3, 9, 2], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=4))


@cache
def gemma_target() -> TargetModel:
    return Target(gemma())


def config_alone(**entries: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        return eagles.write(folder, {**eagles.LAYER, **entries}, {"fc.weight": torch.zeros(2, 2)})

    return write


def speculators(kind: str, **entries: Any) -> Callable[[Path], Path]:
    return lambda folder: eagles.write(
        folder,
        {**eagles.SPECULATORS, "speculators_model_type": kind, **entries},
        eagles.weights("layers.0."),
    )


def outpaces(folder: Path) -> Path:
    EagleModule.new(EagleConfig(steps=2), llama()).save(folder)
    return folder


def vllms_medusa(folder: Path) -> Path:
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": 32}
    return eagles.write(folder, {**config, "vocab_size": 97}, by_vllm(medusas.weights()))


def by_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Medusa's tensors by vLLM's names, without biases."""
    named = {}
    for name, one in tensors.items():
        head, layer, *rest = name.split(".")
        if rest == ["linear", "weight"]:
            named[f"blocks.{head}.layers.{layer}.weight"] = one
        elif rest == ["weight"]:
            named[f"lm_heads.{head}.weight"] = one
    return named


def plain_model(folder: Path, **entries: Any) -> Path:
    tiny_llama(layers=1).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **entries}), "utf-8")
    return folder


def predicting(folder: Path) -> Path:
    return mtp_folders.write_beside(folder, llama().model, PROMPTS)


# Format -> writes a folder of it, and the target.
WRITTEN: dict[str, tuple[Callable[[Path], Any], Callable[[], TargetModel]]] = {
    "outpace": (outpaces, llama),
    "speculators, EAGLE-3": (speculators("eagle3"), llama),
    "speculators, DFlash": (
        lambda folder: dflashes.write(folder, dflashes.SPECULATORS, dflashes.weights(2)),
        llama,
    ),
    "speculators and DeepSeek, DSpark": (speculators("dspark", markov_rank=256), llama),
    "speculators, P-EAGLE": (speculators("peagle", mask_token_id=96), llama),
    "speculators, MTP": (speculators("mtp"), llama),
    "speculators, other": (speculators("independent"), llama),
    "transformers, Gemma 4's assistant": (write_assistant, gemma_target),
    "transformers, Muse's assistant (DFlash)": (write_muse, muse),
    "z-lab, DFlash": (lambda folder: dflashes.write(folder, dflashes.ZLAB, dflashes.weights()), llama),
    "IBM, MLP speculator": (config_alone(model_type="mlp_speculator", n_predict=3), llama),
    "FasterDecoding, Medusa": (lambda folder: medusas.write(folder, medusas.weights()), llama),
    "vLLM, Medusa": (vllms_medusa, llama),
    "zankner, Hydra": (lambda folder: hydras.write(folder, hydras.weights()), llama),
    "PARD, parallel draft models": (lambda folder: plain_model(folder, pard_token=96), llama),
    "vLLM, prediction layers as a folder of their own": (config_alone(model_type="deepseek_mtp"), llama),
    "SafeAILab, EAGLE-3": (
        lambda folder: eagles.write(folder, eagles.THEIRS, eagles.weights("midlayer.")),
        llama,
    ),
    "SafeAILab, EAGLE-1": (
        lambda folder: eagles.write(
            folder, {**eagles.LAYER, "num_hidden_layers": 1}, eagles.first_weights(True)
        ),
        llama,
    ),
    "any language model of text": (plain_model, llama),
    "prediction layers in the target's checkpoint": (predicting, llama),
}  # fmt: skip
LISTED = {one.name: one.drafter for one in FORMATS} | {name: drafter for name, _, drafter in UNTOLD}
TRIED = [name for name in DRAFTERS if name in {*LISTED.values()} - {"mtp"}]


def drafter_of(name: str) -> str:
    return "eagle" if name == "outpace" else LISTED[name]


def test_every_format_that_is_listed_has_a_folder_here() -> None:
    assert WRITTEN.keys() == LISTED.keys()


@pytest.mark.parametrize("name", [name for name in LISTED if drafter_of(name)])
def test_a_format_that_is_read_drafts(name: str, tmp_path: Path) -> None:
    write, target = WRITTEN[name]
    write(tmp_path)
    option = "model" if drafter_of(name) == "draft_model" else "path"
    spec = f"{drafter_of(name)}:{option}={tmp_path}"
    found = Engine(target(), spec, adaptive=False).generate(PROMPTS, PARAMS)
    plain = Engine(target()).generate(PROMPTS, PARAMS)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(one.stats.drafted > 5 for one in found)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (one.name, method)
        for one in FORMATS
        for method in TRIED
        if one.drafter != method and one.name != "outpace"
    ],
)
def test_other_drafters_name_the_format_and_what_reads_it(name: str, method: str, tmp_path: Path) -> None:
    write, _ = WRITTEN[name]
    write(tmp_path)
    found = format_of(json.loads((tmp_path / "config.json").read_text("utf-8")))
    assert found is not None and found.name == name
    option = "model" if method == "draft_model" else "path"
    with pytest.raises(OutpaceError) as caught:
        Engine(llama(), f"{method}:{option}={tmp_path}")
    words = str(caught.value)
    assert words.startswith(f"{method}: ") and f"has the format {name}" in words and "\n" not in words
    assert f"{found.drafter}:path=" in words if found.drafter else found.reason in words


def test_vllms_medusa_predicts_what_the_other_layout_does(tmp_path: Path) -> None:
    tensors = {
        name: torch.zeros_like(one) if name.endswith("bias") else one
        for name, one in medusas.weights(2).items()
    }
    theirs = MedusaHeads.load(medusas.write(tmp_path / "a", tensors), llama())
    vllms = eagles.write(tmp_path / "b", {"model_type": "medusa"}, by_vllm(tensors))
    ours = MedusaHeads.load(vllms, llama())
    states = torch.randn(4, 32, dtype=llama().hidden.dtype)
    for head in range(medusas.HEADS):
        assert torch.equal(ours.guess(states, head), theirs.guess(states, head))
    save_file({**by_vllm(tensors), "token_map": torch.arange(3)}, vllms / "model.safetensors")
    with pytest.raises(OutpaceError, match="unknown tensor 'token_map'"):
        MedusaHeads.load(vllms, llama())
