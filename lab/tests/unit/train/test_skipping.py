"""The search for layers to skip finds those that do nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from models import tiny_llama
from outpace.core import Generation, OutpaceError, SamplingParams, Stats, StoppedBy, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from outpace.testing import ToyTarget
from outpace_lab.train.skipping import SkippedLayers, _judge, find_skipped_layers

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def generation(tokens: int, steps: int, drafted: int) -> Generation:
    stats = Stats(steps=steps, tokens=tokens, drafted=drafted, seconds_verify=2.0)
    return Generation([1] * tokens, StoppedBy("limit"), 0, stats)


def test_a_set_is_judged_by_tokens_for_the_layers_that_ran() -> None:
    found = [generation(20, 6, 20), generation(10, 4, 12)]
    # 10 steps of all layers and 32 drafted tokens of 3 layers in 4.
    assert _judge(found, (1,), 4, "counts") == SkippedLayers((1,), 4, 30 / 34, 3.0, 1)
    assert _judge(found, (1,), 4, "seconds").speed == 15.0
    with pytest.raises(OutpaceError, match="nothing was decoded"):
        _judge([generation(0, 0, 0)], (1,), 4, "counts")


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OutpaceError, match=r"pip install .*lab\[search\]"):
        find_skipped_layers(ToyTarget(), PROMPTS)


@pytest.mark.slow
def test_layers_that_do_nothing_are_found(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    model = tiny_llama(vocabulary=40, layers=5)
    with torch.no_grad():
        for layer in (0, 2, 4):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    target = CausalTarget(model)
    seen: list[tuple[int, SkippedLayers | None]] = []
    found = find_skipped_layers(
        target, PROMPTS, PARAMS, trials=40, report=lambda number, best: seen.append((number, best))
    )
    assert found.skip == (0, 2, 4) and found.layers == 5
    assert found.mean_accepted_length > 3
    assert [number for number, _ in seen][-1] == 40 and seen[-1][1] == found
    speeds = [best.speed for _, best in seen if best is not None]
    assert len(speeds) == 40 and speeds == sorted(speeds)
    assert find_skipped_layers(target, PROMPTS, PARAMS, trials=8) == seen[7][1]
    file = tmp_path / "layers.json"
    found.save(file)
    (plain,) = Engine(target).generate(PROMPTS[:1], PARAMS)
    (fast,) = Engine(target, load_drafter(f"self_speculative:skip={file}"), adaptive=False).generate(
        PROMPTS[:1], PARAMS
    )
    assert fast.tokens == plain.tokens and fast.stats.accepted == fast.stats.drafted
    with pytest.raises(OutpaceError, match=r"must end in \.json"):
        found.save(tmp_path / "layers.txt")


def test_a_search_that_is_stopped_has_the_best_so_far() -> None:
    pytest.importorskip("optuna")
    target = CausalTarget(tiny_llama(vocabulary=40, layers=5))
    whole: list[SkippedLayers | None] = []
    find_skipped_layers(target, PROMPTS, PARAMS, trials=6, report=lambda number, best: whole.append(best))
    seen: list[SkippedLayers | None] = []
    asked = []

    def stop() -> bool:
        asked.append(len(seen))
        return asked.count(2) > 3  # in the middle of the third trial

    found = find_skipped_layers(
        target, PROMPTS, PARAMS, trials=6, report=lambda number, best: seen.append(best), stop=stop
    )
    assert seen == whole[:2] and found == whole[1]
    with pytest.raises(OutpaceError, match="no trial finished"):
        find_skipped_layers(target, PROMPTS, PARAMS, trials=6, stop=lambda: True)


def test_mistakes_are_named() -> None:
    pytest.importorskip("optuna")
    for prompts, options in (([], {}), (PROMPTS, {"trials": 0}), (PROMPTS, {"measure": "hours"})):
        with pytest.raises(OutpaceError, match="the search needs prompts"):
            find_skipped_layers(ToyTarget(), prompts, **options)  # type: ignore[arg-type]
    with pytest.raises(OutpaceError, match="a single layer"):
        find_skipped_layers(tiny_llama(layers=1), PROMPTS)

    class Flat(ToyTarget):
        some_layers = CausalTarget.__mro__[1].some_layers  # what a target does that cannot

    with pytest.raises(UnsupportedModel, match="plain stack"):
        find_skipped_layers(Flat(), PROMPTS)
