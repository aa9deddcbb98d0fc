"""Options of a GGUF file reach llama.cpp, and with none of them do drafts change a token."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

import outpace
from gguf_files import gguf_file
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.policy.governor import Governor
from outpace.targets import Target
from outpace.targets.llamacpp.library import LlamaContext, library
from outpace.targets.llamacpp.self_test import Widths

PROMPTS = [[5, 6, 7, 8] * 6, [90, 80, 70, 90, 80]]
PARAMS = SamplingParams(max_new_tokens=32, temperature=0.7, seed=2, ignore_eos=True)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("q8_0", {"threads": 2}),
        ("q8_0", {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"}),
        ("q4_0", {"type_k": "q8_0", "type_v": "float16"}),
        ("float32", {"flash_attn": False}),
        ("float32", {"flash_attn": True, "type_k": "bfloat16", "type_v": "float16", "exact": True}),
        ("float32", {"exact": False}),
        ("bfloat16", {"exact": True}),
    ],
)
def test_drafts_change_no_token_with_any_option(
    dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    begin = LlamaContext.__init__

    def noted(self: LlamaContext, model: Any, cells: int, own: dict[str, Any], *more: Any) -> None:
        given.append(own)
        begin(self, model, cells, own, *more)

    target = Target(gguf_file(dtype), **{"threads": 1, **options})
    monkeypatch.setattr(LlamaContext, "__init__", noted)
    plain = Engine(target).generate(PROMPTS, PARAMS)
    for drafter in ("lookahead:window=3,ngram=3,guesses=3", "token_recycling"):
        found = Engine(target, drafter, adaptive=False).generate(PROMPTS, PARAMS)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert sum(one.stats.accepted for one in found) > 0
    flash = options.get("flash_attn", dtype != "float32")
    types = {"float32": 0, "float16": 1, "q8_0": 8, "bfloat16": 30}
    usual = ("float32", "float32") if dtype == "float32" else ("bfloat16", "float16")
    keys, values = options.get("type_k", usual[0]), options.get("type_v", usual[1])
    threads = options.get("threads", 1)
    expected = {
        "n_threads": threads,
        "n_threads_batch": threads,
        "flash_attn_type": int(flash),
        "type_k": types[keys],
        "type_v": types[values],
    }
    assert given and all(own == expected for own in given)
    if "exact" in options:
        assert options["exact"] == (target.widths != Widths()) == target.bit_exact


def test_layers_on_a_gpu_are_refused_by_a_build_without_one() -> None:
    if library().llama_supports_gpu_offload():
        pytest.skip("this llama.cpp was built for a GPU")
    with pytest.raises(OutpaceError, match="was built for the CPU alone; leave it out"):
        Target(gguf_file("q8_0"), n_gpu_layers=-1)


def test_layers_on_a_gpu_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    load = library().llama_model_load_from_file

    def noted(path: bytes, params: Any) -> Any:
        asked.append(params.n_gpu_layers)
        return load(path, params)

    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(library(), "llama_model_load_from_file", noted)
    target = Target(gguf_file("q8_0"), n_gpu_layers=3, threads=1)
    assert asked == [3] and not target.bit_exact and "GPU" in target.why_inexact


def test_options_on_the_command_line_are_those_of_a_target() -> None:
    given = "threads=2,type_v=q8_0,exact=false,repack=false,check=false"
    options = outpace.load(str(gguf_file("q8_0")), llamacpp=given).target.options  # type: ignore[attr-defined]
    assert (options.threads, options.type_v, options.exact, options.check) == (2, "q8_0", False, False)
    assert options.repack is False
    with pytest.raises(OutpaceError, match="no option 'thread'"):
        outpace.load(str(gguf_file("q8_0")), llamacpp="thread=2")


def test_the_self_test_measures_forwards_for_governors() -> None:
    target = Target(gguf_file("q8_0"), threads=1)
    assert {1, 2, 4} < set(target.seconds) and max(target.seconds) > 30
    assert all(seconds > 0 for seconds in target.seconds.values())
    governor = Engine(target, "suffix").governor
    assert isinstance(governor, Governor)
    assert governor.costs()["verify"]["1"] == [list(pair) for pair in target.seconds.items()]
    assert not Target(gguf_file("q8_0"), threads=1, check=False).seconds
    before = dict(target.seconds)
    Engine(target, "suffix").generate(PROMPTS, PARAMS)
    assert target.seconds == before  # the steps of an engine are not among them
