"""``static="auto"``: on one CUDA device steps are graphs, over a cache that grows. The device is emulated."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import Accelerator
from lossless.conftest import embedded, lab_on
from lossless.test_matrix import SPECS as DRAFTERS
from lossless.trained import with_trained
from models import tiny_llama
from outpace.cache import FixedCache, KVCache, StaticCache
from outpace.cache.lanes import Lane
from outpace.core import OutpaceError, SamplingParams, TargetOptions
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine import scheduler
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from outpace.targets.gpu.fixed import resolved
from outpace.targets.gpu.graphs import NotCaptured
from parts import first, in_turn
from unit.learned import test_formats as formats

PROMPTS = [[3, 9, 2, 7, 3, 9, 2], [5, 6], [1, 2, 3, 1, 2, 3, 1]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@lru_cache
def _made(seed: int) -> Any:
    return tiny_llama(vocabulary=32, layers=2, seed=seed, dtype=torch.float64, context=512)


def model(seed: int = 0) -> Any:
    return copy.deepcopy(_made(seed))


@pytest.fixture(scope="module")
def cuda() -> Accelerator:
    for seed in range(2):  # random numbers ask a device for its generator
        model(seed)
    return Accelerator("cuda")


@pytest.fixture
def target(cuda: Accelerator) -> Iterator[CausalTarget]:
    with cuda:
        yield CausalTarget(model().to("cuda:0"), check=False)


def tokens(engine: Engine, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [one.tokens for one in engine.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens(Engine(CausalTarget(model(), check=False)))


def captured(target: CausalTarget) -> int:
    assert target._fixed is not None
    return sum(len(shapes) for shapes in target._fixed.known.values())


def test_a_plain_step_is_one_graph(target: CausalTarget, cuda: Accelerator) -> None:
    engine = Engine(target)
    engine.warm()
    cuda.counts.clear()
    sequence = engine.add(PROMPTS[0], PARAMS)
    engine.step()
    cuda.counts.clear()
    engine.step()
    counts = cuda.counts.per(1)
    assert counts["launches"] <= 10 and counts["replays"] == counts["reads"] == 1, cuda.counts
    assert not counts["blocking"]
    engine.remove(sequence)


def test_the_first_request_captures_nothing(target: CausalTarget, plain: list[list[int]]) -> None:
    drafts = CausalTarget(model(1).to("cuda:0"), check=False)
    engine = Engine(target, DraftModel(drafts, 3), adaptive=False, slots=4)
    engine.warm()
    before = captured(target), captured(drafts)
    # Widths of 1, 2 and 4 and more, and greedy and sampled drafts, for 1, 2 and 4 sequences.
    assert before[0] >= 9 and before[1] == 6
    assert tokens(engine) == plain
    assert (captured(target), captured(drafts)) == before


class Watch:
    """Keeps every step's draft, and what was accepted of it."""

    hidden_layers, timed = (), False

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def joined(self, *args: Any) -> None: ...
    def left(self, *args: Any) -> None: ...

    def stepped(self, steps: Any) -> None:
        for step in steps:
            tokens, parents = list(step.draft.tokens), list(step.draft.parents)
            self.seen.append((tokens, parents, list(step.path), step.tokens))


SAMPLINGS = {
    "greedy": PARAMS,
    "sampled": SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3),
    "cut": SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.2, top_k=9, top_p=0.9, seed=4),
    "penalties": SamplingParams(
        max_new_tokens=12, ignore_eos=True, temperature=0.9, repetition_penalty=1.5, seed=6
    ),
    "stops": SamplingParams(max_new_tokens=12, stop_token_ids=[1, 2, 3, 4, 5, 6], temperature=1.5, seed=5),
}


@pytest.mark.parametrize(("sampling", "verifier"), in_turn(SAMPLINGS, ["rejection", "match"]))
def test_chains_on_the_device_are_those_of_the_host(cuda: Accelerator, sampling: str, verifier: str) -> None:
    """Sequences of several lengths, which end one after another."""
    params = [replace(SAMPLINGS[sampling], max_new_tokens=most) for most in (12, 5, 9)]

    def drafted(target: CausalTarget, draft: CausalTarget) -> list[Any]:
        watch: Any = Watch()
        drafter = DraftModel(draft, 4)
        Engine(target, drafter, verifier, adaptive=False, slots=3, observer=watch).generate(PROMPTS, params)
        return watch.seen

    expected = drafted(*(CausalTarget(model(seed), check=False) for seed in range(2)))
    with cuda:
        targets = [CausalTarget(model(seed).to("cuda:0"), check=False) for seed in range(2)]
        assert drafted(*targets) == expected
        assert any(path for *_, path, _ in expected)


def drafts_of(prompts: list[list[int]], target: Any, draft: Any) -> list[Any]:
    """The drafts of a draft model for texts that are decoded together, and what was accepted of each."""
    watch: Any = Watch()
    Engine(target, DraftModel(draft, 3), adaptive=False, slots=4, observer=watch).generate(prompts, PARAMS)
    return watch.seen


def test_drafts_for_texts_in_several_lanes(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane of the draft model's cache has a graph of its own."""
    prompts = [[3, 9, 2], [5, 6, 1] * 60, [7, 2, 4] * 60, [8, 1]]
    expected = drafts_of(prompts, *(CausalTarget(model(seed), check=False) for seed in range(2)))
    monkeypatch.setattr(FixedCache, "_least_room", 8)
    monkeypatch.setattr(CausalTarget.new_cache, "__defaults__", (1, 8, None))
    with cuda:
        targets = [CausalTarget(model(seed).to("cuda:0"), check=False) for seed in range(2)]
        assert drafts_of(prompts, *targets) == expected
        assert len(targets[1]._fixed.known) > 1


def test_drafts_that_cannot_be_captured_are_launched(
    cuda: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = drafts_of(PROMPTS, *(CausalTarget(model(seed), check=False) for seed in range(2)))

    def fails(forward: Any) -> Any:
        raise NotCaptured("not permitted")

    with cuda, caplog.at_level(logging.WARNING):
        targets = [CausalTarget(model(seed).to("cuda:0"), check=False) for seed in range(2)]
        monkeypatch.setattr(targets[1]._fixed.runner, "capture", fails)
        assert drafts_of(PROMPTS, *targets) == expected
    assert [record.message for record in caplog.records] == [
        "forwards on this GPU are launched one kernel at a time: not permitted"
    ]


# Trees by confidence, static trees, blocks; others are slow.
LEARNED = [("eagle, trees", "greedy"), ("medusa", "sampled"), ("dflash, trees", "sampled")]
OTHERS = [
    *product(("eagle", "mtp", "dflash"), ("greedy", "cut")),
    *product(
        ("eagle, trees", "mtp, trees", "medusa", "hydra", "hydra, by confidence", "dflash, trees"), SAMPLINGS
    ),
    *(("eagle:min_confidence=0.3", sampling) for sampling in SAMPLINGS),
    *(("draft_model, trees", sampling) for sampling in SAMPLINGS),
    *(("draft_model:num_speculative_tokens=3,expand=3,max_nodes=8", sampling) for sampling in SAMPLINGS),
]


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [*LEARNED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in LEARNED)],
)
def test_learned_drafts_on_the_device_are_those_of_the_host(
    cuda: Accelerator, drafter: str, sampling: str
) -> None:
    lab = lab_on(torch.float64)
    spec, params = with_trained(DRAFTERS.get(drafter, drafter)), SAMPLINGS[sampling]

    def drafted(target: Any) -> list[Any]:
        watch: Any = Watch()
        engine = Engine(target, spec, adaptive=False, slots=2, observer=watch)
        engine.generate(lab.prompts[:2], params)
        return watch.seen

    expected = drafted(CausalTarget(embedded(torch.float64), check=False))
    with cuda:
        assert drafted(CausalTarget(embedded(torch.float64).to("cuda:0"), check=False)) == expected


# Drafters in published files, and options.
PUBLISHED = {
    "peagle": ("peagle", ",max_nodes=9"),
    "deepseek, gated": ("dflash", ",max_nodes=9"),
    "pard": ("draft_model", ",expand=3,max_nodes=9"),
    "deepseek, rnn": ("dflash", ""),
    "dflash 2": ("dflash", ",max_nodes=9"),
    "jetspec": ("dflash", ",max_nodes=9"),
}
CUT = [(name, ("cut", "greedy")[place % 2]) for place, name in enumerate([*PUBLISHED][1:])]


@pytest.mark.parametrize(
    ("name", "sampling"),
    # The kernel of draws after cuts takes an interpreter half a minute.
    first(2, [pytest.param(*case) for case in (("peagle", "greedy"), ("deepseek, gated", "greedy"), *CUT)]),
)
def test_published_drafts_on_the_device_are_those_of_the_host(
    cuda: Accelerator, name: str, sampling: str, tmp_path: Path
) -> None:
    """With a read for each draft and one for each verdict."""
    kind, options = PUBLISHED[name]
    if name == "pard":
        formats.plain_model(tmp_path, pard_token=96)
    elif name == "peagle":
        formats.eagles.write(tmp_path, formats.peagles.THEIRS, formats.peagles.tensors())
    else:
        formats.kin(name)(tmp_path)
    spec = f"{kind}:{'model' if kind == 'draft_model' else 'path'}={tmp_path}{options}"
    stock = formats.llama().model

    def drafted(target: CausalTarget, on: Accelerator | None = None) -> list[Any]:
        watch: Any = Watch()
        engine = Engine(target, spec, adaptive=False, slots=2, observer=watch)
        for prompt in formats.PROMPTS:
            engine.add(prompt, SAMPLINGS[sampling])
        engine.step()
        steps = 0
        if on is not None:
            on.counts.clear()
        while engine.sequences:
            engine.step()
            steps += 1
        if on is not None:
            counts = on.counts.per(steps)
            assert counts["reads"] <= 2 and not counts["blocking"], on.counts.lines("reads", steps)
        return watch.seen

    expected = drafted(CausalTarget(copy.deepcopy(stock), check=False))
    with cuda:
        found = drafted(CausalTarget(copy.deepcopy(stock).to("cuda:0"), check=False), cuda)
    assert found == expected and sum(len(tokens) for tokens, *_ in found) > 20


def test_a_module_that_cannot_be_captured_is_launched(
    cuda: Accelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = lab_on(torch.float64)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotCaptured("not permitted")

    def decoded(target: CausalTarget) -> list[list[int]]:
        engine = Engine(target, "eagle:num_speculative_tokens=2", adaptive=False)
        return [one.tokens for one in engine.generate(lab.prompts[:1], PARAMS)]

    expected = decoded(CausalTarget(embedded(torch.float64), check=False))
    with cuda, caplog.at_level(logging.WARNING):
        target = CausalTarget(embedded(torch.float64).to("cuda:0"), check=False)
        shapes = target.shapes_beside()
        assert shapes is not None and target._fixed is not None
        monkeypatch.setattr(shapes.runner, "capture", fails)
        monkeypatch.setattr(target, "shapes_beside", lambda: shapes)
        assert decoded(target) == expected
        assert captured(target)
    assert [record.message for record in caplog.records] == [
        "a drafter's module on this GPU is launched one kernel at a time: not permitted"
    ]


def test_lanes_grow(target: CausalTarget, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of answers: shapes over the old memory are gone, and captured anew."""
    monkeypatch.setattr(FixedCache, "_least_room", 8)
    monkeypatch.setattr(scheduler, "_ANSWER", 0)
    monkeypatch.setattr(scheduler, "_DRAFT", 0)
    engine = Engine(target, slots=3, length=8)
    seen = set()
    for prompt in PROMPTS:
        engine.add(prompt, PARAMS)
    sequences = engine.sequences
    while engine.sequences:
        engine.step()
        seen |= {shape[2] for shapes in target._fixed.known.values() for shape in shapes}
    assert [sequence.output for sequence in sequences] == plain
    assert seen == {8, 16, 32}
    assert {shape[2] for shapes in target._fixed.known.values() for shape in shapes} != seen


def test_memory_is_kept_for_later_requests(target: CausalTarget, plain: list[list[int]]) -> None:
    engine = Engine(target, slots=3)
    assert tokens(engine) == plain
    before = captured(target)
    assert tokens(engine) == plain
    assert captured(target) == before


def test_what_cannot_be_captured_is_launched(
    target: CausalTarget,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    engine = Engine(target)
    with caplog.at_level(logging.WARNING):
        assert tokens(engine) == tokens(engine) == plain
    (line,) = [record.message for record in caplog.records]
    assert "one kernel at a time" in line and "not permitted" in line
    assert "not permitted" in target.plan.no_graphs and "graphs" in str(target.plan)
    with pytest.raises(OutpaceError, match="leave static out"):
        tokens(Engine(CausalTarget(target.model, static=True, check=False), slots=3))


@pytest.mark.parametrize("share", [1, 3])
def test_shapes_have_a_limit_of_memory(target: CausalTarget, plain: list[list[int]], share: int) -> None:
    """Those that were unused for longest go; a step that needs one captures it anew."""
    assert target._fixed is not None
    assert target._fixed.most == (80 << 30) // 16
    target._fixed.most = share * (2 << 20) + (1 << 20)
    engine = Engine(target, "lookahead:window=3,ngram=3,guesses=2", adaptive=False, slots=3)
    assert tokens(engine) == plain
    assert captured(target) == share


def test_memory_that_runs_out_in_a_capture(
    target: CausalTarget, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was captured before is dropped, and the capture repeated."""
    real, left = target._fixed.runner.capture, [2]

    def capture(forward: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(forward)

    monkeypatch.setattr(target._fixed.runner, "capture", capture)
    engine = Engine(target, "lookahead:window=3,ngram=3,guesses=2", adaptive=False, slots=3)
    assert tokens(engine) == plain
    assert left[0] < 0


def test_a_sequence_that_does_not_fit_waits(
    target: CausalTarget, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out while a lane is widened leaves the lane as it was."""
    real = Lane.resize

    def resize(lane: Lane, places: int, room: int) -> None:
        if places > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(lane, places, room)

    monkeypatch.setattr(Lane, "resize", resize)
    engine = Engine(target, max_running=3)
    for prompt in PROMPTS:
        engine.add(prompt, PARAMS)
    sequences = engine.sequences
    most = 0
    while engine.sequences:
        engine.step()
        most = max(most, len(engine._batch.cache))
    assert [sequence.output for sequence in sequences] == plain
    assert most == 3  # each in a lane of its own


def test_growth_is_counted_with_its_peak(target: CausalTarget) -> None:
    """A lane is not widened if its old and new rows together exceed the capacity."""
    shapes = target._modules.shapes
    cache = FixedCache(shapes, 1, 1024, capacity=2048)
    slot = cache.allocate(1024)
    cache.allocate(1024)  # another lane
    assert len(cache._lanes) == 2 and cache.reserved == 2048
    grown = FixedCache(shapes, 1, 1024, capacity=4096)
    slot = grown.allocate(1024)
    grown.reserve(slot, 2048)
    assert grown.reserved == 2048


@pytest.mark.parametrize(("static", "kind"), [("auto", FixedCache), (True, StaticCache), (False, KVCache)])
def test_caches(cuda: Accelerator, static: Any, kind: type) -> None:
    with cuda:
        made = CausalTarget(model().to("cuda:0"), static=static, check=False)
        assert type(made.new_cache()) is kind
    assert type(CausalTarget(model(), check=False).new_cache()) is KVCache


@pytest.mark.parametrize(
    ("devices", "given", "reason"),
    [
        ({"cuda:0"}, {}, ""),
        ({"cuda:0", "cuda:1"}, {}, "layers are on 2 devices"),
        ({"cuda:0", "cpu"}, {}, "it is for GPUs of CUDA"),
        ({"mps:0"}, {}, "it is for GPUs of CUDA"),
        ({"cuda:0"}, {"stock": True}, "stock steps run as transformers runs them"),
    ],
)
def test_where_it_is_chosen(devices: set[str], given: dict[str, Any], reason: str) -> None:
    options, why = resolved(TargetOptions(**given), set(map(torch.device, devices)), "")
    assert why == reason and options.static == (False if reason else "auto")
    assert resolved(TargetOptions(static=False), {torch.device("cuda", 0)}, "")[0].static is False


def test_prompt_chunks_are_timed_after_the_device_has_finished(
    target: CausalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def finished(device: Any = None) -> None:
        now[0] += 1

    monkeypatch.setattr(torch.cuda, "synchronize", finished)
    assert Engine(target).prefill_chunk == 2048
    engine = Engine(target, clock=lambda: now[0], prefill_chunk=4)
    seen = []
    monkeypatch.setattr(engine._batch.scheduler.pace, "measured", lambda *given: seen.append(given))
    engine.generate([PROMPTS[0]], replace(PARAMS, max_new_tokens=1))
    assert seen[0] == (0, 0, 2, 1.0)


def test_rejection_reads_once_per_step(target: CausalTarget, cuda: Accelerator) -> None:
    """One read for the draft, and one for the verdict; tokens are those of the walk on the CPU."""
    params = SAMPLINGS["cut"]
    drafts = CausalTarget(model(1).to("cuda:0"), check=False)
    engine = Engine(target, DraftModel(drafts, 4), "rejection", adaptive=False)
    engine.warm()
    sequence = engine.add(PROMPTS[0], params)
    engine.step()
    cuda.counts.clear()
    steps = 0
    while engine.sequences:
        engine.step()
        steps += 1
    counts = cuda.counts.per(steps)
    assert counts["reads"] <= 2 and not counts["blocking"], cuda.counts.lines("reads", steps)
    assert sequence.finish_reason == "length"
