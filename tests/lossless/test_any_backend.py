"""Any backend fits: a target whose cache is lists decodes with every kind of draft as it decodes plainly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from list_target import ListCache, ListTarget
from outpace.cache import Slot
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.noise import Key, noisy_argmax
from outpace.engine.engine import Engine
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from parts import in_turn

PROMPTS = [[3, 9, 2, 7, 3, 9], [5], [1, 2, 3, 1, 2, 3, 1]]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=24),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3, ignore_eos=True),
    "penalties": SamplingParams(max_new_tokens=24, repetition_penalty=1.2, presence_penalty=0.5),
}
DRAFTERS: dict[str, Callable[[], Any]] = {
    "jacobi": lambda: "jacobi",
    "lookahead": lambda: "lookahead:window=4,ngram=3,guesses=4",
    "prompt_lookup": lambda: "prompt_lookup",
    "suffix": lambda: "suffix",
    "combined": lambda: "combined:(lookahead:window=3,ngram=3)+(prompt_lookup)",
    "draft_model": lambda: DraftModel(ListTarget(surprise=0.6)),
    "draft_model, a tree": lambda: DraftModel(ListTarget(surprise=0.6), 3, branching="2x2"),
    "draft_model of tensors": lambda: DraftModel(ToyTarget(vocabulary=16)),
}


def plain(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return Engine(ListTarget()).generate([prompt], params)[0].tokens


def test_plain_decoding_is_the_argmax_after_each_text() -> None:
    target = ListTarget()
    for params in (SAMPLINGS["greedy"], SamplingParams(max_new_tokens=12, temperature=1.0, seed=8)):
        found, text = plain(PROMPTS[0], params), list(PROMPTS[0])
        for place, token in enumerate(found):
            cache = target.new_cache()
            slot = cache.allocate()
            row = target.forward(cache, Batch.of({slot: text})).logits_of(slot)[-1]
            own = int(row.argmax()) if params.greedy else noisy_argmax(row, Key(8).target(place))
            assert own == token
            text.append(token)


@pytest.mark.parametrize(("drafter", "sampling"), in_turn(DRAFTERS, SAMPLINGS))
def test_tokens_are_those_of_plain_decoding(drafter: str, sampling: str) -> None:
    """Two sequences, and a third that joins; the first to end leaves."""
    params = SAMPLINGS[sampling]
    engine = Engine(ListTarget(), DRAFTERS[drafter](), adaptive=False, prefill_chunk=4)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.step()
    sequences.append(engine.add(PROMPTS[2], params))
    while engine.sequences:
        engine.step()
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output == plain(prompt, params)
    assert sum(sequence.stats.accepted for sequence in sequences) > 0
    assert len(engine._batch.cache) == 0


def first_rows(cache: ListCache, paths: Mapping[Slot, Sequence[int]]) -> None:
    KEEP(cache, {slot: range(len(path)) for slot, path in paths.items()})


KEEP = ListCache.keep


def test_the_wrong_rows_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    params, drafter = SAMPLINGS["sampled"], "lookahead:window=4,ngram=3,guesses=4"
    expected = [plain(prompt, params) for prompt in PROMPTS]
    monkeypatch.setattr(ListCache, "keep", first_rows)
    found = Engine(ListTarget(), drafter, adaptive=False).generate(PROMPTS, params)
    assert [one.tokens for one in found] != expected


def test_what_a_backend_lacks_is_refused() -> None:
    for drafter in ("medusa", "eagle"):
        with pytest.raises(OutpaceError):
            Engine(ListTarget(), drafter)
