"""What a model's folder brings to draft with is found by itself, beside copying, and never in the way."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import outpace
from assistant_folders import gemma
from assistant_folders import write as write_assistant
from folders import byte_tokenizer
from mtp_folders import WEIGHTS, load, write
from outpace import Engine, Target
from outpace.core import DEFAULT_DRAFTER, SamplingParams, Speculation
from outpace.drafters.combined.combined import Combined
from outpace.embedded import nano_drafter_path, nano_path
from outpace.engine import active
from outpace.engine.slow import tell
from outpace.engine.usual import Chosen, usual
from outpace.hf.engines import Engines
from outpace.policy.governor import Pinned
from outpace.testing import ToyTarget
from outpace.verify import VERIFIERS, load_verifier
from parts import since

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6, 11, 30]]
BOTH = f"combined:({DEFAULT_DRAFTER})+(mtp)"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a prediction layer, and a tokenizer."""
    folder = write(tmp_path_factory.mktemp("layered"), "glm4_moe")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def fresh() -> None:
    tell.cache_clear()


def exact(target: Any, chosen: Chosen, name: str) -> None:
    """Check that a drafter gives the tokens of plain decoding, and that a part of it drafts."""
    for params in (GREEDY, SAMPLED):
        plain = [found.tokens for found in Engine(target).generate(PROMPTS, params)]
        found = Engine(target, chosen.drafter, adaptive=False).generate(PROMPTS, params)
        assert [one.tokens for one in found] == plain
        assert sum(one.stats.extra[f"{name}_drafted"] for one in found) > 0


@since("5.24")
def test_prediction_layers_in_the_checkpoint(layered: Path) -> None:
    target = Target(load(layered))
    chosen = usual(target)
    assert chosen.spec == BOTH and chosen.because == "prediction layers in its checkpoint"
    exact(target, chosen, "mtp")
    # Under verifiers of distributions, and for chains, alone: still no draft is lost.
    for verifier in VERIFIERS:
        engine = Engine(target, usual(target, verifier).drafter, verifier, adaptive=False)
        assert engine.drafter.name == ("combined" if load_verifier(verifier).coupled else "mtp")
        assert sum(one.stats.drafted for one in engine.generate(PROMPTS, SAMPLED)) > 0
    assert usual(target, changes=True).spec == DEFAULT_DRAFTER
    target.why_chains_only = "its positions cannot be set"
    assert usual(target).spec == "mtp" and "the target takes no draft" in usual(target).because


@since("5.24")
def test_every_way_without_a_name_takes_it(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    of = outpace.drafters.mtp.mtp_module.MtpModule.of.__func__

    def noted(cls: Any, *args: Any) -> Any:
        loads.append("once")
        return of(cls, *args)

    monkeypatch.setattr("outpace.drafters.mtp.mtp_module.MtpModule.of", classmethod(noted))
    loaded = outpace.load(layered, "float32", "cpu")
    plain = loaded.engine().generate(PROMPTS, GREEDY)
    found = loaded.generate(PROMPTS, GREEDY)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert "mtp_drafted" in found[0].stats.extra and loads == ["once"]

    model, engines = load(layered), Engines(None, "match")
    target = engines.target(model)
    with engines.lend(target) as first, engines.lend(target) as second:
        assert isinstance(first.drafter, Combined) and first.drafter is second.drafter
    assert loads == ["once"] * 2  # engines of one model share what is loaded
    ids = torch.tensor([PROMPTS[2]])
    stock = model.generate(ids, max_new_tokens=24, do_sample=False)
    outpace.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), stock)
    # A single call loads nothing.
    before = len(loads)
    model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=outpace.decode())
    assert len(loads) == before


def dropped(folder: Path, word: str) -> None:
    state = load_file(folder / WEIGHTS)
    kept = {name: tensor for name, tensor in state.items() if word not in name}
    assert len(kept) < len(state)
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def test_layers_that_cannot_be_used_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, "qwen3_5_text")
    dropped(folder, "mtp.layers.0.mlp.down_proj")
    target = Target(load(folder))
    with caplog.at_level(logging.WARNING):
        usual(target)
        chosen = usual(target)
    assert chosen.spec.startswith(DEFAULT_DRAFTER) and "mtp: " in chosen.because
    assert len(caplog.records) == 1 and "that is not used: mtp: " in caplog.text
    assert Engine(target, chosen.drafter).generate([PROMPTS[2]], GREEDY)


def test_further_layers_alone_are_no_prediction_layers(tmp_path: Path) -> None:
    """As of a model that was loaded with fewer layers than its file has."""
    folder = write(tmp_path, "qwen3_5_text")
    dropped(folder, "mtp.")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["num_hidden_layers"], config["layer_types"] = 1, config["layer_types"][:1]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert "mtp" not in usual(Target(load(folder))).because


def gemma_in(folder: Path) -> Any:
    gemma(2, torch.float32).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("place", ["gemma-assistant", "gemma/assistant"])
def test_an_assistant_beside_its_gemma(tmp_path: Path, place: str) -> None:
    model = gemma_in(tmp_path / "gemma")
    written = write_assistant(tmp_path / place)
    chosen = usual(Target(model))
    assert chosen.spec == f"combined:({DEFAULT_DRAFTER})+(assistant:path={written})"
    assert chosen.because == f"{written.name}, {'beside' if '-' in place else 'in'} its folder"
    exact(Target(model), chosen, "assistant")


def test_an_assistant_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str) -> Path:
        place = tmp_path / f"models--some--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40, "utf-8")
        return place / "snapshots" / ("0" * 40)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = gemma_in(snapshot("gemma"))
    written = write_assistant(snapshot("gemma-assistant"))
    model.name_or_path = model.config._name_or_path = "some/gemma"
    assert usual(Target(model)).spec == f"combined:({DEFAULT_DRAFTER})+(assistant:path={written})"


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_drafter_in_a_subfolder(tmp_path: Path, method: str) -> None:
    folder = shutil.copytree(nano_path(), tmp_path / "model")
    (folder / "another").mkdir()
    (folder / "another" / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    own = shutil.copytree(nano_drafter_path(method), folder / "trained")
    target = outpace.load(folder, "float32", "cpu").target
    chosen = usual(target)
    assert chosen.spec == f"combined:({DEFAULT_DRAFTER})+({method}:path={own})"
    exact(target, chosen, method)
    # One of another model is told, and not used.
    state = load_file(own / WEIGHTS)
    save_file({name: tensor[..., :-1].contiguous() for name, tensor in state.items()}, own / WEIGHTS)
    refused = usual(target)
    assert ("trained" not in refused.spec and f"{method}: " in refused.because) or str(own) in refused.because


def test_what_has_no_folder_has_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert usual(ToyTarget()).spec == DEFAULT_DRAFTER
        model = outpace.load(device="cpu").target.model
        model.name_or_path = model.config._name_or_path = "/no/such/folder"
        assert "mtp" not in usual(Target(model)).spec
    assert not caplog.records


@since("5.24")
@pytest.mark.parametrize("spec", ["mtp", "combined:(suffix)+(mtp)"])
def test_a_drafter_that_never_drafts_says_why_once(
    layered: Path, spec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(active, "_SEEN", 10)
    target = Target(load(layered))

    def told(drafter: str, policy: Any, params: SamplingParams = GREEDY) -> list[str]:
        tell.cache_clear()
        caplog.clear()
        engine = Engine(target, drafter, adaptive=policy)
        with caplog.at_level(logging.WARNING, "outpace.engine.slow"):
            for _ in range(2):
                engine.generate(PROMPTS, params)
        return [record.getMessage() for record in caplog.records]

    (why,) = told(spec, Pinned(0))
    assert why.startswith(
        "mtp is loaded and drafted nothing in 10 steps: its drafts cost more than they save"
    )
    assert not told(spec, False)
    assert not told("suffix", Pinned(0))  # has loaded nothing
    none = Speculation(num_speculative_tokens=0)
    asked = SamplingParams(max_new_tokens=24, ignore_eos=True, speculation=none)
    assert not told(spec, False, asked)
