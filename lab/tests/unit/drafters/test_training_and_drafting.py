"""A drafter learns at each place what it drafts from there: positions, masks, states.

The logits that the loss is given are compared with the distributions that drafts bring, at each root of texts
that were decoded with many rejections.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import tiny_llama
from mtp_folders import load, write
from outpace.core import SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashConfig
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleConfig
from outpace.drafters.heads.hydra import Hydra, HydraConfig
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.drafters.mtp.mtp import Mtp
from outpace.engine.engine import Engine
from outpace.policy.plan import DraftPlan, Outcome
from outpace.targets import Target, TargetModel
from outpace_lab.drafters.blockwise import Blockwise, BlockwiseConfig, BlockwiseHeads
from outpace_lab.drafters.layers.early_exit import EarlyExit
from outpace_lab.drafters.layers.exit_adapter import Adapter, AdapterConfig
from outpace_lab.drafters.parallel_tokens import LookAhead, LookAheadConfig, ParallelTokens
from outpace_lab.drafters.spec_drafter import SpecDrafter, SpecDrafterConfig, SpecDrafterModule
from outpace_lab.train.data import Document
from outpace_lab.train.modules.blocks import TrainedDFlash
from outpace_lab.train.modules.eagle import TrainedEagle
from outpace_lab.train.modules.heads import TrainedHydra, TrainedMedusa
from outpace_lab.train.modules.mtp import MtpConfig, TrainedMtp
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained, TrainingBatch
from watching import Watch

# With few tokens the drafts of random weights are accepted now and then.
TARGET = Target(tiny_llama(vocabulary=12))
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
ROW = 1000  # a place's number is this times its row, and the place in the row


@dataclass(frozen=True)
class Kind:
    """Attributes:
    alone: what it says of a depth does not depend on the tokens drafted before it.
    once: it looks ahead from roots only, and what a step accepts is missing from the next draft.
    anywhere: what it says behind a place is the same wherever the draft began, and is learnt once.
    family: of the target that brings prediction layers, and their number.
    """

    module: type[Trained]
    config: Any
    drafter: Callable[[Trained], Drafter[Any]]
    alone: bool = True
    once: bool = False
    anywhere: bool = False
    family: tuple[str, int] | None = None

    @property
    def target(self) -> TargetModel:
        return TARGET if self.family is None else _bringing(*self.family)


@lru_cache
def _bringing(family: str, layers: int) -> TargetModel:
    """A target whose checkpoint has prediction layers."""
    return Target(load(write(Path(tempfile.mkdtemp()), family, layers)).double())


def _layers(*family: Any) -> Kind:
    return Kind(TrainedMtp, MtpConfig(), lambda made: Mtp(made.drafting_part), alone=False, family=family)


EXIT: dict[str, Any] = {"num_speculative_tokens": 3, "min_confidence": 0.0}
KINDS = {
    "blockwise": Kind(BlockwiseHeads, BlockwiseConfig(heads=3), Blockwise),
    "medusa": Kind(TrainedMedusa, MedusaConfig(heads=3), lambda made: Medusa(made, max_nodes=9)),
    "hydra": Kind(TrainedHydra, HydraConfig(heads=3), lambda made: Hydra(made, max_nodes=9), alone=False),
    "eagle 1": Kind(TrainedEagle, EagleConfig(version=1, steps=2), Eagle, alone=False),
    "eagle 3": Kind(TrainedEagle, EagleConfig(layers=(2, 1), depth=2, steps=4), Eagle, alone=False),
    "early_exit": Kind(Adapter, AdapterConfig(1, **EXIT), EarlyExit, alone=False, anywhere=True),
    "early_exit, attention": Kind(
        Adapter, AdapterConfig(1, "attention", **EXIT), EarlyExit, alone=False, anywhere=True
    ),
    "spec_drafter": Kind(SpecDrafterModule, SpecDrafterConfig(tokens=4, hidden_size=24), SpecDrafter),
    "dflash": Kind(TrainedDFlash, DFlashConfig(tokens=4, layers=(2, 1)), DFlash),
    "mtp": _layers("qwen3_5_text", 1),
    "mtp, a window": _layers("step3p7", 1),
    "mtp, several layers": _layers("step3p7", 2),
    "mtp, layers that read the target's state": _layers("mimo_v2_flash", 2),
    "parallel_tokens": Kind(
        LookAhead, LookAheadConfig(3, places=64), lambda made: ParallelTokens(made, 3, "all")
    ),
    "parallel_tokens behind the root": Kind(
        LookAhead, LookAheadConfig(3, places=64), lambda made: ParallelTokens(made, 3, "root"), once=True
    ),
}


def module(kind: Kind) -> Trained:
    """A module with weights large enough to affect its predictions."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = kind.module.new(kind.config, kind.target).double()
        with torch.no_grad():
            for weight in made.parameters() if kind.family is None else ():
                weight.add_(torch.randn_like(weight) / 4)
    return made


def learnt_from(made: Trained, batch: TrainingBatch) -> list[dict[int, tuple[Tensor, int]]]:
    """By depth, and by the number of the place whose next token it is: the draft's logits, and the label."""
    found: list[dict[int, tuple[Tensor, int]]] = []

    def record(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        numbers = target[:, 0].long().tolist()
        found.append(dict(zip(numbers, zip(draft.detach(), labels.tolist(), strict=True), strict=True)))
        return draft.sum(dim=-1)

    rows, width = batch.tokens.shape
    numbers = ROW * torch.arange(rows)[:, None] + torch.arange(width)
    logits = numbers[..., None].double().expand(-1, -1, made.target.vocabulary)
    with torch.random.fork_rng():
        made.loss(replace(batch, scores=logits), record)
    return found


@dataclass(frozen=True)
class Now:
    """A policy that drafts in some steps only."""

    nodes: Iterator[int]
    timed: bool = False

    def plan(self, batch: int) -> DraftPlan:
        return DraftPlan(next(self.nodes))

    def learn(self, outcome: Outcome) -> None: ...


def compare(kind: Kind, policy: bool | Now = False) -> list[int]:
    """Decode, and compare each draft with what is learnt at its root; how many distributions, by depth."""
    made = module(kind)
    watch = Watch()
    engine = Engine(kind.target, kind.drafter(made), "rejection", observer=watch, adaptive=policy)
    sequences = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    while engine.sequences:
        engine.step()
    # The texts lie behind others, of other lengths, and there is padding behind one of them.
    before = [Document(tuple(range(1, 9))), Document((4, 4)), Document((8, 3, 1))]
    texts = [Document(tuple(s.tokens), s.prompt_length) for s in sequences]
    batch = read_batch(
        kind.target, [list(pair) for pair in zip(before, texts, strict=True)], made.hidden_layers
    )
    learnt = learnt_from(made, batch)
    compared = [0] * (made.config.num_speculative_tokens if kind.anywhere else len(learnt))
    missing = [0] * len(sequences)
    for step in watch.steps:
        row = sequences.index(step.sequence)
        root = step.sequence.prompt_length + step.root - 1
        for node, p in (step.draft.distributions or {}).items():
            if not (kind.alone or node in (-1, *step.path)):
                continue
            depth = step.depths[node] + 1 if node >= 0 else 0
            place = root + depth
            of_depth = learnt[0 if kind.anywhere else missing[row] + depth]
            logits, label = of_depth[ROW * row + len(before[row].tokens) + place]
            torch.testing.assert_close(logits.double().softmax(dim=-1), p, rtol=0, atol=1e-6)
            assert label == step.sequence.tokens[place + 1]
            compared[missing[row] + depth] += 1
        missing[row] = len(step.path) if kind.once and step.draft.riders else 0
    return compared


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_sees_what_drafting_sees(name: str) -> None:
    compared = compare(KINDS[name])
    assert min(compared) > 3, compared


@pytest.mark.parametrize("name", KINDS)
def test_steps_without_a_draft_leave_nothing_out(name: str) -> None:
    compared = compare(KINDS[name], Now(cycle((64, 0, 0, 0, 64, 64))))
    assert min(compared[:2]) > 3, compared


@pytest.mark.parametrize("name", ["eagle 1", "eagle 3", "early_exit, attention", "spec_drafter", "dflash"])
def test_a_text_read_in_pieces_is_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (sys.modules[cls.__module__] for cls in KINDS[name].drafter.__mro__)
    monkeypatch.setattr(next(module for module in modules if hasattr(module, "_CHUNK")), "_CHUNK", 3)
    compared = compare(KINDS[name], Now(cycle((64, 0, 0, 0, 0, 64))))
    assert min(compared[:2]) > 3, compared
