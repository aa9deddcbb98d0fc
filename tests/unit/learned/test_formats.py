"""Every format of published drafters that is listed: its folder loads and drafts, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from unit.learned import test_dflash_kin as dflash_kin
from unit.learned import test_published as eagles
from unit.learned import test_published_dflash as dflashes
from unit.learned import test_published_hydra as hydras
from unit.learned import test_published_medusa as medusas
from unit.learned import test_published_peagle as peagles
from watching import Watch

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


def kin(name: str) -> Callable[[Path], Path]:
    one = dflash_kin.KIN[name]
    return lambda folder: dflashes.write(folder, one.config, one.every)


def predicting(folder: Path) -> Path:
    return mtp_folders.write_beside(folder, llama().model, PROMPTS)


# Names of prediction layers as Qwen publishes them -> speculators' (its own converter's table).
SPECULATORS_MTP = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def speculators_mtp(folder: Path) -> Path:
    predicting(folder)
    tensors = {}
    for name, one in load_file(folder / "model.safetensors").items():
        old = next(prefix for prefix in SPECULATORS_MTP if name.startswith(prefix))
        tensors[SPECULATORS_MTP[old] + name.removeprefix(old)] = one
    config = {
        "speculators_model_type": "mtp",
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": eagles.LAYER,
    }
    return eagles.write(folder, config, tensors)


# Format -> writes a folder of it, and the target.
WRITTEN: dict[str, tuple[Callable[[Path], Any], Callable[[], TargetModel]]] = {
    "outpace": (outpaces, llama),
    "speculators, EAGLE-3": (speculators("eagle3"), llama),
    "speculators, DFlash": (
        lambda folder: dflashes.write(folder, dflashes.SPECULATORS, dflashes.weights(2)),
        llama,
    ),
    "DeepSeek-V4, DSpark": (config_alone(dspark_block_size=5, dspark_noise_token_id=3), llama),
    "speculators, DeepSeek and SpecForge, DSpark": (kin("deepseek, vanilla"), llama),
    "speculators and SpecForge, P-EAGLE": (
        lambda folder: peagles.write(folder, peagles.THEIRS, peagles.tensors()), llama
    ),
    "speculators, MTP": (speculators_mtp, llama),
    "speculators, other": (speculators("independent"), llama),
    "transformers, Gemma 4's assistant": (write_assistant, gemma_target),
    "transformers, Muse's assistant (DFlash)": (write_muse, muse),
    "SpecForge, Domino": (config_alone(dflash_config={"projector_type": "domino"}), llama),
    "JetSpec": (kin("jetspec"), llama),
    "z-lab, DFlash 2": (kin("dflash 2"), llama),
    "z-lab, DFlash": (lambda folder: dflashes.write(folder, dflashes.ZLAB, dflashes.weights()), llama),
    "IBM, MLP speculator": (config_alone(model_type="mlp_speculator", n_predict=3), llama),
    "FasterDecoding, Medusa": (lambda folder: medusas.write(folder, medusas.weights()), llama),
    "vLLM, Medusa": (vllms_medusa, llama),
    "zankner, Hydra": (lambda folder: hydras.write(folder, hydras.weights()), llama),
    "AMD, PARD-2": (
        lambda folder: plain_model(folder, pard_token=96, pard2_target_layers=[1], pard2_target_dim=32), llama
    ),
    "AMD, PARD": (lambda folder: plain_model(folder, pard_token=96), llama),
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


def test_speculators_prediction_layers_draft_what_those_of_the_checkpoint_do(tmp_path: Path) -> None:
    drafted = []
    for write, folder in ((predicting, tmp_path / "a"), (speculators_mtp, tmp_path / "b")):
        watch = Watch()
        engine = Engine(llama(), f"mtp:path={write(folder)}", adaptive=False, observer=watch)
        engine.generate(PROMPTS, PARAMS)
        drafted.append([list(step.draft.tokens) for step in watch.steps])
    assert drafted[0] == drafted[1] and sum(map(len, drafted[0])) > 20
