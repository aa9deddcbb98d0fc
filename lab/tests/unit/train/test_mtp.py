"""Prediction layers learn: from their checkpoint, on the target's own text, and back into its form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from learning import train as learn
from mtp_folders import FAMILIES, WEIGHTS, load, write
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.mtp.mtp import Mtp
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace_lab.train.data import Document
from outpace_lab.train.loop import Training, train
from outpace_lab.train.modules.mtp import MtpConfig, TrainedMtp
from outpace_lab.train.reading import read_batch
from parts import since

pytestmark = [since("5.24"), pytest.mark.filterwarnings("ignore::UserWarning")]

GREEDY = SamplingParams(max_new_tokens=32, ignore_eos=True)
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6, 11], [30, 12], [14, 15, 17, 19], [21, 8, 40]]


def answered(target: TargetModel) -> list[Document]:
    """Prompts with the target's own output."""
    found = Engine(target).generate(PROMPTS, GREEDY)
    return [Document((*p, *g.tokens), len(p)) for p, g in zip(PROMPTS, found, strict=True)]


def steps(target: TargetModel, path: Any = None) -> int:
    """Steps of all prompts with these layers; their tokens are those of plain decoding."""
    engine = Engine(target, Mtp(path=path), adaptive=False)
    found = engine.generate(PROMPTS, GREEDY)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, GREEDY)]
    return sum(g.stats.steps for g in found)


@pytest.mark.parametrize(("name", "layers"), [("glm4_moe", 1), ("qwen3_5_text", 1), ("deepseek_v3", 2)])
def test_the_loss_falls_and_more_is_accepted(tmp_path: Path, name: str, layers: int) -> None:
    folder = write(tmp_path / "model", name, layers, attention=4.0)
    target = Target(load(folder))
    batch = read_batch(target, [answered(target)], (-1,))
    torch.manual_seed(0)
    module = TrainedMtp.new(MtpConfig(), target)
    losses = learn(module, batch, 40, 3e-3)
    first, last = losses[0], losses[-1]
    assert len(first.loss) == (3 if layers == 1 else layers)
    assert (last.loss < first.loss * 0.7).all() and (last.acceptance > first.acceptance).all()
    module.save(tmp_path / "trained")
    before, after = steps(target), steps(target, tmp_path / "trained")
    assert after < before * 0.9
    # What training measures is what decoding does: as many tokens per step.
    assert steps(target, module.to(target.dtype).drafting_part) == after
    # The model's own weights are as they were, and so are those of its checkpoint.
    assert steps(target) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_written_as_they_were_published(tmp_path: Path, name: str) -> None:
    layers = 2 if name in ("glm4_moe", "mimo_v2_flash", "step3p7") else 1
    folder = write(tmp_path / "model", name, layers)
    target = Target(load(folder))
    TrainedMtp.new(MtpConfig(), target).save(tmp_path / "out")
    published, found = load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(published[label], tensor) for label, tensor in found.items())
    own = re.compile(r"^(model\.)?(language_model\.)?(model\.)?(mtp|layers\.[2-9])\.")
    shared = ("embed_tokens.weight", "shared_head.head.weight")  # once more, the model's own
    count = target.model.config.get_text_config().num_hidden_layers
    wanted = {
        label
        for label in published
        if own.match(label) and not label.endswith(shared) and f"layers.{count - 1}." not in label
    }
    assert found.keys() == wanted or (name == "mimo_v2_flash" and found.keys() <= wanted)
    assert steps(target, tmp_path / "out") == steps(target)


def test_a_part_of_the_vocabulary_is_learnt_and_found_again(tmp_path: Path) -> None:
    target = Target(load(write(tmp_path / "model", "glm4_moe")))
    texts = answered(target)
    module = TrainedMtp.new(MtpConfig(draft_vocabulary=20), target)
    settings = Training(steps=2, rows=2, evaluate_every=1, learning_rate=1e-3)
    train(module, [[text] for text in texts], [[texts[0]]], settings, tmp_path / "out")
    counts = torch.tensor([t for text in texts for t in text.tokens[text.prompt :]]).bincount(minlength=61)
    best = {*counts.argsort(descending=True, stable=True)[:20].tolist()}
    shared = Mtp(path=tmp_path / "out").prepare(target)
    assert {*shared.vocabulary.drafted(torch.zeros(1, 20))[1].tolist()} == best  # type: ignore[union-attr]
    assert steps(target, tmp_path / "out") > 0
    again = TrainedMtp.new(MtpConfig(path=str(tmp_path / "out")), target)
    assert {*again.drafted.ids.tolist()} == best
    described = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert described["method"] == "mtp" and described["config"]["draft_vocabulary"] == 20


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    target = Target(load(write(tmp_path / "model", "deepseek_v3", 2)))
    with pytest.raises(OutpaceError, match="tokens is at most 2, the number of layers, not 3"):
        TrainedMtp.new(MtpConfig(tokens=3), target)
    for options, message in (
        ({"decay": 0.0}, "decay must be above 0"),
        ({"tokens": -1}, "tokens must be at least 0"),
        ({"draft_vocabulary": -1}, "draft_vocabulary must be at least 0"),
    ):
        with pytest.raises(OutpaceError, match=message):
            MtpConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(OutpaceError, match="at most the target's vocabulary, 61, not 99"):
        TrainedMtp.new(MtpConfig(draft_vocabulary=99), target)
    out = tmp_path / "out"
    TrainedMtp.new(MtpConfig(), target).save(out)
    state = load_file(out / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in state.items()}, out / WEIGHTS)
    with pytest.raises(OutpaceError, match="is damaged: it is not what was written"):
        Mtp(path=out).prepare(target)
