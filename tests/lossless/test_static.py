"""Forwards of fixed shapes, replayed on the same tensors, give the tokens of plain decoding.

On the CPU operations are recorded and played again, on a GPU they are CUDA graphs; the tests are the same.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from devices import CUDA, DEVICES
from models import tiny_llama
from outpace.cache import Slot
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.gpu.graphs import CudaGraphs, Eager, Made, Runner
from outpace.targets.inputs.changes import Structure
from parts import in_turn
from replay import HostRead, Replay
from zoo.families import BY_KIND, FAMILIES

PROMPTS = [[3, 9, 2, 7, 3, 9, 2], [5], [1, 2, 3, 1, 2, 3, 1], [8, 8, 4]]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.95, seed=3, ignore_eos=True),
    "penalties": SamplingParams(max_new_tokens=16, repetition_penalty=1.2, presence_penalty=0.5),
}


class Counted(CudaGraphs):
    """Graphs that count their captures."""

    captures = 0

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        self.captures += 1
        return super().capture(forward)


def runner_of(device: str) -> Any:
    return Replay() if device == "cpu" else Counted(torch.device(device, 0))


def llama(device: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    place = torch.device(device, 0) if device == "cuda" else device
    return tiny_llama(vocabulary=32, layers=3, seed=seed, dtype=dtype).to(place)


def fixed(device: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> CausalTarget:
    return CausalTarget(
        llama(device, seed, dtype), static=True, runner=runner_of(device), check=device != "cpu"
    )


DRAFTERS: dict[str, Callable[[str], Any]] = {
    "none": lambda _: "none",
    "jacobi": lambda _: "jacobi",
    "lookahead": lambda _: "lookahead:window=4,ngram=3,guesses=4",
    "suffix": lambda _: "suffix",
    "draft_model": lambda device: DraftModel(CausalTarget(llama(device, 1), check=False), 3),
}


def run(engine: Engine, params: SamplingParams) -> list[list[int]]:
    """Two sequences, a third and a fourth that join later; one is removed and comes back as another."""
    sequences = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.step()
    sequences.append(engine.add(PROMPTS[2], params))
    gone = engine.add(PROMPTS[3], params)
    engine.step()
    engine.step()
    engine.remove(gone)
    engine.step()
    sequences.append(engine.add(PROMPTS[3], params))
    while engine.sequences:
        engine.step()
    return [sequence.output for sequence in sequences]


def alone(model: Any, params: SamplingParams) -> list[list[int]]:
    engine = Engine(model)
    return [engine.generate([prompt], params)[0].tokens for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [*((name, "sampled") for name in DRAFTERS), ("lookahead", "greedy"), ("lookahead", "penalties")],
)
def test_tokens_are_those_of_plain_decoding(drafter: str, sampling: str, device: str) -> None:
    params = SAMPLINGS[sampling]
    expected = alone(CausalTarget(llama(device), check=False), params)
    target = fixed(device)
    engine = Engine(target, DRAFTERS[drafter](device), slots=4, length=64, adaptive=False, prefill_chunk=4)
    assert run(engine, params) == expected
    assert runner_of_target(target).captures > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("branching", "verifier"), in_turn(["1", "2x2"], ["match", "rejection"]))
def test_a_draft_model_of_fixed_shapes(branching: str, verifier: str, device: str) -> None:
    """Trees that go into the draft model in several forwards; what it drafts is what it drafts otherwise."""
    params = replace(SAMPLINGS["sampled"], max_new_tokens=12)
    plain, found = [], []
    for make, answers in (
        (lambda: CausalTarget(llama(device, 1), check=False), plain),
        (lambda: fixed(device, 1), found),
    ):
        drafter = DraftModel(make(), 2, branching=branching)
        engine = Engine(llama(device), drafter, verifier, adaptive=False)
        for prompt in PROMPTS[:2]:
            (one,) = engine.generate([prompt], params)
            answers.append((one.tokens, one.stats.accepted, one.stats.drafted))
    assert found == plain


def test_a_draft_models_fixed_shapes_grow() -> None:
    """By slots, by the texts, and in the middle of a draft: 255 tokens and a draft are more than 256 rows."""
    model, draft = (tiny_llama(vocabulary=32, context=1024, seed=seed) for seed in range(2))
    prompts = [[1 + number % 31 for number in range(size)] for size in (254, 600, 3)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    found = []
    for static in (False, True):
        drafter = DraftModel(CausalTarget(draft, static=static, check=False), 4)
        engine = Engine(CausalTarget(model, check=False), drafter, adaptive=False)
        found.append(
            [(one.tokens, one.stats.accepted, one.stats.drafted) for one in engine.generate(prompts, params)]
        )
    assert found[1] == found[0]


@pytest.mark.parametrize("name", BY_KIND)
def test_families(name: str) -> None:
    """Windows, soft caps, sinks, experts: what a family does in a forward is the same when it is replayed."""
    model, params = FAMILIES[name].build(), SamplingParams(max_new_tokens=10, ignore_eos=True)
    prompts = [[5, 9, 2, 7, 7, 1, 30, 4, 11, 12, 7, 7], [3, 7]]
    expected = [one.tokens for one in Engine(CausalTarget(model, check=False)).generate(prompts, params)]
    runner = Replay()
    target = CausalTarget(model, static=True, runner=runner, check=False)
    engine = Engine(target, "lookahead:window=3,ngram=3,guesses=2", slots=2, length=64, adaptive=False)
    assert [one.tokens for one in engine.generate(prompts, params)] == expected
    assert runner.replays > runner.captures


def runner_of_target(target: CausalTarget) -> Any:
    return target._fixed.runner


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16(device: str) -> None:
    """Rows of a wide forward round otherwise, so near-ties may flip: where tokens differ, it must be one."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    target = fixed(device, dtype=torch.bfloat16)
    engines = [
        Engine(target, drafter, slots=4, length=64, adaptive=False)
        for drafter in ("none", "lookahead:window=4,ngram=3,guesses=4")
    ]
    plain, drafted = ([one.tokens for one in engine.generate(PROMPTS, params)] for engine in engines)
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        if one != other:
            place = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            text = torch.tensor([prompt + one[:place]], device=target.device)
            logits = target.model(input_ids=text).logits[0, -1].float()
            margin = float((logits[one[place]] - logits[other[place]]).abs())
            spread = float(logits.std())
            print(f"flipped at output token {place}, margin {margin:.3g} at a spread of {spread:.3g}")
            assert margin < 0.05 * spread


@pytest.mark.parametrize("device", [CUDA])
def test_a_greedy_step_waits_for_the_device_once(device: str) -> None:
    """Uploads are not waited for; the tokens found are the one thing that comes back."""
    engine = Engine(fixed(device), "prompt_lookup", slots=1, length=64, adaptive=False)
    engine.generate([PROMPTS[0]], SAMPLINGS["greedy"])  # captures
    engine.add(PROMPTS[0], SAMPLINGS["greedy"])
    engine.step()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(4):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 4, [str(wait.message) for wait in waits]


# -- captures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_one_capture_for_each_shape(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the shapes were met, other prompts, batches, trees and lengths capture nothing."""
    monkeypatch.setattr("outpace.cache.static._LEAST_COLUMNS", 32)
    target = fixed(device)
    engine = Engine(target, "lookahead:window=4,ngram=3,guesses=4", slots=4, length=64, adaptive=False)
    run(engine, SAMPLINGS["greedy"])
    (known,) = target._fixed.known.values()
    # Slots, width, columns, nodes: each a power of two, or all that there is.
    assert {shape[:4] for shape in known} <= {
        (slots, width, columns, width)
        for slots in (1, 2, 4)
        for width in (1, 2, 4, 8, 16, 32)
        for columns in (32, 64)
    }
    assert runner_of_target(target).captures == len(known) > 5
    run(engine, SAMPLINGS["sampled"])
    run(engine, SAMPLINGS["greedy"])
    assert runner_of_target(target).captures == len(known)


def test_plain_decoding_has_one_shape() -> None:
    target = fixed("cpu")
    engine = Engine(target, slots=1, length=64, prefill_chunk=1)
    for prompt in PROMPTS:
        engine.generate([prompt[-1:]], SAMPLINGS["greedy"])
    (known,) = target._fixed.known.values()
    assert list(known) == [(1, 1, 64, 1, (), False, False)]
    assert runner_of_target(target).captures == 1


def test_wide_forwards_are_as_wide_as_they_must_be() -> None:
    """Chunks of prompts, and batches whose rows are too many for a graph to pay."""
    target = fixed("cpu")
    cache = target.new_cache(8, 300)
    slots: list[Slot] = []
    for widths, shapes in (([129], 0), ([128], 1), ([1] * 7 + [65], 1), ([1] * 7 + [64], 2)):
        slots += [cache.allocate() for _ in range(len(widths) - len(slots))]
        target.forward(
            cache, Batch.of({slot: [1] * width for slot, width in zip(slots, widths, strict=True)})
        )
        cache.keep({})
        assert runner_of_target(target).captures == shapes
    target.forward(cache, Batch.of({slots[0]: [1]}, None))
    assert runner_of_target(target).captures == 2


def test_what_is_kept_goes_with_the_cache() -> None:
    target = fixed("cpu")
    cache = target.new_cache(1, 32)
    target.forward(cache, Batch.of({cache.allocate(): [1, 2]}))
    ((captured,),) = (shapes.values() for shapes in target._fixed.known.values())
    gone = weakref.ref(captured.inputs)
    gc.disable()
    try:
        del cache, captured
        assert gone() is None and not target._fixed.known
    finally:
        gc.enable()


def test_options_of_fixed_shapes_need_them() -> None:
    with pytest.raises(OutpaceError, match="static=True"):
        CausalTarget(llama("cpu"), runner=Eager())


# -- the host -----------------------------------------------------------------------------------------------


class NoUploads(TorchDispatchMode):
    """Refuses to bring tensors from the host to the device, which a graph cannot capture; numbers may go."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        to = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if to and any(not leaf.is_meta and leaf.dim() for leaf in given):
            raise HostRead(f"{func} brings a tensor from the host")
        return result


class OnTheDevice(Runner):
    """Runs forwards as they are, without uploads."""

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        def run() -> Made:
            with NoUploads():
                return forward()

        return run


def on_meta(name: str) -> CausalTarget:
    """A target whose tensors contain no data, so that reading one raises."""
    target = CausalTarget(FAMILIES[name].build(), static=True, runner=OnTheDevice(), check=False)
    target.model.to("meta")
    target.device = torch.device("meta")
    target._modules.structure, target._addresses = Structure(target.model), None  # as if made there
    target._modules.shapes = [
        replace(
            layer,
            keys=replace(layer.keys, device=target.device),
            values=replace(layer.values, device=target.device),
        )
        for layer in target._modules.shapes
    ]
    return target


@pytest.mark.parametrize("name", BY_KIND)
def test_nothing_is_read_on_the_host(name: str) -> None:
    target = on_meta(name)
    cache = target.new_cache(2, 32)
    slots = [cache.allocate(), cache.allocate()]
    output = target.forward(cache, Batch.of({slots[0]: Rows([1, 2, 3], [-1, 0, 0]), slots[1]: [4]}), [1])
    assert output.logits is not None and output.logits.shape[0] == 4


def test_an_upload_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_meta("llama")
    cache = target.new_cache(1, 32)
    monkeypatch.setattr(
        target._modules.masks, "tree_mask", lambda trees, _: torch.ones(1, 1, 1, 32).to(trees.base.device)
    )
    with pytest.raises(HostRead):
        target.forward(cache, Batch.of({cache.allocate(): [1]}))


def test_a_read_on_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = CausalTarget._compute_fixed

    def reads(target: Any, modules: Any, inputs: Any, hidden_layers: Any) -> Made:
        """Decide on the host how far the mask reaches."""
        if int(inputs.numbers[:, 0].max()) > 5:
            inputs.numbers[:, 0] += 1
        return compute(target, modules, inputs, hidden_layers)

    monkeypatch.setattr(CausalTarget, "_compute_fixed", reads)
    target = CausalTarget(llama("cpu"), static=True, runner=Replay(), check=False)
    cache = target.new_cache(1, 32)
    with pytest.raises(HostRead):
        target.forward(cache, Batch.of({cache.allocate(): [1]}))
