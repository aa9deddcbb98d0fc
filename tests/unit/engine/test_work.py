"""Work of single requests beside a stream: it gets no more of the machine than the stream's steps.

The clock counts rows and modules instead of seconds, so that what is tested does not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from image_models import picture, seeing
from models import tiny_llama
from outpace.cache import CacheFull
from outpace.core import Draft, SamplingParams
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.support import runner
from outpace.engine import engine as engine_module
from outpace.engine import errand, running
from outpace.engine.clock import Allowance
from outpace.engine.engine import Engine
from outpace.engine.errand import Errand, Stopping
from outpace.engine.works import Encoding, Score, Work, Works
from outpace.sequence import Sequence
from outpace.targets import Target
from outpace.targets.batch import Batch

LONG = SamplingParams(max_new_tokens=1500, ignore_eos=True)
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


class Ticks:
    """A clock of rows and modules: those of steps, and those of work."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.place = "work"
        self.left = 1000  # pieces of what drafters prepare

    def __call__(self) -> float:
        return float(self.spent.total())

    def count(self, owner: Any, name: str, ticks: Callable[..., int], place: str | None = None) -> None:
        """Count calls of a method."""
        method = getattr(owner, name)

        def counted(*given: Any, **more: Any) -> Any:
            self.spent[place or self.place] += ticks(*given, **more)
            return method(*given, **more)

        setattr(owner, name, counted)

    def steps_beside(self, engine: Engine, works: Works, ended: Callable[[], bool]) -> int:
        """Run steps until work has ended; return their number."""
        steps = 0
        while not ended():
            self.place = "steps"
            engine.step()
            self.place = "work"
            works.advance(engine)
            steps += 1
        return steps


def rows_of(cache: Any, batch: Batch, *given: Any, **more: Any) -> int:
    return len(batch.tokens)


def decoding(target: Any, ticks: Ticks, drafter: Any = None, **more: Any) -> tuple[Engine, Sequence]:
    """An engine with a stream, and the stream."""
    engine = Engine(target, drafter, clock=ticks, adaptive=False, **more)
    ticks.count(target, "forward", rows_of)
    stream = engine.add([3, 5, 8], LONG)
    ticks.place = "steps"
    for _ in range(4):
        engine.step()
    ticks.spent.clear()
    return engine, stream


def done(engine: Engine, ticks: Ticks, *works: Work) -> tuple[list[Any], int]:
    """The results of works beside a stream, and the number of steps meanwhile."""
    found: list[Any] = []
    waiting = Works()
    for one in works:
        one.answer = found.append
        waiting.add(one)
    steps = ticks.steps_beside(engine, waiting, lambda: len(found) == len(works))
    return found, steps


def check(ticks: Ticks, steps: int, piece: int, least: int) -> None:
    """Check that the stream had half of the ticks, but for one piece, and that there was work to cut."""
    assert ticks.spent["work"] >= least
    assert ticks.spent["work"] - piece <= ticks.spent["steps"] <= steps * 2


def never() -> bool:
    return False


def source_of(count: int) -> Any:
    """A prompt with images, as the model's processor makes it."""
    from io import BytesIO

    from PIL import Image

    reader = seeing().images
    assert reader is not None
    images = [Image.open(BytesIO(picture(seed))).convert("RGB") for seed in range(count)]
    return reader.prompt("user: " + "<image>" * count + "\nassistant:", images)


def test_images_are_encoded_between_steps_with_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, target = Ticks(), seeing().target
    monkeypatch.setattr(target, "forward", target.forward)  # which is counted, and is itself again

    def counted(stop: Callable[[], None]) -> Any:
        def both() -> None:
            ticks.spent["work"] += 1
            stop()

        return Stopping(both)

    monkeypatch.setattr(engine_module, "Stopping", counted)
    tokens, source = source_of(6)
    wanted = target.encode(source)
    assert wanted is not None
    engine, stream = decoding(target, ticks)
    (found,), steps = done(engine, ticks, Encoding(print, never, source))
    assert torch.equal(found.states, wanted.states)
    check(ticks, steps, 1, 40)
    assert stream.finish_reason is None
    beside = engine.add(tokens, SamplingParams(max_new_tokens=5, ignore_eos=True), source=found)
    while beside.finish_reason is None:
        engine.step()
    (alone,) = Engine(target).generate([tokens], beside.params, sources=[source])
    assert beside.output == alone.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_functions_of_an_encoder_are_computed_in_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products, attention and convolutions."""
    monkeypatch.setattr(errand, "_AT_ONCE", 2**12)
    monkeypatch.setattr(errand, "_ROWS", 8)
    numbers = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(dtype)

    weight, patches, frames = tensor(24, 16), tensor(9, 3, 4, 4), tensor(9, 3, 2, 4, 4)
    states = [tensor(3, 4, 7, 8) for _ in range(3)]
    attend = functional.scaled_dot_product_attention
    masks = [torch.rand(size, 1, 7, 7, generator=numbers).gt(0.2) | torch.eye(7).bool() for size in (3, 1)]
    cases: list[tuple[Callable[..., torch.Tensor], Any, dict[str, Any], int]] = [
        (functional.linear, (tensor(3, 33, 16), weight, tensor(24)), {}, 9),
        (functional.linear, (tensor(99, 16), weight), {}, 9),
        (functional.linear, (tensor(16), weight), {}, 1),
        (functional.conv2d, (tensor(5, 3, 8, 8), patches, tensor(9), 4), {}, 2),
        (functional.conv3d, (tensor(50, 3, 2, 4, 4), frames), {}, 10),
        (attend, states, {"is_causal": True}, 2),
        (attend, states, {"attn_mask": masks[0]}, 2),
        (attend, states, {"attn_mask": masks[1], "scale": 0.5}, 2),
    ]
    for work, given, more, parts in cases:
        stops = list[None]()
        with Stopping(lambda stops=stops: stops.append(None)):  # type: ignore[misc]
            found = work(*given, **more)
        assert len(stops) == parts
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, work(*given, **more), **close)


def test_texts_are_scored_between_steps_and_clients_take_turns() -> None:
    ticks, target = Ticks(), Target(tiny_llama(context=2048))
    texts = [[(7 * place + client) % 30 + 1 for place in range(300)] for client in range(3)]
    alone = [[one.logprob for some in Engine(target).score(text, 2) for one in some] for text in texts]
    engine, _ = decoding(target, ticks)
    works = [
        Score(print, never, text, 2, client)
        for text, client in ((texts[0], "a"), (texts[1], "a"), (texts[2], "b"))
    ]
    found, steps = done(engine, ticks, *works)
    check(ticks, steps, 128, 900)
    assert steps > 700
    for one, place in zip(found, (0, 2, 1), strict=True):
        assert [token.logprob for token in one] == pytest.approx(alone[place])


def test_a_text_to_score_waits_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others have them: streams, and texts that are being scored. One that never fits is refused."""
    target = Target(tiny_llama(context=2048))
    size = target.new_cache(1).copied_bytes(1)
    text = [(7 * place) % 30 + 1 for place in range(300)]
    engine = Engine(target, max_running=2, memory=700 * size, adaptive=False)
    alone = [[one.logprob for one in some] for some in engine.score(text)]
    stream = engine.add(text[:200], SamplingParams(max_new_tokens=300, ignore_eos=True))
    while stream.place is None:
        engine.step()
    found: list[Any] = []
    begun: list[int] = []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda *given: begun.append(1) or score(*given))
    works = Works()
    for tokens, client in ((text, "a"), (text, "b"), (text * 3, "c")):
        works.add(Score(found.append, never, tokens, 0, client))
    while works:
        if engine.sequences:
            engine.step()
        works.advance(engine)
    assert len(begun) > 4, "one of them waited"
    (refused,) = (one for one in found if isinstance(one, CacheFull))
    assert "900 rows" in str(refused)
    scored = [[token.logprob for token in one] for one in found if one is not refused]
    assert scored == [pytest.approx([one for some in alone for one in some])] * 2
    assert len(engine._batch.cache) == 0


def test_cached_rows_are_copied_between_steps() -> None:
    ticks, target = Ticks(), Target(tiny_llama(context=2048))
    prompt = [(5 * place) % 30 + 1 for place in range(161)]
    engine, stream = decoding(target, ticks, prefix_cache=2**24)
    (alone,) = engine.generate([prompt], ONE)
    ticks.spent.clear()
    ticks.count(engine._batch.cache, "write_rows", lambda slot, rows: 32, "work")
    asked = [engine.add(prompt, ONE) for _ in range(5)]
    steps = ticks.steps_beside(engine, Works(), lambda: all(one.finish_reason for one in asked))
    assert all(one.output == alone.tokens and one.stats.cached_tokens == 160 for one in asked)
    assert ticks.spent["work"] == 5 * 160 and steps > 3 * 160
    assert stream.finish_reason is None


@dataclass(frozen=True)
class _Slow(SequenceDrafter[int]):
    """A drafter that reads a prompt row by row when it starts."""

    paper = "none"
    ticks: Any = None

    def start(self, sequence: Sequence, shared: Any) -> int:
        self.ticks.spent["work"] += len(sequence.tokens)
        return 0

    def catch_up(self, state: int) -> bool:
        self.ticks.spent["work"] += 20
        self.ticks.left -= 1
        return bool(self.ticks.left % 5 == 0)

    def draft(self, state: int) -> Draft:
        return Draft()


def test_drafters_first_look_at_prompts_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LONG", 16)
    ticks, target = Ticks(), Target(tiny_llama(context=2048))
    prompts = [[(5 * place + first) % 30 + 1 for place in range(100)] for first in range(5)]
    alone = [one.tokens for one in Engine(target).generate(prompts, ONE)]
    engine, stream = decoding(target, ticks, _Slow(ticks))
    asked = [engine.add(prompt, ONE) for prompt in prompts]
    steps = ticks.steps_beside(engine, Works(), lambda: all(one.finish_reason for one in asked))
    assert [one.output for one in asked] == alone
    assert ticks.spent["work"] == 500 + (1000 - ticks.left) * 20 > 600 and steps > 300
    assert stream.finish_reason is None


def test_a_draft_model_reads_a_prompt_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LONG", 16)
    monkeypatch.setattr(runner, "_CHUNK", 32)
    ticks, target, draft = Ticks(), Target(tiny_llama(context=2048)), Target(tiny_llama(context=2048, seed=1))
    prompts = [[(5 * place + first) % 30 + 1 for place in range(200)] for first in range(2)]
    few = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone = [one.tokens for one in Engine(target).generate(prompts, few)]
    engine, stream = decoding(target, ticks, DraftModel(draft))
    widths: list[int] = []
    forward = draft.forward

    def counted(cache: Any, batch: Batch, *given: Any, **more: Any) -> Any:
        widths.append(rows_of(cache, batch))
        if widths[-1] >= 32:
            ticks.spent["work"] += widths[-1]
        return forward(cache, batch, *given, **more)

    draft.forward = counted  # type: ignore[method-assign]
    asked = [engine.add(prompt, few) for prompt in prompts]
    steps = ticks.steps_beside(engine, Works(), lambda: all(one.finish_reason for one in asked))
    assert [one.output for one in asked] == alone
    assert max(widths) <= 40 and ticks.spent["work"] > 300  # no prompt is read at once
    assert steps > 10 and stream.finish_reason is None


def test_masks_of_some_leave_steps_to_others() -> None:
    ticks, target = Ticks(), Target(tiny_llama(context=2048))
    prompts = [[first + 1, 2, 3] for first in range(4)]
    few = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone = [one.tokens for one in Engine(target).generate(prompts, few)]

    def slow(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ticks.spent["work"] += 30
        return scores

    engine, stream = decoding(target, ticks)
    asked = [engine.add(prompt, replace(few, logits_processors=[slow])) for prompt in prompts]
    steps = ticks.steps_beside(engine, Works(), lambda: all(one.finish_reason for one in asked))
    assert [one.output for one in asked] == alone
    assert ticks.spent["work"] == 4 * 6 * 30
    assert ticks.spent["steps"] >= ticks.spent["work"] - 4 * 30 and stream.output_length > 500
    assert steps < 1000
    engine.remove(stream)
    before = ticks.spent["steps"]
    engine.generate(prompts, replace(few, logits_processors=[slow]))  # among themselves they wait for nothing
    assert ticks.spent["steps"] - before < 60


def test_work_is_free_where_nothing_is_decoded() -> None:
    ticks, target = Ticks(), Target(tiny_llama(context=2048))
    engine = Engine(target, clock=ticks)
    found: list[Any] = []
    works = Works()
    works.add(Score(found.append, never, [1, 2, 3] * 100, 0))
    for _ in range(5):
        works.advance(engine)
    assert len(found) == 1 and not works


def test_an_allowance_saves_no_more_than_a_step() -> None:
    allowance = Allowance(lambda: 0.0, lambda: True)
    assert allowance.open
    for _ in range(100):
        allowance.earn(2.0, 0.5)
    assert allowance.seconds == 1.5
    allowance.spend(4.0)
    assert not allowance.open
    allowance.earn(2.0, 0.5)
    assert not allowance.open
    allowance.earn(2.0, 3.0)  # prompts have had all that work might have
    assert not allowance.open
    allowance.earn(2.0, 0.0)
    assert allowance.open


def test_an_errand_stops_ends_and_can_be_left() -> None:
    done: list[int] = []

    def work(stop: Callable[[], None]) -> int:
        for number in range(5):
            stop()
            done.append(number)
        return 7

    errand = Errand(work, lambda: 0.0)
    for stops in range(5):
        assert not errand.advance(0) and len(done) == stops
    assert errand.advance(0) and errand.result() == 7

    left = Errand(work, lambda: 0.0)
    left.advance(0)
    left.close()
    assert len(done) == 5

    def wrong(stop: Callable[[], None]) -> int:
        raise ValueError("so")

    failed = Errand(wrong, lambda: 0.0)
    assert failed.advance(0)
    with pytest.raises(ValueError, match="so"):
        failed.result()
