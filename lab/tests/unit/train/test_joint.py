"""A drafter and its target trained together: the tuned one decodes exactly, the original is unchanged."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleConfig
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace.targets.batch import Batch
from outpace.targets.weights.adapters import base_of, merge
from outpace.testing import ToyTarget
from outpace_lab.drafters.layers.early_exit import EarlyExit
from outpace_lab.drafters.layers.exit_adapter import Adapter, AdapterConfig
from outpace_lab.drafters.parallel_tokens import LookAhead, LookAheadConfig
from outpace_lab.train.data import Document
from outpace_lab.train.joint import TARGET, Joint
from outpace_lab.train.loop import Training, train
from outpace_lab.train.lora import LoRA
from outpace_lab.train.metric import Replay
from outpace_lab.train.modules.eagle import TrainedEagle
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained
from parts import in_turn

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6], [8, 8, 3]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
OPTIONS = LoRA(rank=4, weight=0.5, rate=1.0, layers="1")
SETTINGS = Training(steps=16, rows=4, evaluate_every=4, learning_rate=0.02)
DRAFTERS: dict[str, Any] = {"medusa": Medusa, "eagle": Eagle, "early_exit": EarlyExit}


def decode(target: TargetModel, params: SamplingParams, drafter: Drafter[Any] | None = None) -> list[Any]:
    return Engine(target, drafter, adaptive=False).generate(PROMPTS, params)


def tokens(target: TargetModel, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [found.tokens for found in decode(target, params)]


def rows_of(target: TargetModel) -> list[list[Document]]:
    """The target's own answers, a row each."""
    answers = zip(PROMPTS, tokens(target), strict=True)
    return [[Document((*prompt, *answer), len(prompt))] for prompt, answer in answers]


def module(method: str, target: TargetModel) -> Trained:
    if method == "eagle":
        return TrainedEagle.new(EagleConfig(version=1, steps=2), target)
    if method == "early_exit":
        return Adapter.new(AdapterConfig(layers=1, min_confidence=0.0), target)
    return TrainedMedusa.new(MedusaConfig(heads=2, max_nodes=6), target)


def joint(method: str = "medusa", options: LoRA = OPTIONS) -> Joint:
    pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Target(tiny_llama())
        return Joint(module(method, target).double(), options)


def learn(
    made: Joint, out: Path, stop: int | None = None, log: list[Any] | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Train on the target's answers; the weights at the end. Interrupted after the step ``stop``."""
    rows = rows_of(made.target)

    def report(entry: Mapping[str, Any]) -> None:
        if log is not None:
            log.append(entry)
        if entry["step"] == stop and "loss" in entry:
            raise KeyboardInterrupt

    train(made, rows, rows[:2], replace(SETTINGS, **changes), out, report, calibration=rows[2:])
    return {name: weight.clone() for name, weight in made.state_dict().items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each method, with a tuned target in it."""
    found = {}
    for method in DRAFTERS:
        found[method] = tmp_path_factory.mktemp(method)
        learn(joint(method), found[method])
    return found


@pytest.mark.parametrize(("method", "params"), in_turn(DRAFTERS, [GREEDY, SAMPLED]))
def test_the_tuned_target_decodes_as_it_does_plainly(
    method: str, params: SamplingParams, folders: dict[str, Path]
) -> None:
    folder = folders[method]
    tuned = Target(merge(tiny_llama(), folder / TARGET))
    found = decode(tuned, params, DRAFTERS[method](str(folder)))
    assert [g.tokens for g in found] == tokens(tuned, params)
    assert sum(g.stats.accepted for g in found) > 10
    assert tokens(tuned, params) != tokens(Target(tiny_llama()), params)


def test_training_reads_the_tuned_target_as_decoding_does(tmp_path: Path) -> None:
    """The figure on held-out text is the acceptance of decoding with the merged weights."""
    made = joint()
    learn(made, tmp_path, evaluate_every=SETTINGS.steps)  # so that the last weights are those kept
    tuned = Target(merge(tiny_llama(), tmp_path / TARGET))
    rows = [[document for row in rows_of(tuned) for document in row]]
    made.eval()
    batch = read_batch(made.target, rows, ())
    heard, _ = made._heard(batch)
    expected = read_batch(tuned, rows, (-1,))
    assert torch.allclose(heard.logits, expected.logits, atol=1e-9)
    assert torch.allclose(heard.hidden[-1], expected.hidden[-1], atol=1e-9)
    assert not torch.allclose(heard.logits, batch.logits, atol=1e-2)
    replay = Replay()
    replay.add(read_batch(made.target, rows, ()), made.accepted(batch))
    stats = [g.stats for g in decode(tuned, GREEDY, Medusa(str(tmp_path)))]
    assert replay.steps == sum(s.steps for s in stats)
    assert replay.tokens == sum(s.tokens for s in stats)


def test_the_target_itself_stays_as_it_was(tmp_path: Path) -> None:
    made = joint()
    learn(made, tmp_path)
    assert tokens(made.target) == tokens(Target(tiny_llama()))
    bare = dict(tiny_llama().named_parameters())
    for name, weight in made.target.model.named_parameters():  # type: ignore[attr-defined]
        if "lora_" not in name:
            assert torch.equal(weight, bare[name.replace(".base_layer", "")])


def test_heads_learn_alone_at_first(tmp_path: Path) -> None:
    made, log = joint(), []
    before = {name: weight.clone() for name, weight in made.state_dict().items()}
    learn(made, tmp_path, log=log)
    measured = [entry for entry in log if "target_agreement" in entry and entry["step"]]
    assert [entry["step"] for entry in measured] == [4, 8, 12, 16]
    # A quarter of the steps is the warm-up.
    assert (measured[0]["target_loss"], measured[0]["target_agreement"]) == (0.0, 1.0)
    first = next(entry for entry in log if "loss" in entry)
    assert measured[0]["held_out_loss"] < first["loss"]
    assert all(entry["target_loss"] > 0 for entry in measured[1:])
    changed = {n for n, weight in made.state_dict().items() if not torch.equal(weight, before[n])}
    assert changed >= {f"updates.{place}" for place in range(len(made.updates))}
    assert all(name.split(".")[2:4] == ["layers", "1"] or ".1." in name for name in made.weights)


def test_its_own_loss_keeps_a_target_near_what_it_was(tmp_path: Path) -> None:
    moved = []
    for place, weight in enumerate((0.0, 50.0)):
        log: list[Any] = []
        learn(joint(options=replace(OPTIONS, weight=weight)), tmp_path / str(place), log=log)
        moved.append(log[-1]["target_loss"])
    assert moved[1] < moved[0] / 4


def test_the_target_learns_at_its_own_rate(tmp_path: Path) -> None:
    sizes = []
    for place, rate in enumerate((1.0, 0.1)):
        made = joint(options=replace(OPTIONS, rate=rate, warmup=0.0))
        learn(made, tmp_path / str(place), steps=4)
        sizes.append(sum(float(w.detach().abs().sum()) for n, w in made.weights.items() if "lora_B" in n))
    assert sizes[1] == pytest.approx(sizes[0] / 10, rel=0.3)


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = learn(joint(), tmp_path / "whole")
    for stop in (3, 10):
        with pytest.raises(KeyboardInterrupt):
            learn(joint(), tmp_path / "parts", stop)
    parts = learn(joint(), tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(OutpaceError, match="other config"):
        learn(joint(options=replace(OPTIONS, alpha=3.0)), tmp_path / "parts")


def test_the_folder_is_one_of_pefts(folders: dict[str, Path]) -> None:
    peft = pytest.importorskip("peft")
    folder = folders["medusa"] / TARGET
    live = peft.PeftModel.from_pretrained(tiny_llama(), folder).eval()
    merged = Target(merge(tiny_llama(), folder))
    cache = merged.new_cache()
    slot = cache.allocate()
    logits = merged.forward(cache, Batch.of({slot: [3, 9, 2, 7]})).logits_of(slot)
    assert torch.allclose(live(torch.tensor([[3, 9, 2, 7]])).logits[0], logits, atol=1e-9)


def test_a_tensor_that_does_not_fit_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["medusa"] / TARGET
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    held = load_file(source / "adapter_model.safetensors")
    first = min(held)
    cases = {
        "missing": {name: tensor for name, tensor in held.items() if name != first},
        "left over": held | {first.replace("layers.1", "layers.7"): torch.zeros(2)},
        "shape": held | {first: held[first][:1].contiguous()},
    }
    for tensors in cases.values():
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(OutpaceError, match=r"does not fit LlamaForCausalLM.*(lora_A|layers\.7)"):
            merge(tiny_llama(), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(OutpaceError, match="cannot be read"):
        merge(tiny_llama(), tmp_path)
    facts = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": None}))
    with pytest.raises(OutpaceError, match="does not name its model"):
        base_of(tmp_path)
    with pytest.raises(OutpaceError, match="cannot read"):
        base_of(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"warmup": 1.0}, r"warmup in \[0, 1\)"),
        ({"weight": -1.0}, "weight must be at least 0"),
        ({"layers": "1+5"}, r"no linear modules in layers \[5\]"),
        ({"layers": "one"}, "lora: layers must be numbers"),
        ({"objective": "luck"}, "there is no objective 'luck'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OutpaceError, match=match):
        joint(options=LoRA(**options))


def test_what_cannot_be_trained_together_is_refused() -> None:
    made = joint()
    with pytest.raises(OutpaceError, match="this model contains low-rank updates already"):
        Joint(module("medusa", made.target), OPTIONS)
    with pytest.raises(OutpaceError, match="parallel_tokens reads no hidden states"):
        Joint(LookAhead.new(LookAheadConfig(), Target(tiny_llama())), OPTIONS)
    with pytest.raises(OutpaceError, match="a ToyTarget cannot be trained"):
        Joint(module("medusa", ToyTarget()), OPTIONS)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_llama())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OutpaceError, match=r"pip install .*\[lora\]"):
        Joint(module("medusa", target), OPTIONS)
    with pytest.raises(OutpaceError, match=r"pip install .*\[lora\]"):
        merge(tiny_llama(), "nowhere")
