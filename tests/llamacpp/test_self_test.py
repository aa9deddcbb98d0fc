"""The self-test of a GGUF file: rounding passes, mistakes do not, and kernels are chosen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import gguf_file, quantised, random_file
from llamacpp.choices import SEVEN, THREE, forced
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets import Target
from outpace.targets.batch import Batch
from outpace.targets.llamacpp import target as target_module
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.layouts import SHARES, costs
from outpace.targets.llamacpp.library import LlamaContext
from outpace.targets.llamacpp.self_test import SelfTest, Widths
from outpace.targets.llamacpp.target import LlamaCppTarget
from outpace.targets.ranks.shared_drafts import ParallelTarget
from outpace.tree import is_chain

# Files and options whose rows have equal bits, and others that differ by rounding.
EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "q8_0": (lambda: gguf_file("q8_0"), {}),
    "q4_k_m": (lambda: quantised(random_file("llama"), "q4_k_m"), {}),
    "gemma3": (lambda: quantised(random_file("gemma3"), "q4_k_m"), {}),
    "gemma3, float16": (lambda: quantised(random_file("gemma3"), "f16"), {}),
}
ROUNDED: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (lambda: gguf_file("float32"), {}),
    "gemma3, float32": (lambda: random_file("gemma3"), {}),
    "gemma3, all rows at once": (lambda: quantised(random_file("gemma3"), "q4_k_m"), {"exact": False}),
    "without flash attention": (lambda: quantised(random_file("llama"), "q8_0"), {"flash_attn": False}),
    "q4_k_m, all rows at once": (lambda: quantised(random_file("llama"), "q4_k_m"), {"exact": False}),
    "float16, all rows at once": (lambda: quantised(random_file("llama"), "f16"), {"exact": False}),
}


def made(case: tuple[Any, dict[str, Any]]) -> Any:
    file, options = case
    return Target(file(), **{"threads": 1, "repack": False, **options})


@pytest.mark.parametrize("name", EXACT)
def test_exact_files_are_said_to_be_exact(name: str) -> None:
    target = made(EXACT[name])
    assert target.bit_exact and not target.why_inexact


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_no_mistake(name: str) -> None:
    target = made(ROUNDED[name])
    assert not target.bit_exact and target.why_inexact and target.seconds


def in_trees(patch: pytest.MonkeyPatch, change: Any) -> None:
    begin = LlamaCache.begin

    def wrong(self: LlamaCache, feeds: Any) -> Any:
        found = begin(self, feeds)
        for places, rows in zip(found, feeds.rows.values(), strict=True):
            if not is_chain(rows.tree):
                change(places)
        return found

    patch.setattr(LlamaCache, "begin", wrong)


def siblings_in_each_others_lanes(patch: pytest.MonkeyPatch) -> None:
    def change(places: Any) -> None:
        places.lanes[1], places.lanes[2] = places.lanes[2], places.lanes[1]

    in_trees(patch, change)


def a_lane_without_some_rows(patch: pytest.MonkeyPatch) -> None:
    share = LlamaContext.share

    def wrong(self: LlamaContext, source: int, lane: int, start: int, stop: int) -> None:
        if lane and not start and stop > 9:
            share(self, source, lane, 0, 3)
            start = stop - 6
        share(self, source, lane, start, stop)

    patch.setattr(LlamaContext, "share", wrong)


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def change(places: Any) -> None:
        every = sorted({lane for lanes in places.lanes for lane in lanes})
        places.lanes[:] = [every for _ in places.lanes]

    in_trees(patch, change)


def a_shifted_position(patch: pytest.MonkeyPatch) -> None:
    def change(places: Any) -> None:
        places.positions[:] = [position + 1 for position in places.positions]

    in_trees(patch, change)


# Mistakes, and how they are told: llama.cpp itself refuses some.
MISTAKES = {
    siblings_in_each_others_lanes: "see more than their ancestors",
    a_lane_without_some_rows: "so it is not rounding; drafts cannot be verified",
    siblings_see_each_other: r"llama\.cpp fails to decode",
    a_shifted_position: r"llama\.cpp fails to decode",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", [*EXACT, "float32", "q4_k_m, all rows at once", "without flash attention"])
def test_mistakes_are_refused(name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(OutpaceError, match=MISTAKES[mistake]):
        made({**EXACT, **ROUNDED}[name])


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (lambda: gguf_file("float32"), {}, "give flash_attn=true,type_k=bfloat16,type_v=float16"),
        (lambda: gguf_file("q8_0"), {"type_k": "float32"}, "give flash_attn=true,type_k=bfloat16"),
    ],
)
def test_exact_is_refused_where_sums_depend_on_others(file: Any, options: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Target(file(), threads=1, exact=True, **options)


def test_exact_is_refused_where_no_widths_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantised(random_file("llama"), "q4_k_m")
    if Target(path, threads=1, repack=False).widths == Widths():
        pytest.skip("on this processor rows of this file have the same bits in any number")
    monkeypatch.setattr(SelfTest, "widths", lambda self: None)
    assert "differ by" in Target(path, threads=1, repack=False).why_inexact
    with pytest.raises(UnsupportedModel, match=r"differ by .* of their spread; leave exact=true out"):
        Target(path, threads=1, repack=False, exact=True)


def test_exact_needs_the_self_test() -> None:
    with pytest.raises(OutpaceError, match="leave check=false out"):
        Target(gguf_file("q8_0"), exact=True, check=False, threads=1)


# -- the choice of kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "seconds", "repack"),
    [
        ([Widths()], None, True),  # nothing is better
        ([THREE, SEVEN], [1.0, 1.2], False),
        ([THREE, SEVEN], [1.0, 2.0], True),  # clearly faster
        ([SEVEN, THREE], [1.2, 1.0], True),
        ([SEVEN, THREE], [2.0, 1.0], False),
        ([None, SEVEN], None, False),  # exact at any cost
        ([SEVEN, None], None, True),
        ([None, None], None, True),
    ],
)
def test_weights_are_repacked_as_measured(
    found: list[Any], seconds: Any, repack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = forced(monkeypatch, found, seconds)
    monkeypatch.setattr(LlamaCppTarget, "_differences", lambda self: (0.0, {1: 3.0, 40: 5.0}))
    target = LlamaCppTarget(gguf_file("q8_0"), threads=1)
    assert target.repack == repack and loaded == [True, False][: len(found)]
    assert target.widths == (found[0 if repack else 1] or Widths())
    assert ("not repacked" in target.identity) != repack
    measured = {} if seconds is None else dict.fromkeys(SHARES, seconds[0 if repack else 1])
    assert target.seconds == {1: 3.0, 40: 5.0, **measured}
    assert list(target.seconds) == sorted(target.seconds)


def test_steps_of_both_kernels_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = Target(gguf_file("q8_0"), threads=1, check=False)
    caches, steps = [target.new_cache(), target.new_cache()], []
    forward = target.forward

    def noted(cache: Any, batch: Batch) -> Any:
        if len(batch.read):
            steps.append((len(batch.tokens), caches.index(cache), target.widths, cache.length(*batch.slots)))
        return forward(cache, batch)

    monkeypatch.setattr(target, "forward", noted)
    found = costs(target, caches, [THREE, SEVEN])
    assert [set(side) for side in found] == [set(SHARES)] * 2
    assert min(second for side in found for second in side.values()) > 0
    rows = [step[0] for step in steps[::2]]
    assert steps[::2] == [(each, 0, THREE, 1) for each in rows]
    assert steps[1::2] == [(each, 1, SEVEN, 1) for each in rows]
    assert all(rows.count(each) >= 3 for each in SHARES) and set(rows) == set(SHARES)


def test_kernels_that_end_the_process_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "amx_fails", lambda folder: True)
    assert not Target(gguf_file("q8_0"), threads=1, check=False).repack  # type: ignore[attr-defined]
    with pytest.raises(OutpaceError, match=r"repack=true: this build .* AMX; .* install it again"):
        Target(gguf_file("q8_0"), repack=True)


@pytest.mark.parametrize("repack", [True, False])
def test_the_option_reaches_the_library(repack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    load = target_module.library().llama_model_load_from_file

    def noted(path: bytes, params: Any) -> Any:
        given.append(params.use_extra_bufts)
        params.use_extra_bufts = False
        return load(path, params)

    monkeypatch.setattr(target_module, "amx_fails", lambda folder: False)
    monkeypatch.setattr(target_module.library(), "llama_model_load_from_file", noted)
    Target(gguf_file("q8_0"), repack=repack, check=False)
    assert given == [repack]


def test_ranks_that_share_drafts_are_refused_where_prompts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = Target(gguf_file("q8_0"), threads=1, check=False)
    ParallelTarget(target, Any)
    monkeypatch.setattr(target, "widths", SEVEN)
    with pytest.raises(UnsupportedModel, match="leave --parallel draft out"):
        ParallelTarget(target, Any)


def test_padding_leaves_no_row() -> None:
    for kind in ("q4_k_m", "iq4_nl", "f16"):
        target: Any = Target(quantised(random_file("llama"), kind), threads=1, repack=False)
        assert target.widths != Widths()
        cache = target.new_cache(1, 64)
        slot = cache.allocate()
        SelfTest(target)._chains(cache, [slot], [1, 9, 1])
        context: LlamaContext = cache.context
        assert context._lib.llama_memory_seq_pos_max(context._memory, 0) == -1
