"""Times between tokens, from arrivals by hand and from runs; sweeps of draft lengths."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.bench.methods import with_lengths
from outpace.bench.ours import Ours
from outpace.bench.rows import latency_of
from outpace.bench.runs import MethodRun, PromptBatch
from outpace.bench.stock import StockMethod
from outpace.core import OutpaceError
from outpace.loading import Loaded


def arriving(*answers: list[float]) -> MethodRun:
    return MethodRun([[1] * len(times) for times in answers], 9.0, 0.0, 0, token_seconds=list(answers))


def test_tokens_of_one_step_arrive_together() -> None:
    """Steps of 10, 30 and 20 ms emit 2, 1 and 3 tokens; the first step's own time does not count."""
    found = latency_of([arriving([0.1, 0.1, 0.13, 0.15, 0.15, 0.15])])
    assert found is not None
    gaps = [0, 30, 20, 0, 0]
    assert found.mean == pytest.approx(10)
    assert found.variance == pytest.approx(sum((gap - 10) ** 2 for gap in gaps) / 5)
    assert (found.p50, found.p90, found.p99) == pytest.approx((0, 26, 29.6))
    assert (found.loop, found.loop_variance) == pytest.approx((25, 25))


def test_answers_together_share_the_turns_of_the_loop() -> None:
    found = latency_of([arriving([0.1, 0.2], [0.1, 0.1, 0.2, 0.4]), arriving([1.0, 1.3])])
    assert found is not None
    assert found.mean == pytest.approx((100 + 0 + 100 + 200 + 300) / 5)
    assert found.loop == pytest.approx((100 + 200 + 300) / 3)


def test_what_is_not_known_is_not_told() -> None:
    assert latency_of([arriving([0.1, 0.2]), MethodRun([[1]], 1.0, 0.5, 1)]) is None
    assert latency_of([arriving([0.1])]) is None
    assert latency_of([arriving([0.1, 0.1])]) is None  # all in the first step


@pytest.mark.parametrize("texts", [("abcabcabc",), ("abcabcabc", "xyz")])
def test_every_token_has_a_time_of_arrival(model: Loaded, texts: tuple[str, ...]) -> None:
    prompts = [model.encode(text) for text in texts]
    asked = PromptBatch(prompts, [()] * len(prompts), 24, False, 0.0, range(len(prompts)))
    methods: list[Any] = [Ours(model.target, "prompt_lookup", adaptive=False), Ours(model.target, "none")]
    kinds = ["plain", "prompt_lookup"] if len(texts) == 1 else ["plain"]
    methods += [StockMethod(model.target.model, kind, None, 0.0) for kind in kinds]
    for method in methods:
        run = method.run(asked)
        assert [len(times) for times in run.token_seconds] == [len(output) for output in run.outputs]
        moments = {moment for times in run.token_seconds for moment in times}
        assert len(moments) == run.forwards
        for times in run.token_seconds:
            assert times == sorted(times) and 0 < times[0] <= times[-1] <= run.seconds
        found = latency_of([run])
        assert found is not None and found.p50 <= found.p90 <= found.p99
        if len(texts) == 1:
            assert found.mean * 23 == pytest.approx(found.loop * (len(moments) - 1))


def test_a_sweep_of_draft_lengths() -> None:
    specs = ["none", "lookahead", "draft_model:draws=greedy", "jacobi"]
    name = "num_speculative_tokens"
    assert with_lengths(specs, (1, 4)) == [
        "none",
        "lookahead",
        f"draft_model:draws=greedy,{name}=1",
        f"draft_model:draws=greedy,{name}=4",
        f"jacobi:{name}=1",
        f"jacobi:{name}=4",
    ]
    with pytest.raises(OutpaceError, match="no drafter of --drafters has num_speculative_tokens"):
        with_lengths(["none", "lookahead"], (1, 4))
    with pytest.raises(OutpaceError, match="leave num_speculative_tokens out of jacobi"):
        with_lengths([f"jacobi:{name}=3"], (1, 4))
