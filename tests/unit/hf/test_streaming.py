"""Streamers: the prompt, then one token per put, then the end, also after an error."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from outpace.drafters.parallel.lookahead import Lookahead
from unit.hf.tiny import NEVER


class Tape(BaseStreamer):
    """Records every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.calls.append((tuple(value.shape), value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


def test_calls_equal_stock(plain: Any, fast: Any, one: Any) -> None:
    stock, ours = Tape(), Tape()
    options = {"max_new_tokens": 30}
    expected = plain.generate(**one, **options, streamer=stock)
    found = fast.generate(**one, **options, streamer=ours)
    assert found.tolist() == expected.tolist()
    assert ours.calls == stock.calls
    assert len(ours.calls) == 2 + expected.shape[1] - one["input_ids"].shape[1]


def test_calls_of_a_batch_equal_stock(plain: Any, fast: Any, batch: Any) -> None:
    """A column of tokens a put, pads where a row has ended."""
    for eos in (NEVER, ord("n"), ord("e")):
        stock, ours = Tape(), Tape()
        plain.generate(**batch, max_new_tokens=25, eos_token_id=eos, streamer=stock)
        fast.generate(**batch, max_new_tokens=25, eos_token_id=eos, streamer=ours)
        assert ours.calls == stock.calls


def test_tokens_arrive_while_decoding(fast: Any, one: Any) -> None:
    counts: list[int] = []
    tape = Tape()

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts.append(len(tape.calls))
        return scores

    options = {"max_new_tokens": 30, "eos_token_id": NEVER, "streamer": tape}
    fast.generate(**one, **options, logits_processor=LogitsProcessorList([watch]))
    assert counts[0] == 1  # the prompt
    assert len(set(counts)) > 10
    # Every token of earlier steps has been put.
    assert all(count <= place + 1 for place, count in enumerate(counts))


def test_text_streamer(plain: Any, fast: Any, one: Any, tokenizer: Any, capsys: Any) -> None:
    for skip in (False, True):
        texts = []
        for model in (plain, fast):
            model.generate(**one, max_new_tokens=30, streamer=TextStreamer(tokenizer, skip_prompt=skip))
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        assert len(texts[0]) > 10


def test_text_iterator_streamer_in_a_thread(plain: Any, fast: Any, one: Any, tokenizer: Any) -> None:
    expected = tokenizer.decode(plain.generate(**one, max_new_tokens=30)[0], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, timeout=60, skip_special_tokens=True)
    thread = Thread(target=fast.generate, kwargs={**one, "max_new_tokens": 30, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


def test_streamer_with_stop_strings(plain: Any, fast: Any, one: Any, tokenizer: Any) -> None:
    stock, ours = Tape(), Tape()
    options = {"max_new_tokens": 30, "stop_strings": "o", "tokenizer": tokenizer}
    plain.generate(**one, **options, streamer=stock)
    fast.generate(**one, **options, streamer=ours)
    assert ours.calls == stock.calls


class Broken(Exception):
    pass


def test_end_comes_after_an_error_and_the_model_goes_on(plain: Any, fast: Any, one: Any) -> None:
    calls = 0

    def breaks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Broken
        return scores

    tape = Tape()
    with pytest.raises(Broken):
        fast.generate(**one, max_new_tokens=30, streamer=tape, logits_processor=LogitsProcessorList([breaks]))
    assert tape.calls.count("end") == 1 and tape.calls[-1] == "end"
    assert 1 < len(tape.calls) <= 7
    expected = plain.generate(**one, max_new_tokens=20)
    assert fast.generate(**one, max_new_tokens=20).tolist() == expected.tolist()


def test_end_comes_after_an_error_in_the_prompt(fast: Any, one: Any) -> None:
    tape = Tape()
    with pytest.raises(ValueError, match="num_beams"):
        fast.generate(**one, max_new_tokens=3, num_beams=2, streamer=tape)
    assert tape.calls[-1] == "end"


def test_an_error_in_the_streamer(plain: Any, fast: Any, one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(Lookahead, "stop", lambda _, state: stopped.append(state))

    class Full(Tape):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.calls) == 4:
                raise Broken

    tape = Full()
    with pytest.raises(Broken):
        fast.generate(**one, max_new_tokens=30, streamer=tape)
    assert tape.calls[-1] == "end"
    assert len(stopped) == 1  # the drafter can free what it holds
    expected = plain.generate(**one, max_new_tokens=20)
    assert fast.generate(**one, max_new_tokens=20).tolist() == expected.tolist()


def test_text_streamer_refuses_a_batch_as_in_stock(fast: Any, batch: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="only supports batch size 1"):
        fast.generate(**batch, max_new_tokens=3, streamer=TextStreamer(tokenizer))
