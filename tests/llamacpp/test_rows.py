"""Files whose rows change bits with their number in a decode: a text has the same bits, however it is fed.

The log probabilities of emitted tokens are compared, to the last bit: they show a difference in a logit long
before another token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import quantised, random_file
from outpace.core import SamplingParams, TokenLogprobs
from outpace.engine.active import Active
from outpace.engine.engine import Engine
from outpace.engine.memory import Memory
from outpace.engine.running import RunningBatch
from outpace.targets import Target
from outpace.targets.batch import Building
from outpace.targets.llamacpp.amx import amx_fails
from outpace.targets.llamacpp.library import library
from outpace.targets.rows import Rows
from outpace.testing.gguf import FILE_TYPES

# Files, and whether their weights are repacked: kernels are named, so that no race decides what is tested.
# Keys are in float32, which shows differences that other types round away.
FILES = {
    "q4_k_m": ("llama", "q4_k_m", False),
    "q4_k_m, repacked": ("llama", "q4_k_m", True),
    "q6_k": ("llama", "q6_k", False),
    "q3_k_m": ("llama", "q3_k_m", False),
    "iq4_nl": ("llama", "iq4_nl", False),
    "iq4_xs": ("llama", "iq4_xs", False),
    "f16": ("llama", "f16", False),
    "sliding window": ("gemma3", "q4_k_m", False),
}
FINE = {"type_k": "float32", "type_v": "bfloat16"}
PROMPTS = [
    [(3 + 7 * place + place * place) % 61 for place in range(71)],
    [(5 + 11 * place) % 59 for place in range(40)],
    [9, 8, 7, 9, 8, 7, 9],
]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=24, logprobs=2, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.9, seed=3, logprobs=2, ignore_eos=True),
    "warm": SamplingParams(
        max_new_tokens=24, temperature=1.3, top_p=0.9, seed=8, logprobs=2, ignore_eos=True
    ),
}
DRAFTERS = (None, "reference", "suffix", "lookahead:window=4,ngram=3,guesses=4", "token_recycling")

Bits = list[tuple[int, TokenLogprobs]]


@lru_cache(maxsize=len(FILES))
def target(file: str) -> Any:
    architecture, kind, repack = FILES[file]
    if repack and amx_fails(Path(library().__file__).with_name("lib")):
        pytest.skip("this build of llama.cpp ends the process where weights are repacked for AMX")
    made = Target(quantised(random_file(architecture), kind), threads=1, repack=repack, **FINE)
    assert made.bit_exact and not made.why_inexact
    return made


def limited(file: str) -> Any:
    """The target, if its rows change bits at some number; elsewhere nothing is guarded by widths."""
    if target(file).widths.most is None:
        pytest.skip("on this processor rows of this file have the same bits in any number")
    return target(file)


def bits(sequence: Any) -> Bits:
    output = sequence.output if hasattr(sequence, "output") else sequence.tokens
    return list(zip(output, sequence.logprobs, strict=True))


@lru_cache(maxsize=64)
def plain(file: str, sampling: str) -> list[Bits]:
    """Each prompt decoded alone, without a draft, its prompt in one chunk."""
    params = SAMPLINGS[sampling]
    return [bits(Engine(target(file)).generate([prompt], params)[0]) for prompt in PROMPTS]


def together(engine: Engine, params: SamplingParams, texts: Sequence[Sequence[list[int]]]) -> list[Any]:
    """Two sequences, each with its references, and a third that joins; those that end leave."""
    sequences = [engine.add(PROMPTS[place], params, references=texts[place]) for place in range(2)]
    engine.step()
    engine.step()
    sequences.append(engine.add(PROMPTS[2], params, references=texts[2]))
    while engine.sequences:
        engine.step()
    return sequences


def in_batches(file: str, drafter: str | None, sampling: str, chunk: int) -> None:
    engine = Engine(target(file), drafter, adaptive=False, prefill_chunk=chunk)
    expected = plain(file, sampling)
    # What is emitted, but for every fifth token: drafts of which some tokens are accepted and some are not.
    told = [[[token ^ (place % 5 == 4) for place, (token, _) in enumerate(text)]] for text in expected]
    found = together(engine, SAMPLINGS[sampling], told if drafter == "reference" else [[]] * 3)
    assert [bits(sequence) for sequence in found] == expected
    drafted, accepted = (sum(getattr(one.stats, name) for one in found) for name in ("drafted", "accepted"))
    assert drafter is None or drafted > accepted
    assert drafter != "reference" or accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("file", FILES)
def test_drafts_in_batches_change_no_bit(file: str, drafter: str | None, sampling: str) -> None:
    in_batches(file, drafter, sampling, chunk=24)


@pytest.mark.parametrize("chunk", [1, 5, 13, 64, 512])
@pytest.mark.parametrize("file", FILES)
def test_chunks_of_prompts_change_no_bit(file: str, chunk: int) -> None:
    in_batches(file, None, "sampled", chunk)


def with_prefixes(file: str) -> None:
    """A prompt twice, then a conversation, in which the answer is a part of the next prompt, twice."""
    params, model = replace(SAMPLINGS["sampled"], max_new_tokens=80), target(file)
    expected = bits(Engine(model).generate([PROMPTS[0]], params)[0])
    engine = Engine(model, "suffix", adaptive=False, prefix_cache=2**26)
    first = [bits(engine.generate([PROMPTS[0]], params)[0]) for _ in range(2)]
    assert first == [expected] * 2
    turn = [*PROMPTS[0], *(token for token, _ in first[0]), *PROMPTS[2]]
    alone = bits(Engine(model).generate([turn], params)[0])
    for _ in range(2):
        found = engine.generate([turn], params)[0]
        assert bits(found) == alone
        assert found.stats.cached_tokens >= 32
    # Decoded on from its answer, as after a lost connection: rows of the prompt alone are taken.
    output = [token for token, _ in first[0][:16]]
    resumed = engine.add(PROMPTS[0], params, output=output)
    while engine.sequences:
        engine.step()
    assert bits_after(resumed, 16) == first[0][16:]


def bits_after(sequence: Any, emitted: int) -> Bits:
    return list(zip(sequence.output[emitted:], sequence.logprobs, strict=True))


@pytest.mark.parametrize("file", FILES)
def test_shared_prefixes_change_no_bit(file: str) -> None:
    with_prefixes(file)


def with_preemption(file: str, chunk: int = 512) -> int:
    """Three texts of which one is taken out now and then, and fed again; returns how often."""
    params, model = replace(SAMPLINGS["sampled"], max_new_tokens=100), target(file)
    prompts = [prompt * 3 for prompt in PROMPTS[1:]] + [PROMPTS[0]]
    expected = [bits(Engine(model).generate([prompt], params)[0]) for prompt in prompts]
    engine = Engine(model, "suffix", adaptive=False, prefill_chunk=chunk)
    taken, make_room = 0, engine._batch.scheduler.make_room

    def pressed(cache: Any, release: Any) -> None:
        """Preempt the newest sequence, as if memory were short."""
        nonlocal taken
        ready = engine._batch.scheduler.ready
        if len(ready) > 1 and all(a.sequence.output_length > 9 * (1 + taken) for a in ready):
            last = min(engine._batch.active, key=lambda a: a.rank)
            release(last)
            engine._batch.scheduler.add(last.sequence)
            taken += 1
        make_room(cache, release)

    engine._batch.scheduler.make_room = pressed  # type: ignore[method-assign]
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.sequences:
        engine.step()
    assert [bits(sequence) for sequence in sequences] == expected
    return taken


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("file", FILES)
def test_rows_that_are_fed_again_keep_their_bits(file: str, chunk: int) -> None:
    assert with_preemption(file, chunk) > 2


def test_log_probabilities_of_a_prompt_do_not_depend_on_chunks() -> None:
    model = target("q4_k_m")
    text = PROMPTS[0] * 3
    told = [one for some in Engine(model).score(text) for one in some]
    assert told[: len(text) - 31] == [one for some in Engine(model).score(text[:-30]) for one in some]


# -- what the tests above guard, broken --------------------------------------------------------------------


def no_limit(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(model, "widths", replace(model.widths, most=512))


def narrow_tails(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(model, "widths", replace(model.widths, prompts=1))


def prompts_in_steps(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(type(model), "prompts_differ", False)


def rows_of_steps_in_prefixes(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(Memory, "_shared", lambda self, sequence: len(sequence.tokens) - 1)


def fed_again_as_a_prompt(patch: pytest.MonkeyPatch, model: Any) -> None:
    def wrong(self: RunningBatch, building: Building, active: Active, rows: int) -> None:
        start = self.cache.length(active.slot)
        building.add(active.slot, Rows(active.sequence.tokens[start : start + rows]), rows, rows)

    patch.setattr(RunningBatch, "add_chunk", wrong)


BUGS = {
    no_limit: lambda file: in_batches(file, "lookahead:window=4,ngram=3,guesses=4", "warm", 24),
    narrow_tails: lambda file: in_batches(file, None, "sampled", 5),
    prompts_in_steps: lambda file: in_batches(file, None, "sampled", 13),
    rows_of_steps_in_prefixes: with_prefixes,
    fed_again_as_a_prompt: with_preemption,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("file", ["q4_k_m", "q4_k_m, repacked", "iq4_xs"])
def test_bugs_change_bits(file: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = limited(file)
    for sampling in SAMPLINGS:
        plain(file, sampling)
    bug(monkeypatch, model)
    with pytest.raises(AssertionError):
        BUGS[bug](file)


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type_is_exact(kind: str) -> None:
    made = Target(quantised(random_file("llama"), kind), threads=1, exact=True, repack=False)
    assert made.bit_exact and made.prompts_differ == (made.widths.most is not None)
