"""EAGLE-3 in the layout of speculators: written, and read back by outpace."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleConfig
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace_lab.train.modules.eagle import TrainedEagle
from parts import in_turn

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=4))


@pytest.mark.parametrize(
    ("norms", "reduced", "own_head"),
    in_turn(
        ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"],
        itertools.product([0, 60], [True, False]),
    ),
)
def test_written_and_read_back(tmp_path: Path, norms: str, reduced: int, own_head: bool) -> None:
    config = EagleConfig(
        **{norms: True},
        layers=(1, 3),
        draft_vocabulary=reduced,
        own_head=own_head,
        heads=2,
        kv_heads=1,
        head_size=6,
        depth=2,
        eps=1e-4,
    )
    made = TrainedEagle.new(config, llama()).double()
    made.publish(tmp_path)
    again = TrainedEagle.load(tmp_path, llama())
    for name in (
        "layers",
        "depth",
        "heads",
        "kv_heads",
        "head_size",
        "eps",
        "steps",
        "rope",
        "draft_vocabulary",
        norms,
    ):
        assert getattr(again.config, name) == getattr(made.config, name), name
    own = made.state_dict()
    assert all(torch.equal(again.state_dict()[name], own[name]) for name in own)
    states = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(again.drafted_logits(states), made.drafted_logits(states))
    files = load_file(tmp_path / "model.safetensors")
    assert len(files["d2t"]) == (reduced or 97) and len(files["t2d"]) == 97
    found = [Engine(llama(), Eagle(one), adaptive=False).generate(PROMPTS, PARAMS) for one in (made, again)]
    assert [g.stats.accepted for g in found[0]] == [g.stats.accepted for g in found[1]]


def test_eagle_1_is_not_published_in_the_layout_of_eagle_3(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="EAGLE-3"):
        TrainedEagle.new(EagleConfig(version=1), llama()).publish(tmp_path)
